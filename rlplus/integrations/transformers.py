"""The fused head inside a transformers causal LM: `lm(...)` returns logprobs and entropies, or a policy loss.

    lm = fuse_head(AutoModelForCausalLM.from_pretrained(name), temperature=1.0)
    out = lm(input_ids, attention_mask=mask, targets=targets)  # out.logprob, out.entropy
    out = lm(input_ids, attention_mask=mask, targets=targets, policy={"objective": objective, "advantage": ...})
    out.loss.backward()

The class's own `forward` runs, so its arguments, its checkpointing and its auxiliary loss stay as they are. Only the
head differs: at first it keeps its input and returns logits of no columns; then it is called again, with the fused
operation. This second call is a call of the module, so the hooks of ZeRO-3 and FSDP gather its weight around the
operation, forward and backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial, wraps
from inspect import Parameter, signature
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rlplus.objective import TokenConstants
from rlplus.objective.inputs import check_tensor, check_values, describe, expand_advantage
from rlplus.ops import PolicyLoss, linear_logprob, linear_policy_loss
from rlplus.ops.causal_lm import head_transforms, without_peft
from rlplus.ops.library import IGNORED

LM = TypeVar("LM", bound=nn.Module)


@dataclass
class FusedOutput(ModelOutput):
    """The output of a fused model that was called with `targets` (B, T).

    logprob, entropy (B, T): in nats, fp32 (fp64 for fp64 models), 0 where there is no target. They are differentiable
    without `policy`; with it only loss (0-d) is, and stats are those of `rlplus.linear_policy_loss`. The other fields
    are those of the class's own output.
    """

    loss: Tensor | None = None
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    stats: dict[str, Tensor] | None = None
    aux_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None


KEPT = tuple(field.name for field in fields(FusedOutput))[4:]  # of the class's own output


def fuse_head(
    lm: LM,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
    max_scratch_mb: float | None = None,
    backend: str = "auto",
) -> LM:
    """Let a transformers causal LM, or a peft model of one, compute logprobs and policy losses without its logits.

    Changes lm in place and returns it. Called with `targets`, it returns a `FusedOutput`; without, what it always did,
    for generation. Both work inside DDP, DeepSpeed, FSDP, peft and torch.compile.

      targets   (B, T) int64: the token that the state at each position predicts, which is `input_ids` moved to the
                left by one; -100 where there is none (prompt, padding): such positions stay out of the head's products,
                but under torch.compile. With the class's logits_to_keep=K: (B, K)
      policy    arguments of `rlplus.linear_policy_loss` by name: objective, advantage, token_weight and so on. Those
                per token are (B, T), advantage also one per sequence; token_weight is 0 where there is no target

    temperature, max_scratch_mb, backend: of every call, see `linear_policy_loss`; a second `fuse_head` replaces them.
    dtype: of the product with the head's weight; None is autocast's, or without it that of the hidden states.
    Scale, softcap and bias are read as `rlplus.head_of` does, and what it refuses is a ValueError here. `unfuse_head`
    undoes this.
    """
    inner: Any = without_peft(lm)
    unfuse_head(inner)
    fusion = _Fusion(inner, dtype, {"temperature": temperature, "max_scratch_mb": max_scratch_mb, "backend": backend})
    inner._fusion = fusion.head._fusion = fusion
    inner.forward = MethodType(_fused_forward_like(type(inner).forward), inner)
    fusion.head.forward = MethodType(_head_forward, fusion.head)
    return lm


def unfuse_head(lm: nn.Module) -> None:
    """Give a fused model its own forward back; any other model is left as it is."""
    inner: Any = without_peft(lm)
    if "_fusion" in vars(inner):
        for module, own in inner._fusion.own.items():
            del module._fusion, module.forward
            vars(module).update(own)


class _Fusion:
    """The state of a fused model.

    own: the forward that each of its two modules had as an attribute of its own, if any. While `awaiting`, the head
    keeps its input in `hidden`.
    """

    def __init__(self, lm: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> None:
        _, transform = head_transforms(lm)
        self.head: Any = lm.get_output_embeddings()
        self.dtype = dtype
        self.options = options | {"logit_scale": transform.scale, "logit_softcap": transform.softcap}
        self.forward, self.head_forward = lm.forward, self.head.forward
        self.own = {m: {k: v for k, v in vars(m).items() if k == "forward"} for m in (lm, self.head)}
        parameters = signature(type(lm).forward).parameters
        open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        self.defaults = {"use_cache": False} if open_ended or "use_cache" in parameters else {}
        self.fixed = {"return_dict": True} if open_ended or "return_dict" in parameters else {}
        self.awaiting = False
        self.hidden: Tensor | None = None

    def run_body(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The class's own output, its logits without columns, and the input of its head (B, T, H)."""
        self.awaiting = True
        try:
            out = self.forward(*args, **(self.defaults | kwargs | self.fixed))
        finally:
            self.awaiting = False
        hidden, self.hidden = self.hidden, None
        assert hidden is not None, "want a forward that calls its head"
        return out, as_autocast(hidden) if self.dtype is None else hidden.to(self.dtype)


def as_autocast(hidden: Tensor) -> Tensor:
    """The input of a head in the dtype in which autocast would multiply it."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden
    return hidden.to(torch.get_autocast_dtype(device))


def _head_forward(head: Any, hidden: Tensor, op: Callable[..., Any] | None = None) -> Any:
    """The head's own forward, a stand-in for it while a fused forward awaits its input, or the fused operation."""
    if op is not None:
        return op(hidden, head.weight, bias=head.bias)
    if not head._fusion.awaiting:
        return head._fusion.head_forward(hidden)
    head._fusion.hidden = hidden
    return hidden.new_empty(*hidden.shape[:-1], 0)


def _fused_forward_like(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward with the signature of a class's own, by which `generate` and Trainer go, and two more arguments."""

    @wraps(forward)
    def fused(
        self: Any, *args: Any, targets: Tensor | None = None, policy: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        if targets is None:
            if policy is not None:
                raise ValueError("want targets with policy; got None")
            return self._fusion.forward(*args, **kwargs)
        return _fused_forward(self, targets, policy, args, kwargs)

    own = signature(forward)
    more = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in ("targets", "policy")]
    parameters = sorted([*own.parameters.values(), *more], key=lambda p: p.kind)
    fused.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return fused


def _fused_forward(
    lm: Any, targets: Tensor, policy: Mapping[str, Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FusedOutput:
    head, fusion = lm.get_output_embeddings(), lm._fusion
    if head is not fusion.head:
        raise ValueError(
            f"want the head of {type(lm).__name__} as fuse_head found it, a plain torch.nn.Linear; got "
            f"{type(head).__module__}.{type(head).__name__}: merge its adapter, or leave the head out of LoRA"
        )
    if kwargs.get("labels") is not None:
        raise ValueError("want targets or labels: a cross-entropy needs the logits; got both")
    own, hidden = fusion.run_body(args, kwargs)
    check_tensor("targets", targets, (hidden.shape[:-1], hidden.device), dtype=torch.int64)
    # Selecting rows waits for the device once, and has no static shape to compile.
    on, every = targets != IGNORED, torch.compiler.is_compiling()

    def pick(x: Tensor) -> Tensor:
        return x if every else x[on]

    def put(x: Tensor) -> Tensor:
        return x.masked_fill(~on, 0) if every else x.new_zeros(on.shape).masked_scatter(on, x)

    kept = {name: getattr(own, name, None) for name in KEPT}
    if policy is None:
        op = partial(linear_logprob, target=pick(targets), **fusion.options)
        logprob, entropy = head(pick(hidden), op)
        return FusedOutput(logprob=put(logprob), entropy=put(entropy), **kept)
    options = fusion.options | {"old_logprob": None} | _rows_of(policy, on, pick)
    out: PolicyLoss = head(pick(hidden), partial(linear_policy_loss, target=pick(targets), **options))
    return FusedOutput(loss=out.loss, logprob=put(out.logprob), entropy=put(out.entropy), stats=out.stats, **kept)


def _rows_of(policy: Mapping[str, Any], on: Tensor, pick: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The arguments of the policy loss with those per token at the picked positions; `on` (B, T): the targets."""
    arguments = dict(policy)
    for name in (*TokenConstants._fields, "temperature"):
        value = arguments.get(name)
        if not isinstance(value, Tensor) or (name == "temperature" and value.ndim == 0):
            continue
        value = expand_advantage(value, on.shape) if name == "advantage" else value
        if value.shape != on.shape:
            raise ValueError(f"want policy[{name!r}] like targets, {tuple(on.shape)}; got {describe(value)}")
        if name == "token_weight":
            check_values((value == 0) | on, "want token_weight 0 where there is no target; got another")
        arguments[name] = pick(value)
    return arguments
