"""The self-check of the `triton` backend on a device: its results against fp64, beside `torch`'s.

    python -m rlplus.loss.selfcheck DEVICE DTYPE

prints a `Verdict` as a line of JSON. `verdicts.py` runs it in a process of its own: a faulty kernel may kill or block
its process, or leave its device unusable. DEVICE is the UUID of a CUDA device, or "cpu",
for Triton's interpreter.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplus.common.errors import one_line
from rlplus.loss.guard.verdicts import Verdict
from rlplus.loss.objective.objective import Objective
from rlplus.loss.operations.distillation import linear_divergence
from rlplus.loss.operations.linear_losses import linear_policy_loss

OBJECTIVE = Objective("clip", "mis", kl_coef=0.1, entropy_coef=0.05)
TEMPERATURE = 0.9
SOFTCAP = 4.0
FACTOR = 0.75  # scales the loss in the backward pass
Results = dict[str, Tensor]


class Case(NamedTuple):
    """A call: tokens, vocabulary, scratch; whether there is a bias, or a softcap and a temperature per token.

    It is of the policy loss, or of a divergence from a teacher, of each kind. Triton compiles different code with and
    without these.
    """

    N: int
    V: int
    max_scratch_mb: float
    bias: bool
    transformed: bool = False
    divergence: bool = False


# No size is a multiple of a block or a tile.
CASES = (
    Case(300, 5003, 2.7, bias=True),  # several chunks, and several products for each gradient
    Case(300, 9001, 1000.0, bias=False),  # a row's statistics by several programs that read several blocks
    Case(600, 5003, 1000.0, bias=False),  # one program per row
    Case(300, 5003, 2.7, bias=True, transformed=True),
    Case(300, 5003, 4.2, bias=False, divergence=True),
    Case(300, 5003, 1000.0, bias=True, transformed=True, divergence=True),
)


def check(device: torch.device, dtype: torch.dtype, cases: Sequence[Case] = CASES, H: int = 136) -> str:
    """The first error found in the `triton` backend there; empty if there is none."""
    for case in cases:
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in sample(case, H, dtype).items()}
        run = divergences if case.divergence else results
        options = {"max_scratch_mb": case.max_scratch_mb}
        got = run(inputs, backend="triton", **options)
        again = run(inputs, backend="triton", **options)
        plain = run(inputs, backend="torch", **options)
        wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
        if fault := compare(got, again, plain, run(wide, backend="reference")):
            return f"{case}: {fault}"
    return ""


def sample(case: Case, H: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `linear_policy_loss`: sampled and demonstrated tokens, some of weight 0 that hold NaN."""
    N, V, _, bias, transformed, _ = case
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    hidden = normal(N, H).to(dtype)
    weight = (2 * H**-0.5 * normal(V, H)).to(dtype)
    shift = normal(V).to(dtype)
    temperature = torch.full((N,), TEMPERATURE, dtype=torch.float64)
    if transformed:
        temperature += torch.rand(N, generator=g)
    z = hidden.double() @ weight.double().T + (shift.double() if bias else 0.0)
    logp = ((SOFTCAP * (z / SOFTCAP).tanh() if transformed else z) / temperature[:, None]).log_softmax(1)
    target = torch.multinomial(logp.exp(), 1, generator=g)
    logprob = logp.gather(1, target).squeeze(1)
    idle = torch.arange(N) % 8 == 5
    row = {
        "advantage": normal(N),
        "old_logprob": (logprob + 0.2 * normal(N)).clamp(max=0),  # some ratios are clipped
        "behavior_logprob": (logprob + 0.5 * normal(N)).clamp(max=0),
        "ref_logprob": (logprob + 0.5 * normal(N)).clamp(max=0),
    }
    return {
        "hidden": hidden.masked_fill(idle[:, None], torch.nan),
        "weight": weight,
        "bias": shift if bias else None,
        "temperature": temperature.masked_fill(idle, torch.nan) if transformed else TEMPERATURE,
        "logit_softcap": SOFTCAP if transformed else None,
        "target": target.squeeze(1),
        "external": torch.rand(N, generator=g) < 0.3,
        "token_weight": (torch.rand(N, generator=g) / N).masked_fill(idle, 0.0),
        **{name: value.masked_fill(idle, torch.nan).float() for name, value in row.items()},
    }


def results(inputs: dict[str, Any], **options: Any) -> Results:
    """loss, logprob and entropy of the rows that count, gradients."""
    heads = ("hidden", "weight", "bias")
    leaves = {k: inputs[k].detach().requires_grad_() for k in heads if inputs[k] is not None}
    out = linear_policy_loss(**(inputs | leaves), objective=OBJECTIVE, **options)
    grads = torch.autograd.grad(FACTOR * out.loss, list(leaves.values()))
    counts = inputs["token_weight"] != 0
    rows = {"loss": out.loss.detach(), "logprob": out.logprob[counts], "entropy": out.entropy[counts]}
    return rows | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def divergences(inputs: dict[str, Any], **options: Any) -> Results:
    """Divergences of the rows that count, and gradients, by kind; the teacher reads its hidden states backwards."""
    heads = ("hidden", "weight", "bias")
    leaves = {k: inputs[k].detach().requires_grad_() for k in heads if inputs[k] is not None}
    rest = {k: inputs[k] for k in ("token_weight", "temperature", "logit_softcap")}
    teacher = {"teacher_hidden": inputs["hidden"].flip(-1), "teacher_weight": inputs["weight"]}
    teacher |= {f"teacher_{k}": inputs[k] for k in ("bias", "logit_softcap")}
    found = {}
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        out = linear_divergence(**leaves, **teacher, **rest, kind=kind, **options)
        grads = torch.autograd.grad(FACTOR * out.loss, list(leaves.values()))
        found[f"{kind} divergence"] = out.divergence[inputs["token_weight"] != 0]
        found |= {f"{kind} d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def compare(got: Results, again: Results, plain: Results, exact: Results) -> str:
    """The first error found in `got`; empty if there is none.

    again: results of a second, identical call; plain: the `torch` backend's; exact: in fp64, from the same inputs.
    """
    for name, value in got.items():
        if not value.isfinite().all():
            return f"{name} is not finite"
        if not torch.equal(value, again[name]):
            return f"{name} has other bits when the call is repeated"
        if name in ("logprob", "entropy") or name.endswith("divergence"):
            error = (value - exact[name]).abs().max().item()
            bound = 2 * (plain[name] - exact[name]).abs().max().item() + 1e-5
        else:
            norm = exact[name].norm()
            error = ((value - exact[name]).norm() / norm).item()
            bound = 1.5 * ((plain[name] - exact[name]).norm() / norm).item() + 1e-3
        if not error <= bound:
            return f"the error of {name} is {error:.1e}; want at most {bound:.1e}"
    return ""


def judge(place: str, dtype: str) -> Verdict:
    """The verdict on a device, given its UUID or "cpu", for a dtype's name."""
    try:
        device = torch.device("cpu") if place == "cpu" else find(place)
        torch.zeros((), device=device)
    except (LookupError, RuntimeError) as error:
        return _failed("unchecked", error)
    try:
        fault = check(device, getattr(torch, dtype))
    except Exception as error:  # raised by torch, Triton, its compiler or the driver: the kernels do not run
        return _failed("refused", error)
    return Verdict("refused", fault) if fault else Verdict("passed", "")


def _failed(status: str, error: Exception) -> Verdict:
    no_room = any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
    return Verdict("out of memory" if no_room else status, one_line(error))


def find(uuid: str) -> torch.device:
    """The visible device with that UUID: its index may differ from the one in the parent process."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise LookupError(f"want the CUDA device {uuid} visible; got {torch.cuda.device_count()} others")


if __name__ == "__main__":
    print(json.dumps(judge(*sys.argv[1:])._asdict()))
