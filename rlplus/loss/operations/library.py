"""The fused operations as torch sees them: custom ops with fake versions and gradients.

The policy loss computes its gradients in the forward pass; `attach_gradients` returns them, scaled, in the backward
pass. The arguments of an op are the fields of `Head` and of similar classes, from whose annotations its schema is
derived: a new field is a new argument.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplus.loss.backends import (
    PolicyCall,
    PolicyResult,
    chunked,
    divergence,
    drawer,
    implementation,
    kept_tokens,
    sampled,
)
from rlplus.loss.guard.scope import guarded
from rlplus.loss.head.gradient_sum import Gradients, Needs, Want
from rlplus.loss.head.head import Head
from rlplus.loss.objective.divergence import check_topk
from rlplus.loss.objective.inputs import check_apart, check_constant_values, check_differentiated_once, check_values
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import TokenConstants, stat_names

PIECE = 2048  # rows of a gradient that are scaled at a time
IGNORED = -100  # the target of no token, as torch's losses have it
WEIGHTED = "wherever the token's weight is not 0"
TARGETED = f"wherever the target is not {IGNORED}"


class Options(NamedTuple):
    """Options of the policy loss."""

    scratch_bytes: float
    backend: str


FIELDS = {kind: tuple(kind.__annotations__) for kind in (Head, TokenConstants, Objective, Options)}
TYPES = {  # names in a schema
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    str: "str",
}


def schema(*kinds: type) -> str:
    """The schema of an op that takes these classes."""
    return ", ".join(
        f"{TYPES[type_]} {kind.__name__}_{name}" for kind in kinds for name, type_ in kind.__annotations__.items()
    )


def pack(*parts: Any) -> list[Any]:
    """Instances of classes in FIELDS -> the arguments of an op."""
    return [getattr(part, name) for part in parts for name in FIELDS[type(part)]]


_objective = lru_cache(maxsize=1024)(Objective)  # its fields are checked when it is made, which takes a while


def unpack(arguments: Sequence[Any], *kinds: Any) -> list[Any]:
    """The inverse of `pack`: the instances, then the remaining arguments."""
    rest = iter(arguments)
    makers = (_objective if kind is Objective else kind for kind in kinds)
    made = [make(*islice(rest, len(FIELDS[kind]))) for kind, make in zip(kinds, makers, strict=True)]
    return [*made, *rest]


# ---- checks of values


def check_policy_rows(head: Head, constants: TokenConstants, objective: Objective) -> tuple[Tensor, Tensor]:
    """Check all weights, and temperatures of rows with a weight. -> (N,) bool: where there is a token_weight; these."""
    check_constant_values(constants)
    weighted = on = constants.token_weight != 0
    if objective.entropy_coef and constants.entropy_weight is not None:
        on = on | (constants.entropy_weight != 0)
    _check_temperatures(head, on)
    return weighted, on


def check_weighted_rows(weights: Tensor, *heads: Head) -> None:
    """Check all weights, and the heads' temperatures of rows that have one."""
    check_values(weights.isfinite(), "want token_weight finite everywhere; got NaN or Inf")
    for head in heads:
        _check_temperatures(head, weights != 0)


def check_logprob_rows(head: Head) -> Tensor:
    """Check temperatures of rows whose target is not IGNORED. -> these rows, (N,) bool."""
    on = head.target != IGNORED
    _check_temperatures(head, on, TARGETED)
    return on


def check_targets(head: Head, V: int, on: Tensor, where: str = WEIGHTED) -> None:
    """Check the targets of the rows `on`, in words `where`, and the kept tokens. V: the size of the vocabulary."""
    target = head.target.where(on, 0)
    check_values(target.clamp(0, V - 1) == target, f"want target in [0, {V}) {where}; got a value outside")
    if head.kept_offsets is not None:
        kept_tokens.check(head, V, on)


def _check_temperatures(head: Head, on: Tensor, where: str = WEIGHTED) -> None:
    if head.row_temperature is not None:
        temperature = head.row_temperature.where(on, 1.0)
        check_values(
            (temperature > 0) & (temperature < torch.inf),
            f"want temperature finite and > 0 {where}; got 0, less, NaN or Inf",
        )


def sharded() -> Any:
    """The backend of a head that is split, imported where it is used: torch.distributed may be missing."""
    return import_module("rlplus.loss.backends.sharded")


def telling(head: Head) -> Any:
    return sharded().telling(head.group, head.target.device) if head.group else nullcontext()


def shards_of(head: Head, backend: str, scratch_bytes: float, *rest: Any) -> Any:
    """`sharded.Shards` of a head that is split over a group, else None. rest: see `sharded.meet`."""
    return sharded().meet(head, implementation(backend), scratch_bytes, *rest) if head.group else None


def checked_shards(head: Head, backend: str, scratch_bytes: float, *call: Any) -> Any:
    """Check the values of a head whose logprobs are wanted. -> as `shards_of`. call: what names it to other ranks."""
    with telling(head):
        on = check_logprob_rows(head)
    shards = shards_of(head, backend, scratch_bytes, on, call, {})
    check_targets(head, len(head.weight) if shards is None else sum(shards.lengths), on, TARGETED)
    return shards


def drawer_of(backend: str, shards: Any, head: Head) -> tuple[sampled.Drawer, Head]:
    """The part of a backend that draws for a sampled backward pass, and the head of this rank's rows."""
    if shards is None:
        return drawer(backend), head
    return sharded().ShardedDrawer(implementation(backend), shards, head), shards.part(head)


def stats_of(head: Head, constants: TokenConstants) -> tuple[str, ...]:
    """The names of the statistics of a policy loss."""
    return *stat_names(constants), *(() if head.uniform is None else sampled.SAMPLED_STATS)


def _policy_loss(weight_grad: Tensor | None, needs: Sequence[bool], *arguments: Any) -> tuple[Tensor, ...]:
    """-> loss, logprob, entropy, stats, dhidden, dweight, dbias (without elements where not needed).

    Not differentiable, see `attach_gradients`. The gradient of weight is added to weight_grad, if there is one.
    """
    head, constants, objective, options = unpack(arguments, Head, TokenConstants, Objective, Options)
    with telling(head):
        if weight_grad is not None:
            check_apart(weight_grad, arguments)
        weighted, on = check_policy_rows(head, constants, objective)
    same = ("policy loss", needs[0], objective, head.uniform is not None, head.threshold)
    shards = shards_of(head, options.backend, options.scratch_bytes, on, same, constants._asdict())
    check_targets(head, len(head.weight) if shards is None else sum(shards.lengths), weighted)
    del weighted, on
    want = Want(options.scratch_bytes, Needs(*needs), weight_grad)
    with guarded(head.hidden.device, options.backend):
        rounded, inner = in_one_dtype(head, want)
        call = PolicyCall(rounded, constants, objective, inner)
        compute: Callable[[PolicyCall], PolicyResult]
        if head.uniform is not None:
            compute = partial(_sampled_policy_loss, options.backend, shards)
        elif shards is not None:
            compute = partial(sharded().policy_loss, implementation(options.backend), shards)
        else:
            compute = implementation(options.backend).policy_loss
        result = compute(call) if head.kept_offsets is None else kept_tokens.policy_loss(compute, call)
        return *result[:-1], *in_own_dtypes(result.gradients, head, want, inner)


def _sampled_policy_loss(backend: str, shards: Any, call: PolicyCall) -> PolicyResult:
    draws, head = drawer_of(backend, shards, call.head)
    return sampled.policy_loss(draws, call._replace(head=head))


_POLICY = f"bool[] needs, {schema(Head, TokenConstants, Objective, Options)}) -> ({', '.join(['Tensor'] * 7)})"
linear_policy_loss = torch.library.custom_op(
    "rlplus::linear_policy_loss", partial(_policy_loss, None), mutates_args=(), schema=f"({_POLICY}"
)
# An op of its own: torch spends half a millisecond on the arguments of an op that may write to one of them.
linear_policy_loss_into = torch.library.custom_op(
    "rlplus::linear_policy_loss_into",
    _policy_loss,
    mutates_args=("weight_grad",),
    schema=f"(Tensor(a!) weight_grad, {_POLICY}",
)


def in_one_dtype(head: Head, want: Want) -> tuple[Head, Want]:
    """The head with weight and bias in hidden's dtype, and what is wanted of it.

    A weight of another dtype gets a sum in fp32 (fp64): in hidden's dtype its gradient would be rounded twice.
    """
    wider = want.needs.weight and head.weight.dtype != head.hidden.dtype
    total = torch.zeros(head.weight.shape, dtype=head.dtype, device=head.weight.device) if wider else want.weight_grad
    return head.rounded(), want.into(total)


def in_own_dtypes(gradients: Gradients, head: Head, want: Want, inner: Want) -> Gradients:
    """The gradients of `inner` in the dtypes of weight and bias, to which each sum is rounded once."""
    dhidden, dweight, dbias = gradients
    if want.needs.weight and inner.weight_grad is not None:
        dweight = inner.weight_grad.to(head.weight.dtype)
    return dhidden, dweight, dbias.to((head.weight if head.bias is None else head.bias).dtype)


def _empty_policy_loss(needs: Sequence[bool], *arguments: Any) -> tuple[Tensor, ...]:
    head, constants, *_ = unpack(arguments, Head, TokenConstants)
    stats = stats_of(head, constants)
    loss = head.hidden.new_empty((), dtype=head.dtype)
    sums = head.hidden.new_empty(len(stats), dtype=head.dtype)
    return loss, head.new_column(), head.new_column(), sums, *empty_gradients(head, needs)


linear_policy_loss.register_fake(_empty_policy_loss)
linear_policy_loss_into.register_fake(lambda weight_grad, *rest: _empty_policy_loss(*rest))


def empty_gradients(head: Head, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    likes = (head.hidden, head.weight, head.weight[:, 0] if head.bias is None else head.bias)
    return tuple(x.new_empty(x.shape if need else (0,)) for x, need in zip(likes, needs, strict=True))


@torch.library.custom_op(
    "rlplus::linear_divergence",
    mutates_args=(),
    schema=f"(bool[] needs, {schema(Head)}, {schema(Head).replace('Head_', 'Teacher_')}, Tensor token_weight, "
    "float beta, float scratch_bytes, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_divergence(needs: Sequence[bool], *arguments: Any) -> tuple[Tensor, ...]:
    """-> loss, divergence (N,), dhidden, dweight, dbias (without elements where not needed); see `attach_gradients`."""
    head, teacher, weights, beta, scratch_bytes, backend = unpack(arguments, Head, Head)
    check_weighted_rows(weights, head, teacher)
    want = Want(scratch_bytes, Needs(*needs))
    with guarded(head.hidden.device, backend):
        rounded, inner = in_one_dtype(head, want)
        values, gradients = divergence(backend)(rounded, teacher.rounded(), weights, beta, inner)
        return weighted_sum(weights, values), values, *in_own_dtypes(gradients, head, want, inner)


@torch.library.custom_op(
    "rlplus::linear_topk_divergence",
    mutates_args=(),
    schema=f"(bool[] needs, {schema(Head)}, Tensor tokens, Tensor logprobs, Tensor token_weight, float beta, "
    "float scratch_bytes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_topk_divergence(needs: Sequence[bool], *arguments: Any) -> tuple[Tensor, ...]:
    """As `linear_divergence`, from the teacher's tokens and logprobs (N, k); by the `torch` backend."""
    head, tokens, logprobs, weights, beta, scratch_bytes = unpack(arguments, Head)
    check_weighted_rows(weights, head)
    check_topk(tokens, logprobs, len(head.weight), weights != 0)
    want = Want(scratch_bytes, Needs(*needs))
    with guarded(head.hidden.device, "torch"):
        rounded, inner = in_one_dtype(head, want)
        values, gradients = chunked.topk_divergence(rounded, tokens, logprobs, weights, beta, inner)
        return weighted_sum(weights, values), values, *in_own_dtypes(gradients, head, want, inner)


@linear_topk_divergence.register_fake
@linear_divergence.register_fake
def _(needs, *arguments):  # type: ignore[no-untyped-def]
    head, *_ = unpack(arguments, Head)
    loss = head.hidden.new_empty((), dtype=head.dtype)
    return loss, head.new_column(), *empty_gradients(head, needs)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """The sum of weights * values, whatever the values are where the weight is 0."""
    return torch.where(weights == 0, 0.0, weights * values).sum()


@torch.library.custom_op("rlplus::attach_gradients", mutates_args=())
def attach_gradients(
    loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, dhidden: Tensor, dweight: Tensor, dbias: Tensor,
    kernels: bool,
) -> Tensor:  # fmt: skip
    """The loss, whose gradients in hidden, weight and bias are given; the backward pass may overwrite them.

    kernels: whether it may use Triton's, on CUDA.
    """
    return loss.clone()


attach_gradients.register_fake(lambda loss, *_: torch.empty_like(loss))


def _keep_gradients(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *_, ctx.kernels = inputs
    ctx.save_for_backward(*inputs[4:7])


def _scale(gradient: Tensor, by: Tensor, in_place: bool, kernels: bool) -> Tensor:
    """gradient * by, multiplied in fp32 (fp64): a loss scale of 65536 is infinite in fp16."""
    if not in_place:
        return (gradient.to(by.dtype) * by).to(gradient.dtype)
    if by.device.type == "cpu" and by.item() == 1:  # a read on other devices would wait
        return gradient
    if kernels and by.is_cuda:
        from rlplus.kernels.scale import scale_

        with torch.cuda.device(by.device):
            return scale_(gradient, by)
    for piece in gradient.split(PIECE):  # all of dweight in fp32 would be the peak of memory
        piece.copy_(piece.to(by.dtype) * by)
    return gradient


def _scale_gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    check_differentiated_once()
    # If the graph is not retained nothing else reads them, and a second dweight would be the peak of memory.
    last = not torch._C._autograd._get_current_graph_task_keep_graph()
    given = zip(ctx.saved_tensors, ctx.needs_input_grad[1:4], strict=True)
    # A compiler's fake tensor has another type; its graph must not change what the forward pass returned.
    return (
        None,
        *(_scale(g, grad_loss, last and type(g) is Tensor, ctx.kernels) if need else None for g, need in given),
        *(None,) * 4,
    )


attach_gradients.register_autograd(_scale_gradients, setup_context=_keep_gradients)


# ---- logprob and entropy, whose backward passes need what a forward pass returns behind them


def keep_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*output[2:], *(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


def differentiate(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, dlogprob: Tensor, dentropy: Tensor, *_: Any
) -> tuple[Tensor | None, ...]:
    """backward: takes the slopes, what the forward pass returned for it, its inputs, and which gradients are needed."""
    check_differentiated_once()
    saved = ctx.saved_tensors  # once: activation checkpoints make it anew at each access, and refuse the second
    kept = saved[: -len(ctx.others)]
    tensors = saved[-len(ctx.others) :]
    inputs = [other if x is None else x for x, other in zip(tensors, ctx.others, strict=True)]
    needs = list(ctx.needs_input_grad[:3])
    grads = backward(dlogprob, dentropy, *kept, *inputs, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * (len(inputs) - 3)
