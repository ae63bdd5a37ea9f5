"""Inputs other than floating tensors of one dtype and shape, which must not change any number."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from head_cases import EVERYTHING, closed, run, sample, tensors, to
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rlplus import Objective, linear_divergence, linear_logprob, linear_policy_loss, policy_loss
from rlplus.loss.backends import native

CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch", CPP, "triton"])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEQUENCES, LENGTH = 4, 3


def on_device(backend: str, values: dict[str, Any]) -> dict[str, Any]:
    device = DEVICE if backend == "triton" else "cpu"
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}


def mixed(backend: str, dtype: torch.dtype = BF16, other: torch.dtype = FP32) -> tuple[dict[str, Any], dict[str, Any]]:
    """hidden of one dtype, weight and bias of another."""
    head, constants = sample(23, V=61, dtype=dtype)
    exact, _ = sample(23, V=61)
    head |= {k: exact[k].to(other) for k in ("weight", "bias")}
    return on_device(backend, head), on_device(backend, constants)


@pytest.mark.parametrize(("dtype", "transformed"), [(BF16, False), (FP16, True)], ids=["bf16", "fp16, transformed"])
@BACKENDS
def test_a_weight_of_another_dtype_is_rounded_and_its_gradient_is_not(
    backend: str, dtype: torch.dtype, transformed: bool
) -> None:
    head, constants = mixed(backend, dtype)
    numbers = {"temperature": torch.linspace(0.6, 1.8, 23), "logit_softcap": 4.0} if transformed else {}
    options = on_device(backend, numbers) | {"backend": backend}
    got = run(head, constants, EVERYTHING, **options)
    want = run(to(head, dtype), constants, EVERYTHING, **options)
    assert [got[k].dtype for k in ("dhidden", "dweight", "dbias")] == [dtype, FP32, FP32]
    for name in ("loss", "logprob", "entropy", "dhidden"):
        assert torch.equal(got[name], want[name]), name
    if backend != "reference":
        leaf = {k: v.clone().requires_grad_() for k, v in to(head, dtype).items() if k != "target"}
        buffer = torch.zeros(61, 7, device=head["weight"].device)
        inputs = constants | {"target": head["target"], "objective": EVERYTHING}
        linear_policy_loss(**leaf, **inputs, **options, weight_grad=buffer)
        assert torch.equal(got["dweight"], buffer)
    wide = (on_device("torch", to(x, torch.float64)) for x in (to(head, dtype), constants))
    exact = closed(*wide, EVERYTHING, **numbers)
    for name in ("dweight", "dbias"):
        apart = (got[name].cpu() - exact[name]).abs().max() / exact[name].abs().max()
        assert apart < (2e-3 if backend == "cpp" or DEVICE == "cuda" else 1e-5)  # those round the gradient of logits
        assert (got[name].to(dtype) != got[name]).any()


@BACKENDS
def test_a_weight_of_fewer_bits_is_widened(backend: str) -> None:
    head, constants = mixed(backend, FP32, BF16)
    got = run(head, constants, EVERYTHING, backend=backend)
    want = run(to(head, FP32), constants, EVERYTHING, backend=backend)
    for name in ("loss", "logprob", "entropy", "dhidden"):
        assert torch.equal(got[name], want[name]), name
    assert got["dweight"].dtype == got["dbias"].dtype == BF16
    assert torch.equal(got["dweight"], want["dweight"].to(BF16))


@BACKENDS
def test_logprobs_take_weights_of_another_dtype(backend: str) -> None:
    head, _ = mixed(backend)
    out = []
    for inputs in (head, to(head, BF16)):
        leaf = {k: v.clone().requires_grad_() if k != "target" else v for k, v in inputs.items()}
        logprob, entropy = linear_logprob(**leaf, backend=backend)
        (logprob - 0.3 * entropy).sum().backward()
        out.append((logprob, entropy, *(leaf[k].grad for k in ("hidden", "weight", "bias"))))
    (logprob, entropy, dhidden, dweight, dbias), want = out
    assert (dhidden.dtype, dweight.dtype, dbias.dtype) == (BF16, FP32, FP32)
    assert all(torch.equal(a, b) for a, b in zip((logprob, entropy, dhidden), want, strict=False))
    for got, rounded in zip((dweight, dbias), want[3:], strict=True):
        assert torch.equal(got.to(BF16), rounded)
        assert (got.to(BF16) != got).any()


def test_compilers_are_told_the_dtypes_of_the_gradients() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(5, 7, dtype=BF16, requires_grad=True), torch.empty(61, 7, requires_grad=True)
        target, ones = torch.zeros(5, dtype=torch.int64), torch.ones(5)
        out = linear_policy_loss(
            hidden, weight, target, old_logprob=None, advantage=ones, token_weight=ones, backend="torch"
        )
        grads = torch.autograd.grad(out.loss, (hidden, weight))
        assert [g.dtype for g in grads] == [BF16, FP32]
        grads = torch.autograd.grad(linear_logprob(hidden, weight, target, backend="torch")[0].sum(), (hidden, weight))
        assert [g.dtype for g in grads] == [BF16, FP32]


def batch() -> tuple[dict[str, Any], dict[str, Any]]:
    """Sequences of tokens; weights of 0 and 1, and one advantage per sequence."""
    head, constants = sample(SEQUENCES * LENGTH)
    shape = (SEQUENCES, LENGTH)
    head["hidden"], head["target"] = head["hidden"].view(*shape, -1), head["target"].view(shape)
    constants = {k: v.view(shape) for k, v in constants.items()}
    constants["token_weight"] = (constants["token_weight"] > 0).double()
    constants["entropy_weight"] = torch.ones(shape, dtype=torch.float64)
    constants["advantage"] = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)[:, None].expand(shape)
    return head, constants


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("advantage", lambda x: x[:, :1]),
        ("advantage", lambda x: x[:, 0]),
        ("advantage", lambda x: x.long()),
        ("external", lambda x: x.to(torch.uint8)),
    ],
    ids=["(B, 1)", "(B,)", "long", "uint8"],
)
def test_other_forms_of_the_same_numbers(name: str, other: Any) -> None:
    head, constants = batch()
    want = run(head, constants, EVERYTHING)
    got = run(head, constants | {name: other(constants[name])}, EVERYTHING)
    assert all(torch.equal(a, b) for a, b in zip(tensors(got).values(), tensors(want).values(), strict=True))
    logprob, entropy = got["logprob"], got["entropy"]
    losses = [
        policy_loss(logprob, entropy=entropy, objective=EVERYTHING, **c)[0]
        for c in (constants, constants | {name: other(constants[name])})
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["token_weight", "entropy_weight"])
def test_a_mask_is_no_weight(name: str, dtype: torch.dtype) -> None:
    """Each of its tokens would count as much as a whole batch."""
    head, constants = batch()
    masked = constants | {name: (constants[name] != 0).to(dtype)}
    match = rf"want {name} floating, as rlplus\.token_weights\(mask\) returns it for a mask; got \w+ \(4, 3\) on cpu"
    with pytest.raises(ValueError, match=match):
        run(head, masked, EVERYTHING)
    with pytest.raises(ValueError, match=match):
        policy_loss(-torch.ones(4, 3), entropy=torch.ones(4, 3), objective=EVERYTHING, **masked)
    hidden, weight, _, _ = head.values()
    if name == "token_weight":
        with pytest.raises(ValueError, match=match):
            linear_divergence(hidden, weight, hidden, weight, token_weight=masked[name])


def test_the_input_that_is_no_tensor_is_the_one_that_is_named() -> None:
    head, constants = batch()
    inputs = {"hidden": head["hidden"], "weight": head["weight"], "target": head["target"]}
    for name in inputs:
        for call in (linear_logprob, partial(linear_policy_loss, **constants)):
            with pytest.raises(ValueError, match=rf"want .*{name}.*; got .*ndarray"):
                call(**inputs | {name: inputs[name].numpy()})
    with pytest.raises(ValueError, match=r"want target a tensor, int64 \(4, 3\) on cpu; got ndarray"):
        linear_logprob(**inputs | {"target": inputs["target"].numpy()})


def test_an_advantage_per_token_of_the_last_axis_alone_is_refused() -> None:
    """torch would spread it over the sequences."""
    head, constants = batch()
    with pytest.raises(ValueError, match=r"want advantage a tensor, floating \(4, 3\) on cpu; got float64 \(3,\)"):
        run(head, constants | {"advantage": torch.zeros(LENGTH, dtype=torch.float64)}, EVERYTHING)


def test_a_temperature_may_be_a_tensor_without_dimensions() -> None:
    head, constants = batch()
    got, want = (run(head, constants, EVERYTHING, temperature=t) for t in (torch.tensor(0.5), 0.5))
    assert torch.equal(got["loss"], want["loss"])
    with pytest.raises(ValueError, match=r"want temperature a finite number > 0; got 0\.0"):
        run(head, constants, EVERYTHING, temperature=torch.tensor(0.0))


def test_without_external_no_token_is() -> None:
    head, constants = batch()
    want = run(head, constants | {"external": torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)}, Objective())
    del constants["external"]
    got = run(head, constants, Objective())
    assert torch.equal(got["loss"], want["loss"])
    assert torch.equal(got["dweight"], want["dweight"])
    assert torch.equal(
        policy_loss(got["logprob"], **constants)[0], policy_loss(got["logprob"], **constants, external=None)[0]
    )


@BACKENDS
def test_targets_of_minus_100_have_logprob_0_and_no_gradient(backend: str) -> None:
    head, _ = sample(9, dtype=FP32)
    head = on_device(backend, head)
    known = torch.ones(9, dtype=torch.bool, device=head["target"].device)
    known[[0, 4, 8]] = False
    out = []
    for target in (head["target"].where(known, -100).int(), head["target"]):
        leaf = {k: v.clone().requires_grad_() if k != "target" else target for k, v in head.items()}
        logprob, entropy = linear_logprob(**leaf, backend=backend)
        logprob.where(known, 0.0 if target is head["target"] else logprob).sum().backward()
        out.append((logprob, entropy, *(leaf[k].grad for k in ("hidden", "weight", "bias"))))
    (logprob, entropy, *got), (whole, its_entropy, *want) = out
    assert (logprob[~known] == 0).all()
    assert torch.equal(logprob[known], whole[known])
    assert torch.equal(entropy[known], its_entropy[known])
    torch.testing.assert_close(entropy, its_entropy, rtol=1e-6, atol=1e-6)  # a row's sum is relative to its target
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_objective_may_be_the_name_of_its_preset() -> None:
    one = torch.ones(1)
    inputs: dict[str, Any] = {"old_logprob": -2 * one, "advantage": one, "token_weight": one}
    named, _ = policy_loss(-one, objective="grpo", **inputs)
    assert named.item() == policy_loss(-one, objective=Objective.preset("grpo"), **inputs)[0].item() != -math.e
    with pytest.raises(ValueError, match=r"want objective an rlplus\.Objective or the name of a preset; got int"):
        policy_loss(-one, objective=1, **inputs)


def test_values_that_cannot_be_are_refused_where_they_count() -> None:
    inputs: dict[str, Any] = {"old_logprob": -torch.ones(2), "advantage": torch.ones(2), "token_weight": torch.ones(2)}
    logprobs = ("old_logprob", "behavior_logprob", "ref_logprob")
    wrong: dict[str, float] = {"advantage": math.inf} | dict.fromkeys(logprobs, 0.7)
    for name, value in wrong.items():
        changed = inputs | {name: torch.tensor([value, 0.0])}
        with pytest.raises(ValueError, match=f"want {name} "):
            policy_loss(-torch.ones(2), **changed)
        off = policy_loss(-torch.ones(2), **(changed | {"token_weight": torch.tensor([0.0, 1.0])}))[0]
        assert off.isfinite()
    for one_above in ([0.02, 0.0], [0.7, -1.0]):  # rounded; the ratio of a whole sequence
        old = torch.tensor(one_above)
        assert policy_loss(-torch.ones(2), **(inputs | {"old_logprob": old}))[0].isfinite()
