"""Distillation: the divergence of a student from a teacher, from the inputs of both heads, without stored logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplus.loss.backends import DIVERGENCES, reference
from rlplus.loss.backends.selection import backend_for, is_automatic, resolve_backend
from rlplus.loss.head.head import Head
from rlplus.loss.head.head_arguments import check_plain, make_head
from rlplus.loss.objective.divergence import beta_of, check_topk
from rlplus.loss.objective.inputs import check_tensor, check_weight, describe
from rlplus.loss.operations import library
from rlplus.loss.operations.linear_losses import THRESHOLD, Backward, BackwardPass, bytes_of_scratch

BACKENDS = ("reference", *DIVERGENCES)


class DivergenceLoss(NamedTuple):
    """loss: 0-d, differentiable in hidden, weight and bias. divergence (...): every row's, in nats, detached."""

    loss: Tensor
    divergence: Tensor


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    token_weight: Tensor,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    kind: str = "reverse_kl",
    beta: float | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    teacher_bias: Tensor | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_logit_softcap: float | None = None,
    teacher_temperature: float | Tensor | None = None,
    backward: Backward = "auto",
    threshold: float = THRESHOLD,
    seed: int | None = None,
    max_scratch_mb: float | None = None,
    backend: str = "auto",
) -> DivergenceLoss:
    """The divergence of a student from a teacher over the whole vocabulary, from the inputs of both heads.

    - `hidden` (..., H), `weight` (V, H), `bias` (V,) or None; `teacher_hidden` (..., G), `teacher_weight` (V, G),
      `teacher_bias`: one vocabulary; the hidden sizes may differ. Dtypes, logits, temperatures, precision and
      max_scratch_mb are as in `linear_policy_loss`; teacher_temperature: None = temperature.
    - `teacher_topk`: (tokens, logprobs), (..., k) each, int64 or int32 and floating, takes the place of all that begins
      with teacher_: k tokens of the teacher per row, each once, in any order, and their logprobs. The divergence is
      over k + 1 classes, the tokens and all others together: at most the one over the vocabulary, and the same with
      k = V. It takes three GEMMs. The others' probability, 1 less the sum, is at least the epsilon of the logprobs'
      dtype (1.2e-7 in fp32): give them in fp64 where smaller ones matter.
    - `kind`, with p of the student and q of the teacher: "reverse_kl", sum p log(p / q); "forward_kl",
      sum q log(q / p); "jsd", beta sum q log(q / m) + (1 - beta) sum p log(p / m), m = beta q + (1 - beta) p.
    - `beta`: None = 1/2. As in TRL's GKD, a jsd of beta 0 is forward_kl, of beta 1 reverse_kl.
    - `token_weight` (...): loss = sum of token_weight * divergence, see `token_weights`. It is needed beforehand
      because the gradients are computed with the loss, in four GEMMs: two for logits, two for gradients. A loss that
      weighs the divergences of tokens afterwards would compute the logits again, in six.
    - `backward`, `threshold`, `seed`: as in `linear_policy_loss`. "sampled" takes the two GEMMs of logits alone, or the
      one with teacher_topk: an element of the logits' gradient of at least `threshold` times its row's sum of absolute
      values is kept, a smaller one with a probability in proportion to its size. The noise is some ten times that of a
      policy loss, as no element has most of the gradient. On a CPU in fp32 the draw is native where that is built.
    - `backend`: "torch", "triton" (CUDA; bf16, fp16, fp32), "reference" or "auto", as in `linear_policy_loss`; "cpp"
      has no divergence, and "auto" on a CPU is "torch". With teacher_topk "torch", which is "auto" on every device, or
      "reference".

    The teacher is constant. A teacher_hidden that requires a gradient is refused, as it holds a graph that nothing
    will use; a teacher_weight may require one, and gets none.
    Rows of weight 0 are left out by selection: their contents, NaN included, change no bit of loss and gradients.
    Logits that are -inf count as probabilities of e^(-1e30). Where both are nearly sure of a token the divergence keeps
    its digits, as 1 - p of each does. Differentiable once. The same inputs give the same bits.

    Raises ValueError for wrong shapes, dtypes, devices and options and (on the CPU; elsewhere asserted on the device)
    for weights that are not finite and, where they are not 0, temperatures per token that are not finite and > 0,
    the teacher's tokens that are outside the vocabulary or there twice, and probabilities that add up to more than 1.
    """
    number = beta_of(kind, beta)
    check_plain(weight=weight, bias=bias, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
    head = _head(hidden, weight, bias, (logit_scale, logit_softcap, temperature))
    weights = _weights(token_weight, hidden, head.dtype)
    scratch = bytes_of_scratch(max_scratch_mb)
    sampling = BackwardPass(backward, threshold, seed)
    numbers = (teacher_logit_scale, teacher_logit_softcap, teacher_temperature)
    if teacher_topk is not None:
        others = (teacher_hidden, teacher_weight, teacher_bias)
        if any(x is not None for x in others) or numbers != (1.0, None, None):
            raise ValueError("want teacher_topk alone of the teacher's arguments; got others beside it")
        topk = _topk(teacher_topk, hidden, len(weight))
        loss, values = _from_topk(head, topk, weights, number, scratch, backend, sampling)
    else:
        if teacher_temperature is None:
            numbers = (*numbers[:2], temperature)
        teacher = _teacher(hidden, weight, teacher_hidden, teacher_weight, teacher_bias, numbers)
        loss, values = _from_head(head, teacher, weights, number, scratch, backend, sampling)
    return DivergenceLoss(loss, values.detach().view(hidden.shape[:-1]))


def _from_head(
    head: Head, teacher: Head, weights: Tensor, beta: float, scratch: float, backend: str, sampling: BackwardPass
) -> tuple[Tensor, Tensor]:
    """-> loss, divergence (N,)."""
    backend = _backend(backend, head, teacher, scratch)
    head = sampling.with_draws(head, backend, _differentiated(head))
    if backend == "reference":
        library.check_weighted_rows(weights, head, teacher)
        return reference.linear_divergence(head, teacher, weights, beta)
    rest = (*teacher, weights, beta, scratch, backend)
    return _attached(library.linear_divergence, head, rest, kernels=backend == "triton")


def _from_topk(
    head: Head,
    topk: tuple[Tensor, Tensor],
    weights: Tensor,
    beta: float,
    scratch: float,
    backend: str,
    sampling: BackwardPass,
) -> tuple[Tensor, Tensor]:
    """-> loss, divergence (N,)."""
    if not is_automatic(backend):
        backend = resolve_backend(backend, head.hidden.device, head.hidden.dtype)
        if backend not in ("reference", "torch"):
            raise ValueError(f"want backend reference or torch with teacher_topk; got {backend!r}, which has none")
    head = sampling.with_draws(head, backend, _differentiated(head))
    if backend == "reference":
        library.check_weighted_rows(weights, head)
        check_topk(*topk, len(head.weight), weights != 0)
        return reference.linear_topk_divergence(head, *topk, weights, beta)
    return _attached(library.linear_topk_divergence, head, (*topk, weights, beta, scratch), kernels=False)


def _differentiated(head: Head) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in head[:3])


def _attached(op: Any, head: Head, rest: tuple[Any, ...], *, kernels: bool) -> tuple[Tensor, Tensor]:
    """-> loss, whose gradients are those that the op gives, and divergence (N,)."""
    inputs = (head.hidden, head.weight, head.bias)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
    with torch.no_grad():
        loss, values, *gradients = op(needs, *head, *rest)
    return library.attach_gradients(loss, *inputs, *gradients, kernels), values


def _topk(given: Any, hidden: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """tokens (N, k) int64 and logprobs (N, k)."""
    if not (isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(x, Tensor) for x in given)):
        raise ValueError(f"want teacher_topk a pair of tensors, tokens and logprobs (..., k); got {describe(given)}")
    tokens, logprobs = given
    tokens = tokens.long() if tokens.dtype == torch.int32 else tokens
    k = tokens.shape[-1] if tokens.ndim else 0
    if not 0 < k <= V:
        raise ValueError(f"want teacher_topk tokens (..., k), k from 1 to {V}; got {describe(tokens)}")
    like = (torch.Size([*hidden.shape[:-1], k]), hidden.device)
    check_tensor("teacher_topk tokens", tokens, like, dtype=torch.int64)
    check_tensor("teacher_topk logprobs", logprobs, like)
    return tokens.reshape(-1, k), logprobs.detach().reshape(-1, k)


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[Any, Any, Any]) -> Head:
    """A head without targets; numbers: logit_scale, logit_softcap, temperature."""
    target: Any = None
    if isinstance(hidden, Tensor):
        target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return make_head(hidden, weight, target, bias, numbers, None)


def _teacher(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Any,
    teacher_weight: Any,
    teacher_bias: Tensor | None,
    numbers: tuple[Any, Any, Any],
) -> Head:
    """The teacher's head, without gradients; hidden, weight: the student's."""
    try:
        head = _head(teacher_hidden, teacher_weight, teacher_bias, numbers)
    except ValueError as error:
        raise ValueError(f"the teacher's head: {error}") from error
    same = (teacher_hidden.shape[:-1], len(teacher_weight), teacher_hidden.device)
    if same != (hidden.shape[:-1], len(weight), hidden.device):
        raise ValueError(
            "want teacher_hidden (..., G) and teacher_weight (V, G) of the student's tokens, vocabulary and device, "
            f"{tuple(hidden.shape[:-1])}, {len(weight)} and {hidden.device}; got {describe(teacher_hidden)} and "
            f"{describe(teacher_weight)}"
        )
    if teacher_hidden.requires_grad:
        raise ValueError(
            "want teacher_hidden without a gradient, computed under torch.no_grad() or detached; got one that requires "
            "a gradient: the teacher is constant"
        )
    return head._replace(weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())


def _weights(token_weight: Any, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """(N,) in the dtype of the logits."""
    value = check_weight("token_weight", token_weight, (hidden.shape[:-1], hidden.device))
    return value.detach().reshape(-1).to(dtype)


def _backend(name: str, head: Head, teacher: Head, scratch: float) -> str:
    backend = backend_for(name, head, scratch)
    narrow = backend != "triton" or teacher.hidden.dtype != torch.float64
    if backend in BACKENDS and narrow:
        return backend
    if is_automatic(name):
        return "torch"
    if not narrow:
        raise ValueError("backend 'triton' needs a teacher_hidden of bf16, fp16 or fp32; got float64")
    raise ValueError(f"want backend {', '.join(BACKENDS)} for a divergence; got {backend!r}, which has none")
