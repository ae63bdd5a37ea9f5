"""Scale and softcap of the logits: every backend agrees with float64, also where tanh is nearly flat."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import EVERYTHING, check_fp64, check_precision, closed, run, sample, tensors
from head_rows import REFERENCE, begun
from quick import pairs
from torch import Tensor
from trainer_runs import run_config
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM
from update_cases import batch_of_samples, naive_gradients, packed

from rlplus import Objective, RLPlusLoss, linear_logprob, linear_policy_loss
from rlplus.loss.backends import native
from rlplus.loss.head.head import Head
from rlplus.train.config import ModelConfig
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.pretrained import load_model
from rlplus.train.recipe import set_advantages
from rlplus.train.trainer import open_run

EACH = [
    pytest.param({"logit_scale": 0.25}, id="scale"),
    pytest.param({"logit_softcap": 2.0}, id="softcap"),
    pytest.param({"logit_scale": 3.0, "logit_softcap": 4.0}, id="both"),
]
TRANSFORMS = pytest.mark.parametrize("transform", EACH)
NATIVE = pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built")
CUDA = torch.cuda.is_available()
BACKENDS = ["torch", pytest.param("cpp", marks=NATIVE), "triton"]
FAST = pytest.mark.parametrize("backend", BACKENDS)


def put(backend: str, values: dict[str, Any]) -> dict[str, Any]:
    """On the device that the backend needs."""
    there = CUDA and backend == "triton"
    return {k: v.cuda() if there and isinstance(v, Tensor) else v for k, v in values.items()}


@TRANSFORMS
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("reference", {}),
        ("torch", {}),
        ("torch", {"max_scratch_mb": 3 * 16 * 23e-6}),
    ],
    ids=["reference", "torch", "torch, chunks"],
)
def test_matches_the_closed_form_in_fp64(backend: str, options: dict[str, Any], transform: dict[str, float]) -> None:
    head, constants = sample(23)
    got = run(head, constants, EVERYTHING, temperature=0.7, backend=backend, **options, **transform)
    check_fp64(got, head, constants, EVERYTHING, 0.7, **transform)


@pytest.mark.parametrize(
    ("backend", "transform", "dtype"),
    pairs(BACKENDS, EACH, [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_low_precision_inputs_keep_the_errors_of_fp32(
    backend: str, transform: dict[str, float], dtype: torch.dtype
) -> None:
    head, constants = sample(23, V=61, dtype=dtype)
    got = run(
        put(backend, head), put(backend, constants), EVERYTHING,
        temperature=0.7, backend=backend, max_scratch_mb=61 * 12 * 9e-6, **transform,
    )  # fmt: skip
    got = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in got.items()}
    rounds = (backend == "cpp" and dtype == torch.bfloat16) or (backend == "triton" and CUDA)
    check_precision(got, head, constants, EVERYTHING, 0.7, dtype if rounds else torch.float32, **transform)


@TRANSFORMS
@FAST
def test_logprob_and_entropy_are_differentiable(backend: str, transform: dict[str, float]) -> None:
    head, _ = sample(11, dtype=torch.float32)
    got, want = [], []
    for inputs, options, out in (
        (put(backend, head), {"backend": backend}, got),
        (head, {"backend": "reference"}, want),
    ):
        leaf = {k: v.double() if out is want and v.is_floating_point() else v for k, v in inputs.items()}
        leaf = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in leaf.items()}
        logprob, entropy = linear_logprob(**leaf, **options, **transform)
        (logprob.sum() - 2 * entropy.square().sum()).backward()
        out += [logprob, entropy, *(leaf[k].grad for k in ("hidden", "weight", "bias"))]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.detach().cpu().double(), b.detach(), rtol=1e-4, atol=1e-5)


@FAST
def test_the_gradient_of_saturated_logits_keeps_its_digits(backend: str) -> None:
    """1 - tanh^2 of 12 is 1.5e-10; in fp32 the difference would be 0."""
    logits = torch.cat([torch.linspace(-40, 40, 81), torch.tensor([0.0, 1e-3, 60.0, -60.0])])
    head = {"hidden": torch.ones(2, 1), "weight": logits[:, None], "bias": torch.zeros(len(logits))}
    head["target"] = torch.tensor([80, 3])
    constants = {
        "advantage": torch.ones(2),
        "token_weight": torch.ones(2),
        "external": torch.zeros(2, dtype=torch.bool),
    }
    wide = {k: v.double() if v.is_floating_point() else v for k, v in head.items()}
    options = {"logit_scale": 0.5, "logit_softcap": 1.5}
    got = run(put(backend, head), put(backend, constants), Objective(), backend=backend, **options)
    bias = wide["bias"].requires_grad_()
    x = 0.5 * (wide["hidden"] @ wide["weight"].T + bias)
    z = 1.5 * (x / 1.5).tanh()
    dz = -(torch.nn.functional.one_hot(wide["target"], len(logits)) - z.softmax(-1))
    want = (dz * 0.5 / (x / 1.5).cosh().square()).sum(0).detach()  # ratio 1, advantage 1
    torch.testing.assert_close(got["dbias"].cpu().double(), want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("kernel", ["triton", pytest.param("cpp", marks=NATIVE)])
def test_the_kernels_tanh_is_exact_to_a_few_units_in_the_last_place(kernel: str, cap: float) -> None:
    """The largest of one logit is the logit."""
    sizes = torch.cat([torch.logspace(-8, 2, 41), torch.linspace(0.2, 0.3, 11)]) * cap
    x = torch.cat([sizes, -sizes])[:, None].contiguous()
    target = torch.zeros(len(x), dtype=torch.int64)
    if kernel == "triton":
        device = "cuda" if CUDA else "cpu"
        got = begun(x.to(device), 1, target.to(device), None, 1.0, cap)[:, REFERENCE].cpu()
    else:
        got = native.row_statistics(x, Head(x, x, None, target, 1.0, cap), None)[:, 0]
    want = cap * (x.squeeze(1).double() / cap).tanh()
    assert ((got - want).abs() / want.abs()).max() < 4 * torch.finfo(torch.float32).eps


@FAST
def test_a_scale_is_a_temperature(backend: str) -> None:
    head, constants = (put(backend, x) for x in sample(11, dtype=torch.float32))
    scaled = run(head, constants, EVERYTHING, backend=backend, logit_scale=0.5, temperature=0.7)
    want = run(head, constants, EVERYTHING, backend=backend, temperature=1.4)
    assert all(torch.equal(a, b) for a, b in zip(tensors(scaled).values(), tensors(want).values(), strict=True))


@FAST
def test_infinite_logits_are_finite_behind_a_softcap(backend: str) -> None:
    head, constants = sample(5, dtype=torch.float32)
    head["bias"][[2, 9]] = torch.tensor([-torch.inf, torch.inf])
    options = {"backend": backend, "logit_softcap": 2.0}
    got = run(put(backend, head), put(backend, constants), Objective(), **options)
    far = head | {"bias": head["bias"].nan_to_num(posinf=1e6, neginf=-1e6)}
    want = closed(far, constants, Objective(), logit_softcap=2.0)
    for name, value in tensors(got).items():
        torch.testing.assert_close(value.cpu(), want[name], rtol=1e-4, atol=1e-6)
    nothing = dict.fromkeys(["hidden", "weight"], torch.zeros(3, 7)) | {"bias": torch.full((3,), -torch.inf)}
    _, entropy = linear_logprob(**put(backend, nothing | {"target": torch.zeros(3, dtype=torch.int64)}), **options)
    torch.testing.assert_close(entropy.cpu(), torch.tensor(3.0).log().expand(3))


def test_numbers_that_are_no_scale_or_softcap_are_refused() -> None:
    head, constants = sample(2)
    for name, value in (
        ("logit_scale", 0.0),
        ("logit_scale", None),
        ("logit_softcap", -1.0),
        ("logit_softcap", torch.inf),
    ):
        with pytest.raises(ValueError, match=f"want {name} a finite number > 0; got {value}"):
            linear_policy_loss(**head, **constants, objective=EVERYTHING, **{name: value})
        with pytest.raises(ValueError, match=f"want {name} a finite number > 0; got {value}"):
            linear_logprob(**head, **{name: value})


def test_a_module_takes_them_as_options() -> None:
    head, constants = sample(5)
    options = {"logit_scale": 0.5, "logit_softcap": 2.0}
    got = RLPlusLoss(EVERYTHING, **options)(
        head.pop("hidden"), head.pop("weight"), head.pop("target"), **head, **constants
    )
    want = linear_policy_loss(**sample(5)[0], **constants, objective=EVERYTHING, **options)
    assert torch.equal(got.loss, want.loss)


@pytest.mark.parametrize(
    ("kind", "config", "numbers"),
    [
        (
            Gemma2ForCausalLM,
            Gemma2Config,
            {"final_logit_softcapping": 1.0, "attn_logit_softcapping": None, "head_dim": 16},
        ),
        (CohereForCausalLM, CohereConfig, {"logit_scale": 3.0}),
    ],
)
def test_a_run_trains_the_model_that_its_class_is(
    tmp_path: Path, kind: Any, config: Any, numbers: dict[str, Any]
) -> None:
    """The gradient is the same as through the plain model's own logits."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **numbers,
    )  # fmt: skip
    path = tmp_path / "model"
    kind(model).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with open_run(run_config(tmp_path, model={"path": str(path), "scratch": None})) as built:
        samples = batch_of_samples()
        set_advantages(samples, built.recipe.algorithm)
        lm = built.policy.engine.module
        for batch in packed(built, samples):
            lm(batch, built.policy._loss_op(built.recipe.algorithm.objective, batch)).loss.backward()
        want = naive_gradients(built, samples, model=path)
        got = {name.removeprefix("lm."): p.grad for name, p in lm.named_parameters()}
    for name, gradient in want.items():
        bound = {"rtol": 1e-4, "atol": 1e-5 * float(gradient.abs().max())}
        torch.testing.assert_close(got[name].double(), gradient, msg=name, **bound)


def test_sdpa_which_leaves_out_the_softcap_of_attention_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"want model.attention flash_attention_2 or eager, .* of Gemma2ForCausalLM \(.* 50"
    ):
        load_model(ModelConfig(path=str(tmp_path), attention="sdpa"), str(tmp_path), config)
    load_model(ModelConfig(path=str(tmp_path), attention="eager"), str(tmp_path), config)
