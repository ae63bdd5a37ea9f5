"""Contract of the operations: memory, torch.library, torch.compile, choice of backend, errors."""

import math
import os
from typing import Any

import pytest
import torch
from closed_form import sample_constants
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rlplus
from rlplus import Objective, RLPlusLoss, linear_divergence, linear_logprob, linear_policy_loss
from rlplus.loss import TokenConstants
from rlplus.loss.backends import chunked, native
from rlplus.loss.head.head import Head
from rlplus.loss.operations import library, logprob_library
from rlplus.loss.operations.library import Options, pack

N, H, V = 12, 4, 9
CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
EVERY = pytest.mark.parametrize("backend", ["reference", "torch", CPP, "triton"])
INTERPRETED = pytest.param("triton", marks=pytest.mark.slow)  # many calls of interpreted kernels
OPS = pytest.mark.parametrize("backend", ["torch", CPP, INTERPRETED])
EVERYTHING = Objective("clip", "mis", kl_coef=0.1, entropy_coef=0.2, mismatch_cap=2.0)
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}


def sample(
    n: int = N, h: int = H, v: int = V, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Any]:
    """All tensor arguments of linear_policy_loss; hidden, weight and bias require a gradient."""
    g = torch.Generator().manual_seed(n * v)
    shapes = {"hidden": (n, h), "weight": (v, h), "bias": (v,)}
    head = {k: torch.randn(s, generator=g, dtype=dtype).to(device).requires_grad_() for k, s in shapes.items()}
    rest = {"target": torch.randint(v, (n,), generator=g)} | sample_constants((n,), 0, dtype)
    return head | {k: x.to(device) for k, x in rest.items()}


def head_of(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: inputs[k] for k in ("hidden", "weight", "bias", "target")}


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


# ---- memory


def test_the_torch_backend_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    n, v, rows = 640, 300, 32
    inputs = sample(n, H, v)
    limit = {"backend": "torch", "max_scratch_mb": rows * 2 * v * 4 / 1e6}
    seen = LargestTensor()

    def watched(function: Any) -> Any:  # a mode does not look inside a registered op unless it is entered there
        def inside(*args: Any) -> Any:
            with seen:
                return function(*args)

        return inside

    for name in ("policy_loss", "logprob", "logprob_backward"):
        seen.largest = 0
        monkeypatch.setattr(chunked, name, watched(getattr(chunked, name)))
        if name == "policy_loss":
            linear_policy_loss(**inputs, objective=EVERYTHING, **limit).loss.backward()
        else:
            logprob, entropy = linear_logprob(**head_of(inputs), **limit)
            (logprob + entropy).sum().backward()
        assert seen.largest == rows * v  # n * h, v * h and n are all smaller
    with seen:
        linear_policy_loss(**inputs, objective=EVERYTHING, backend="reference")
    assert seen.largest == n * v  # the instrument does see whole logits


@pytest.mark.skipif(os.environ.get("RLPLUS_EXT") != "1", reason="RLPLUS_EXT=1 does not demand the native library")
def test_the_native_library_loads_where_it_is_demanded() -> None:
    """The tests of the cpp backend skip without it; this one is what fails then."""
    assert native.load() is not None


# ---- torch.library and torch.compile


@pytest.mark.parametrize(("needs", "engine"), [([True, True, True], True), ([False, True, False], False)])
@OPS
def test_policy_loss_is_a_well_formed_torch_op(needs: list[bool], engine: bool, backend: str) -> None:
    inputs = {k: v.detach() for k, v in sample(device=DEVICE.get(backend, "cpu")).items()}
    names = ["advantage", "token_weight", "external", "old_logprob", "behavior_logprob", "ref_logprob"]
    names += ["entropy_weight", "engine_logprob"] if engine else []
    each = 0.5 + inputs["token_weight"] if engine else None
    head = Head(**head_of(inputs), temperature=0.7, row_temperature=each)
    parts = head, TokenConstants(**{k: inputs[k] for k in names})
    objective, options = EVERYTHING if engine else Objective(), Options(400.0, backend)
    torch.library.opcheck(library.linear_policy_loss, (needs, *pack(*parts, objective, options)))


@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]])
def test_attaching_gradients_is_a_well_formed_torch_op(needs: list[bool]) -> None:
    inputs = sample()
    tensors = [inputs[k].requires_grad_(need) for k, need in zip(("hidden", "weight", "bias"), needs, strict=True)]
    gradients = [torch.randn_like(t) for t in tensors]
    torch.library.opcheck(library.attach_gradients, (torch.randn(()), *tensors, *gradients, False))


@OPS
def test_logprob_is_a_well_formed_torch_op(backend: str) -> None:
    inputs = sample(device=DEVICE.get(backend, "cpu"))
    head = Head(inputs["hidden"], inputs["weight"], inputs["bias"], inputs["target"], 0.7, 2.0)
    torch.library.opcheck(logprob_library.linear_logprob, (*head, 400.0, backend, True))
    head = head._replace(row_temperature=torch.rand(N, device=head.hidden.device) + 0.5)
    torch.library.opcheck(logprob_library.linear_logprob, (*head._replace(bias=None, softcap=None), 1e9, backend, True))
    detached = head._replace(
        hidden=head.hidden.detach(), weight=head.weight.detach().bfloat16(), bias=head.bias.detach()
    )
    for needs in ([True, True, True], [False, True, False]):
        slopes = torch.randn(2, N, device=head.hidden.device)
        for scratch in (400.0, 1e9):  # all rows are computed again, or none
            stored = logprob_library.linear_logprob(*detached, scratch, backend, True)[2:]
            arguments = (*slopes, *stored, *detached, scratch, backend, needs)
            torch.library.opcheck(logprob_library.linear_logprob_backward, arguments)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@EVERY
def test_compiles_into_one_graph(backend: str, compiler: str) -> None:
    dtype = torch.float32 if backend in ("cpp", "triton") else torch.float64
    inputs = sample(dtype=dtype, device=DEVICE.get(backend, "cpu"))
    leaves = [inputs[k] for k in ("hidden", "weight", "bias")]

    def step(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        out = linear_policy_loss(**inputs, objective=EVERYTHING, backend=backend, max_scratch_mb=1e-3)
        logprob, entropy = linear_logprob(**head_of(inputs), backend=backend)
        return out.loss + (logprob * entropy).sum(), out.logprob, out.entropy, *out.stats.values()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    got, want = compiled(inputs), step(inputs)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out[0], leaves) for out in (got, want)]
    torch.testing.assert_close(grads[0], grads[1])


@OPS
def test_one_graph_takes_other_numbers_of_tokens_and_temperatures(backend: str) -> None:
    def step(inputs: dict[str, Any], temperature: float) -> Tensor:
        return linear_policy_loss(**inputs, objective=EVERYTHING, backend=backend, temperature=temperature).loss

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n, temperature in ((12, 1.0), (5, 0.9), (7, 0.8)):
        inputs = sample(n, device=DEVICE.get(backend, "cpu"))
        torch.testing.assert_close(compiled(inputs, temperature), step(inputs, temperature))


def test_runs_on_tensors_without_data() -> None:
    inputs = {k: v.detach().to("meta").requires_grad_(v.requires_grad) for k, v in sample().items()}
    out = linear_policy_loss(**inputs, objective=EVERYTHING)
    out.loss.backward()
    assert inputs["weight"].grad.shape == (V, H)
    assert (out.logprob.shape, out.stats["tokens"].shape) == ((N,), ())


# ---- choice of backend


def test_backend_argument_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch backend passes through the registered op, the reference does not."""
    seen: list[str] = []
    original = library.linear_policy_loss
    monkeypatch.setattr(library, "linear_policy_loss", lambda *a: (seen.append(a[-1]), original(*a))[1])
    inputs = sample()

    def uses_op(**options: Any) -> bool:
        seen.clear()
        linear_policy_loss(**inputs, **options)
        return bool(seen)

    assert uses_op()
    assert uses_op(backend="torch")
    assert not uses_op(backend="reference")
    monkeypatch.setenv("RLPLUS_BACKEND", "reference")
    assert not uses_op()
    assert uses_op(backend="torch")  # an explicit choice stands
    monkeypatch.setenv("RLPLUS_BACKEND", "")
    assert uses_op()
    monkeypatch.setenv("RLPLUS_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"one of reference, torch.*got 'cuda'"):
        uses_op()


# ---- the module


def test_module_is_the_function_with_its_options() -> None:
    inputs = sample()
    hidden, weight, target = (inputs.pop(k) for k in ("hidden", "weight", "target"))
    options = {"temperature": 0.7, "backend": "reference", "max_scratch_mb": 1.0}
    for objective in ("dapo", EVERYTHING):
        module = RLPlusLoss(objective, **options)
        resolved = Objective.preset(objective) if isinstance(objective, str) else objective
        got = module(hidden, weight, target, **inputs)
        want = linear_policy_loss(hidden, weight, target, objective=resolved, **options, **inputs)
        assert torch.equal(got.loss, want.loss)
        assert "temperature=0.7" in repr(module)
    assert RLPlusLoss().objective == Objective.preset("rlplus")
    assert not list(RLPlusLoss().parameters())
    loud = module(hidden, weight, target, **inputs, temperature=2.0)  # a call overrides the options
    assert loud.loss != got.loss


def test_module_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"got 'temprature'.*nearest: temperature"):
        RLPlusLoss(temprature=1.0)
    with pytest.raises(ValueError, match="nearest: dapo"):
        RLPlusLoss("dapoo")


# ---- errors

BAD_HEADS: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(N, H + 1)}, r"want hidden \(\.\.\., H\) and weight \(V, H\).*got .*\(12, 5\).*\(9, 4\)"),
    ({"weight": torch.zeros(V)}, r"want hidden .* and weight \(V, H\).*\(9,\)"),
    ({"weight": torch.zeros(0, H)}, r"V > 0; got .*\(0, 4\)"),
    ({"weight": torch.zeros(V, 0), "hidden": torch.zeros(N, 0)}, r"H > 0, V > 0; got .*\(9, 0\)"),
    ({"weight": None}, "got .* and NoneType"),
    ({k: torch.zeros(s, H).to(torch.float8_e4m3fn) for k, s in (("hidden", N), ("weight", V))}, "want .*; got float8"),
    (
        {"weight": torch.zeros(V, H, dtype=torch.int64)},
        "bf16, fp16, fp32 or fp64 and of one device; got float32 .*int64",
    ),
    ({"weight": torch.zeros(V, H, device="meta")}, "of one device; got .*cpu.*meta"),
    ({"target": torch.zeros(N, dtype=torch.int16)}, r"want target a tensor, int64 \(12,\) on cpu; got int16 \(12,\)"),
    ({"target": torch.zeros(N - 1, dtype=torch.int64)}, r"want target .*int64 \(12,\).*got int64 \(11,\)"),
    ({"target": torch.zeros(N, dtype=torch.int64, device="meta")}, "want target .*on cpu.*got .*on meta"),
    ({"bias": torch.zeros(V - 1)}, r"want bias .*\(9,\).*got float32 \(8,\)"),
    ({"bias": torch.zeros(V, dtype=torch.int64)}, "want bias .*floating.*got int64"),
    ({"temperature": 0.0}, "want temperature a finite number > 0; got 0.0"),
    ({"temperature": math.nan}, "want temperature a finite number > 0; got nan"),
    ({"max_scratch_mb": 0}, "want max_scratch_mb a finite number > 0; got 0"),
    ({"max_scratch_mb": "80"}, "want max_scratch_mb a finite number > 0; got '80'"),
    ({"max_scratch_mb": math.inf}, "want max_scratch_mb a finite number > 0; got inf"),
    ({"backend": "trito"}, "want backend 'auto' or one of reference, torch, cpp, triton; got 'trito'"),
]
BAD_LOSSES: list[tuple[dict[str, Any], str]] = [
    ({"advantage": torch.zeros(N + 1)}, r"want advantage .*floating \(12,\) on cpu; got float32 \(13,\)"),
    ({"token_weight": torch.ones(N, dtype=torch.complex64)}, r"want token_weight .*floating.*got complex64"),
    ({"old_logprob": torch.ones(N, dtype=torch.int64)}, r"want old_logprob .*floating.*got int64"),
    ({"external": torch.zeros(N)}, "want external .*bool.*got float32"),
    ({"engine_logprob": torch.zeros(N, device="meta")}, "want engine_logprob .*on cpu; got .*on meta"),
    ({"ref_logprob": None, "objective": Objective(kl_coef=1.0)}, "kl_coef=1 needs ref_logprob; got None"),
    ({"engine_logprob": None, "objective": Objective(mismatch_cap=1.0)}, "mismatch_cap=1 needs engine_logprob"),
    ({"objective": "rlpuls"}, "want objective one of .*got 'rlpuls'.*nearest: rlplus"),
    ({"objective": 1.0}, r"want objective an rlplus\.Objective or the name of a preset; got float"),
]


BAD_TARGETS: list[tuple[dict[str, Any], str]] = [
    ({"target": torch.full((N,), V)}, r"want target in \[0, 9\).*got a value outside"),
    ({"target": torch.full((N,), -1)}, r"want target in \[0, 9\)"),
]
BAD_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    ({"token_weight": torch.full((N,), math.nan)}, "want token_weight finite"),
    ({"entropy_weight": torch.full((N,), math.inf)}, "want entropy_weight finite"),
    ({"advantage": torch.full((N,), math.nan)}, "want advantage finite where token_weight is not 0"),
    ({"old_logprob": torch.ones(N)}, "want old_logprob in nats, at most 0; got none below 0, and some above 0.1"),
    ({"behavior_logprob": torch.full((N,), math.inf)}, "want behavior_logprob in nats, at most 0"),
]


@EVERY
@pytest.mark.parametrize(("change", "message"), BAD_HEADS + BAD_LOSSES)
def test_policy_loss_says_what_it_wanted_and_what_came(change: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**(sample() | {"backend": backend} | change))


@EVERY
@pytest.mark.parametrize(("change", "message"), BAD_HEADS)
def test_logprob_says_what_it_wanted_and_what_came(change: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_logprob(**(head_of(sample()) | {"backend": backend} | change))


# Values of CUDA tensors are asserted on the device, which ends CUDA for the whole process.
ON_CPU = pytest.mark.parametrize("backend", ["reference", "torch", CPP, *["triton"] * (DEVICE["triton"] == "cpu")])


@ON_CPU
@pytest.mark.parametrize(("change", "message"), BAD_TARGETS + BAD_WEIGHTS)
def test_policy_loss_refuses_values(change: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**(sample() | {"backend": backend} | change))


@ON_CPU
@pytest.mark.parametrize(("change", "message"), BAD_TARGETS)
def test_logprob_refuses_values(change: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        linear_logprob(**(head_of(sample()) | {"backend": backend} | change))
    assert "wherever the target is not -100" in str(error.value)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@EVERY
def test_forward_mode_is_refused_where_torch_would_return_no_tangent(name: str, backend: str) -> None:
    inputs = {k: v.to(DEVICE.get(backend, "cpu")) if isinstance(v, Tensor) else v for k, v in sample().items()}
    teacher = {"teacher_hidden": inputs["hidden"], "teacher_weight": inputs["weight"]}
    own = {k: inputs[k] for k in ("hidden", "weight", "bias", "token_weight")}
    calls = [
        lambda x: linear_policy_loss(**(inputs | {name: x, "backend": backend})).loss,
        lambda x: linear_logprob(**(head_of(inputs) | {name: x, "backend": backend}))[0],
    ]
    if backend != "cpp":
        calls.append(lambda x: linear_divergence(**(own | teacher | {name: x, "backend": backend})).loss)
    x = inputs[name].detach()
    for call in calls:
        with pytest.raises(RuntimeError, match="no forward-mode derivative; got an input with a tangent"):
            torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize(
    ("name", "message"),
    [("weight", "want bias split as weight is, a DTensor, .*; got .* a plain tensor"),
     ("hidden", r"want hidden a plain tensor; got a DTensor, float32 .*: pass hidden.full_tensor"),
     ("bias", r"want bias a plain tensor; got a DTensor, float32 .*, \(Shard\(dim=0\),\): pass bias.full_tensor")],
)  # fmt: skip
def test_a_sharded_tensor_is_refused_with_what_is_wanted(name: str, message: str) -> None:
    """As FSDP leaves parameters outside of its modules' forward passes, but for a whole head."""
    inputs = sample()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(inputs[name].detach(), mesh, [Shard(0)]).requires_grad_()
        with pytest.raises(ValueError, match=message):
            linear_policy_loss(**(inputs | {name: sharded}))
        with pytest.raises(ValueError, match=message):
            linear_logprob(**(head_of(inputs) | {name: sharded}))
        linear_policy_loss(**(inputs | {name: sharded.full_tensor()})).loss.backward()
        assert sharded.grad is not None
    finally:
        torch.distributed.destroy_process_group()


def test_the_public_names() -> None:
    assert set(rlplus.__all__) >= {
        "Objective",
        "RLPlusLoss",
        "group_advantages",
        "linear_logprob",
        "linear_policy_loss",
        "policy_loss",
        "token_weights",
    }
    assert all(hasattr(rlplus, name) for name in rlplus.__all__)
