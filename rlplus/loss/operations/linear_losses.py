"""The public operations on a language-model head: policy loss and logprobs without the full logits."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor, nn

from rlplus.common.errors import hint
from rlplus.loss.backends import reference
from rlplus.loss.backends.selection import BACKENDS, backend_for
from rlplus.loss.head.causal_lm import head_of
from rlplus.loss.head.head import Head
from rlplus.loss.head.head_arguments import make_head
from rlplus.loss.objective.inputs import check_constants, check_tensor, objective_of
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import TokenConstants
from rlplus.loss.operations import library, logprob_library

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_SCRATCH_MB = 1250.0
THRESHOLD = 2.0**-12
Backward = Literal["auto", "exact", "sampled"]


class PolicyLoss(NamedTuple):
    """loss: 0-d, differentiable in hidden, weight and bias. The others are detached.

    logprob, entropy (...): every row's, in nats, fp32 (fp64 for fp64 inputs); logprob is NaN where the target is no
    token. stats: 0-d sums and counts, which add up over micro-batches and ranks.
    """

    loss: Tensor
    logprob: Tensor
    entropy: Tensor
    stats: dict[str, Tensor]


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    old_logprob: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    external: Tensor | None = None,
    behavior_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    engine_logprob: Tensor | None = None,
    entropy_weight: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    objective: Objective | str | None = None,
    backward: Backward = "auto",
    threshold: float = THRESHOLD,
    seed: int | None = None,
    max_scratch_mb: float | None = None,
    weight_grad: Tensor | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    group: "ProcessGroup | None" = None,
    backend: str = "auto",
) -> PolicyLoss:
    """The loss of a policy (RL-PLUS eq. 7, or another `objective`) from the hidden states and the head's weight.

    The logits are never stored whole. loss = sum of token_weight * token loss, see `token_weights`.

    - `hidden` (..., H), `weight` (V, H), `bias` (V,) or None: floating dtypes. The product has hidden's dtype; weight
      and bias of another dtype are rounded to it (copies during the call).
    - `target` (...): int64 or int32, the tokens whose logprobs the loss is of.
    - `old_logprob` (...): under the policy that sampled; None = the current policy (one update per batch).
    - `advantage` (...): floating, integer or bool; it may be one per sequence, (..., 1) or (...) without the last axis.
    - `token_weight` (...): the mask and the divisor of the loss in one. Rows of weight 0 are left out by selection:
      their contents, NaN included, change no bit of loss and gradients, and their target and temperature may be
      anything.
    - `external` (...): bool or integer, whether a token is demonstrated; None = no token is.
    - `behavior_logprob` (...): under the demonstrations' author, when known.
    - `ref_logprob`, `engine_logprob` (...): needed by objective.kl_coef and objective.mismatch_cap.
    - `entropy_weight` (...): weights of the entropy bonus; None = token_weight.
    - `logit_scale`, `logit_softcap`, `temperature`: logits = softcap * tanh(x / softcap) / temperature, where
      x = scale * (hidden weight^T + bias); without a softcap, x / temperature. `rlplus.head_of` reads scale and softcap
      from a model. temperature is a number, or a floating tensor, 0-d or one per token (...), used in fp32 (fp64) and
      without a gradient.
    - `objective`: an `Objective` or the name of a preset; None = "rlplus".
    - `backward`: "exact", "sampled", or "auto", which is the value of the environment variable RLPLUS_BACKWARD, else
      "exact". "sampled" replaces the GEMMs of the backward pass by sums over some ten rows for each token of a peaked
      policy (`backends/sampled.py`). Only probabilities of at least `threshold`, and the target's element, have a
      gradient of their own; each other p is kept with probability p / threshold and counts as the threshold, so the
      gradients have the exact mean. The relative error of the logits' gradient is about
      sqrt(stats["sampled_variance"] / stats["sampled_square"]), but for an entropy bonus and a softcap. The host waits
      for numbers of elements. It does not support backend "reference" or a CUDA graph. The ranks of a split head draw
      from their own rows, whose seeds may differ.
    - `threshold`: the default, 2^-12, is an error of 1.3e-3 on rows of a policy of .24 nats; at a quarter of it the
      error is about half as large and there are twice as many elements. A row that would keep more than 512 elements
      has a larger threshold, 1 / 512, and is counted in stats["sampled_flat"].
    - `seed`: of the random numbers, one for each token. Use another one at each call, else noise adds up. None = the
      next numbers of torch's generator, which torch.compile(fullgraph=True) needs.
    - `max_scratch_mb`: memory for logits, 10^6 bytes; None = 1250. Half-precision inputs also have an accumulator
      (V, H) of the weight's gradient in fp32, with backward "sampled" for the drawn tokens' rows alone.
    - `weight_grad` (V, H): contiguous, fp32 (fp64 for fp64 inputs), in memory that no input uses. This call adds the
      gradient of weight to it, without later factors of the loss. The backward pass then returns no gradient of weight,
      and is not needed if hidden and bias need no gradient.
    - `kept`: (offsets, tokens), int64 or int32. Row i of the rows in order was sampled from the tokens between
      offsets[i] and offsets[i + 1] alone (top-p, top-k, min-p), and its policy is the softmax over these: no other
      logit is computed. In fp32 (fp64), by torch with every backend. A row without any has the whole vocabulary. The
      target is among them, and each is there once.
    - `group`: a process group that has the head. Each rank's weight and bias are some of its rows, in the order of
      ranks, perhaps none; target counts all of them, and hidden, target and what is per token are the same on every
      rank, and so are the results. The gradient of hidden is whole, those of weight and bias are of the rank's rows.
      All ranks must call, and run backward, alike. A DTensor of one mesh dimension, Shard(0), is such a head without
      `group`.
    - `backend`: "torch", "cpp", "triton" (CUDA; bf16, fp16, fp32), "reference" or "auto", which the environment
      variable RLPLUS_BACKEND replaces. "auto" is cpp for CPU tensors where it is built; triton for CUDA tensors of
      compute capability 8.0 or more where its self-check passed (a child process, once per kind of device and versions)
      and the first call of each size agrees with plain products; else torch.

    Precision: logits are accumulated and kept in fp32 (fp64 for fp64 inputs), whatever autocast and torch.backends say
    about TF32: products of fp32 matrices have full precision during the call, in all threads. Gradients are sums in
    fp32 (fp64), rounded to the dtype of their input when they are complete, and in half precision once more where the
    loss is scaled before the backward pass. Before these products the logits' gradient is rounded to hidden's half
    precision by triton, by torch on CUDA, and by cpp for bf16 if the processor multiplies it.

    The same inputs, options and number of threads give the same bits on every backend; on CUDA as far as cuBLAS does,
    which it does within one stream. Other chunks, threads or backends: the same up to rounding.

    Nearly sure tokens: logprob, entropy and gradients are proportional to 1 - p, which every backend keeps to the
    accuracy of the logits, in fp32 within 1e-4 of it at 1 - p = 1e-7.

    Differentiable once. Raises ValueError for wrong shapes, dtypes, devices, options and (on the CPU; elsewhere
    asserted on the device) for targets outside [0, V), non-finite weights, per-token temperatures that are not finite
    and > 0, and in rows of non-zero weight for non-finite advantages, and for given logprobs none of which is below 0.
    """
    with _telling(group, weight, hidden, target):
        objective = objective_of(objective)
        head = make_head(hidden, weight, target, bias, (logit_scale, logit_softcap, temperature), group, kept)
        constants = check_constants(
            objective, target.shape, hidden.device, head.dtype,
            advantage=advantage, token_weight=token_weight, external=external, old_logprob=old_logprob,
            behavior_logprob=behavior_logprob, ref_logprob=ref_logprob, engine_logprob=engine_logprob,
            entropy_weight=entropy_weight,
        )  # fmt: skip
        _check_weight_grad(head, weight_grad)
        scratch = bytes_of_scratch(max_scratch_mb)
        backend = backend_for(backend, head.whole_vocabulary(), scratch)
        if backend == "reference" and (weight_grad is not None or head.group):
            raise ValueError("backend 'reference' keeps the full logits: it takes no weight_grad or split head")
        head = BackwardPass(backward, threshold, seed).with_draws(head, backend)
    if backend == "reference":
        loss, logprob, entropy, stats = _reference_policy_loss(head, constants, objective)
    else:
        differentiable = (head.hidden, head.weight if weight_grad is None else head.weight.detach(), head.bias)
        needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in differentiable]
        op = (
            library.linear_policy_loss if weight_grad is None else partial(library.linear_policy_loss_into, weight_grad)
        )
        with torch.no_grad():
            results = op(needs, *library.pack(head, constants, objective, library.Options(scratch, backend)))
        loss, logprob, entropy, sums, *gradients = results
        loss = library.attach_gradients(loss, *differentiable, *gradients, backend == "triton")
        stats = dict(zip(library.stats_of(head, constants), sums.unbind(), strict=True))
    return PolicyLoss(loss, logprob.detach().view(target.shape), entropy.detach().view(target.shape), stats)


def _reference_policy_loss(
    head: Head, constants: TokenConstants, objective: Objective
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    weighted, _ = library.check_policy_rows(head, constants, objective)
    library.check_targets(head, len(head.weight), weighted)
    return reference.linear_policy_loss(head, constants, objective)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    max_scratch_mb: float | None = None,
    backward: Backward = "auto",
    threshold: float = THRESHOLD,
    seed: int | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    group: "ProcessGroup | None" = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """logprob and entropy (...) in nats, fp32 (fp64 for fp64 inputs), both differentiable once.

    hidden (..., H), weight (V, H), bias (V,) or None; target (...) int64 or int32 in [0, V), or -100: there the logprob
    is 0 and has no gradient, and the temperature may be anything. Logits, temperature, dtypes, options and errors as in
    `linear_policy_loss`. With backward "exact" there are three GEMMs, or two if only hidden needs a gradient: logits of
    as many rows as fit max_scratch_mb stay until the backward pass (beside a pass's own scratch; calls of one graph add
    up), and the rest is computed again. With "sampled" the forward pass keeps what it needs, in one.
    """
    with _telling(group, weight, hidden, target):
        head = make_head(hidden, weight, target, bias, (logit_scale, logit_softcap, temperature), group, kept)
        scratch = bytes_of_scratch(max_scratch_mb)
        backend = backend_for(backend, head.whole_vocabulary(), scratch)
        if backend == "reference" and head.group:
            raise ValueError("backend 'reference' keeps the full logits: it takes no split head")
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in head[:3])
        sampling = BackwardPass(backward, threshold, seed)
        if head.kept_offsets is not None and differentiated and sampling.sampled():
            sampling.refuse("kept tokens, whose gradient is sparse by itself")
        head = sampling.with_draws(head, backend, differentiated)
    if backend == "reference":
        library.check_targets(head, len(head.weight), library.check_logprob_rows(head), library.TARGETED)
        logprob, entropy = reference.linear_logprob(head)
    elif head.uniform is not None:
        logprob, entropy, *_ = logprob_library.sampled_logprob(*head, scratch, backend)
    else:
        logprob, entropy, *_ = logprob_library.linear_logprob(*head, scratch, backend, differentiated)
    return logprob.masked_fill(head.target == library.IGNORED, 0.0).view(target.shape), entropy.view(target.shape)


# ---- which backward pass a call has: exact, or sampled by random numbers that come with the head


def backward_of(name: str) -> str:
    """ "exact" or "sampled"; "auto" is what the environment variable RLPLUS_BACKWARD says, or "exact"."""
    if name not in get_args(Backward):
        raise ValueError(f"want backward one of {', '.join(get_args(Backward))}; got {name!r}")
    if name != "auto":
        return name
    chosen = os.environ.get("RLPLUS_BACKWARD", "")
    if chosen not in ("", *get_args(Backward)):
        raise ValueError(f"want RLPLUS_BACKWARD one of {', '.join(get_args(Backward))}; got {chosen!r}")
    return chosen if chosen not in ("", "auto") else "exact"


class BackwardPass(NamedTuple):
    """Options of a call, see `linear_policy_loss`."""

    backward: str
    threshold: float
    seed: int | None

    def sampled(self) -> bool:
        """Whether it is sampled, see `backward_of`. ValueError for wrong options, whichever it is."""
        way = backward_of(self.backward)
        threshold = self.threshold
        seed = self.seed
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < 1:
            raise ValueError(f"want threshold in (0, 1); got {threshold!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | None) or not -(2**63) <= (seed or 0) < 2**64:
            raise ValueError(f"want seed an int of 64 bits or None; got {seed!r}")
        return way == "sampled"

    def refuse(self, what: str) -> NoReturn:
        """ValueError for a sampled backward pass together with `what`; it says where the choice came from."""
        came = "'sampled', from RLPLUS_BACKWARD" if self.backward == "auto" else "'sampled'"
        raise ValueError(f"want backward 'exact' with {what}; got {came}")

    def with_draws(self, head: Head, backend: str, differentiated: bool = True) -> Head:
        """The head, with random numbers if it is differentiated by a sampled backward pass.

        Without a seed they are those of torch's generator.
        """
        if not (self.sampled() and differentiated):
            return head
        device = head.hidden.device
        if backend == "reference":
            self.refuse("backend 'reference'")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.refuse("a CUDA graph that is captured, since the host waits for the number of elements")
        generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        uniform = torch.rand(len(head.target), generator=generator, device=device, dtype=torch.float32)
        return head._replace(uniform=uniform, threshold=float(self.threshold))


# ---- the same as a module


class RLPlusLoss(nn.Module):
    """`linear_policy_loss` as a module: options are given once, tensors at each call.

    objective: an `Objective` or a preset's name; options: keyword arguments of `linear_policy_loss` for every call,
    such as temperature, max_scratch_mb, backend.
    """

    def __init__(self, objective: str | Objective = "rlplus", **options: Any) -> None:
        super().__init__()
        self.objective = objective_of(objective)
        transform = ("logit_scale", "logit_softcap", "temperature")
        known = (*transform, "backward", "threshold", "seed", "max_scratch_mb", "group", "backend")
        for name in options:
            if name not in known:
                raise ValueError(f"want options among {', '.join(known)}; got {name!r}{hint(name, known)}")
        self.options = options

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, **inputs: Any) -> PolicyLoss:
        """hidden (..., H), weight (V, H), target (...) and the per-token inputs of `linear_policy_loss`."""
        return linear_policy_loss(hidden, weight, target, objective=self.objective, **(self.options | inputs))

    def extra_repr(self) -> str:
        return ", ".join([repr(self.objective), *(f"{k}={v!r}" for k, v in self.options.items())])


def _check_weight_grad(head: Head, weight_grad: Tensor | None) -> None:
    if weight_grad is not None:
        check_tensor("weight_grad", weight_grad, (head.weight.shape, head.hidden.device), dtype=head.dtype)
        if weight_grad.requires_grad or not weight_grad.is_contiguous():
            came = f"strides {weight_grad.stride()}, requires_grad {weight_grad.requires_grad}"
            raise ValueError(f"want weight_grad contiguous and without requires_grad; got {came}")


def bytes_of_scratch(max_scratch_mb: float | None) -> float:
    mb = MAX_SCRATCH_MB if max_scratch_mb is None else max_scratch_mb
    if not (isinstance(mb, int | float) and 0 < mb < inf):
        raise ValueError(f"want max_scratch_mb a finite number > 0; got {mb!r}")
    return mb * 1e6


def _telling(group: Any, weight: Any, *others: Any) -> AbstractContextManager[None]:
    """Tell the other ranks of a split head about an error here: else they would wait for this one."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if group is None and hasattr(weight, "full_tensor") and weight.device_mesh.ndim == 1:
        group = weight.device_mesh.get_group()
    devices = [x.device for x in (weight, *others) if isinstance(x, Tensor)]
    if not hasattr(group, "group_name") or not devices:
        return nullcontext()
    return library.sharded().telling(group.group_name, devices[0])


__all__ = [
    "BACKENDS",
    "MAX_SCRATCH_MB",
    "PolicyLoss",
    "RLPlusLoss",
    "head_of",
    "linear_logprob",
    "linear_policy_loss",
]
