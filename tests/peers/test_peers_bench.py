"""The calls of bench/peers.py: they exist in the pinned releases, and peers that need no GPU compute their loss."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import processes
import pytest
from trainer_runs import environment

from rlplus.bench.peers import cce_package

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[2]
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "bench/peers.txt").read_text(), re.MULTILINE))
# The package's module, the function in it, and the parameters by which it is called, in their order from the first.
CALLS = {
    "liger-kernel": [
        (
            "liger_kernel.ops.fused_linear_cross_entropy",
            "LigerFusedLinearCrossEntropyFunction.forward",
            "ctx _input weight target bias ce_weight ignore_index lse_square_scale label_smoothing reduction softcap "
            "return_z_loss accum_dtype use_token_scaling return_token_accuracy return_predicted_tokens ce_impl ce_mode "
            "chunk_mem_const",
        ),
        (
            "liger_kernel.ops.fused_linear_scaled_cross_entropy",
            "LigerFusedLinearScaledCrossEntropyFunction.apply",
            "_input weight target",
        ),
        (
            "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90",
            "LigerFusedScaledCrossEntropySM90Function.forward",
            "ctx _input weight target",
        ),
        (
            "liger_kernel.ops.backends._cutedsl.cross_entropy",
            "cross_entropy_loss_and_grad_cutedsl",
            "logits_chunk target_chunk ce_weight",
        ),
        (
            "liger_kernel.chunked_loss.grpo_loss",
            "LigerFusedLinearGRPOLoss.forward",
            "self _input lin_weight selected_token_ids attention_mask advantages bias ref_per_token_logps "
            "old_per_token_logps",
        ),
    ],
    "cut-cross-entropy": [("cut_cross_entropy.linear_cross_entropy", "linear_cross_entropy", "e c targets")],
    "trl": [
        (
            "trl.kernels.chunked_logprob",
            "ChunkedLogProbFunction.forward",
            "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs",
        )
    ],
    "verl": [
        (
            "verl.utils.experimental.torch_functional",
            "FusedLinearForPPO.forward",
            "self hidden_states vocab_weights input_ids",
        ),
        ("verl.utils.kernel.linear_cross_entropy", "LinearCrossEntropy.forward", "ctx hidden weight labels"),
    ],
    "quack-kernels": [("quack.linear_cross_entropy", "chunked_linear_cross_entropy", "x weight target")],
}
# Parts of a module's text behind a statement in bench/ or docs/kernels.md.
SAID = [
    ("liger-kernel", "liger_kernel.ops.backends._cutedsl.cross_entropy", 'impl_name="nvidia-cutedsl"'),
    ("liger-kernel", "liger_kernel.chunked_loss.fused_linear_ppo", "grad_logits @ weight_chunk.float()"),
    ("verl", "verl.utils.experimental.torch_functional", 'impl_backend not in ("torch", "liger")'),
    ("trl", "trl.kernels.chunked_logprob", "torch.zeros(weight.shape, device=weight.device, dtype=torch.float32)"),
    ("quack-kernels", "quack.gemm_runtime.identity", "{os.sep}site-packages{os.sep}"),
]


def installed(package: str) -> None:
    """Skip where it is not; fail with another release than the pinned one."""
    try:
        found = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make test-peers")
    assert found == PINS[package]


def source(module: str) -> str:
    """Without an import: some need CUDA, others what we do not install."""
    top, *inner = module.split(".")
    spec = find_spec(top)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], *inner).with_suffix(".py").read_text()


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield above + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{above}{node.name}.")


@pytest.mark.parametrize("package", CALLS)
def test_a_pinned_release_has_what_is_called(package: str) -> None:
    installed(package)
    for module, name, parameters in CALLS[package]:
        called = parameters.split()
        function = dict(functions(ast.parse(source(module))))[name]
        assert [argument.arg for argument in function.args.args][: len(called)] == called


@pytest.mark.parametrize(("package", "module", "text"), SAID, ids=[module for _, module, _ in SAID])
def test_what_is_said_of_a_peer_is_in_its_source(package: str, module: str, text: str) -> None:
    installed(package)
    assert text in source(module)


def test_cce_is_imported_with_and_without_its_search() -> None:
    installed("cut-cross-entropy")
    kinds = []
    for tuned in (False, True):
        apply = cce_package(tuned).linear_cross_entropy.__globals__["cce_linear_cross_entropy"]
        forward = apply.__globals__["cce_lse_forward_kernel"]
        kinds.append(type(forward.__globals__["_cce_lse_forward_kernel"]).__name__)
    assert kinds == ["Heuristics", "Autotuner"]


VALUES = """
import json, math
from rlplus.bench.case import Case
from rlplus.bench.measure import run
from rlplus.bench.peers import METHODS
rows = []
for kinds in ({"policy", "cross-entropy", "grpo"}, {"forward"}):
    names = tuple(name for name, m in METHODS.items() if m.package not in ("rlplus", "torch") and m.kind in kinds)
    forward = kinds == {"forward"}
    case = Case("main", 16, 16, 50, "float32", names, forward=forward, repeats=1, memory=False, seconds=math.inf)
    results = []
    run(case, "cpu", math.inf, results.append)
    rows += results[-1]["rows"]
print(json.dumps(rows))
"""


def test_peers_compute_their_loss_here_or_say_why_not() -> None:
    """In Triton's interpreter: Liger's cross-entropies have no other form for a CPU."""
    installed("liger-kernel")
    done = processes.run([sys.executable, "-c", VALUES], env=environment() | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    for row in rows.values():
        assert row["status"].startswith(("ok", "needs CUDA", "not installed")), row
        for field in ("logprob_error", "dhidden_error", "dweight_error"):
            assert row.get(field, 0) < 1e-5, row
    for name in ("Liger linear CE", "Liger linear CE 16x", "Liger none 4x", "Liger none forward", "Liger scaled CE"):
        assert rows[name]["status"] == "ok"
    assert rows["Liger none 4x"]["logprob_error"] > 0
