"""The fused head inside a transformers causal LM: `lm(...)` returns logprobs and entropies, or a policy loss.

    lm = fuse_head(AutoModelForCausalLM.from_pretrained(name), temperature=1.0)
    out = lm(input_ids, attention_mask=mask, targets=targets)  # out.logprob, out.entropy
    out = lm(input_ids, attention_mask=mask, targets=targets, policy={"objective": objective, "advantage": ...})
    out.loss.backward()

The class's own `forward` runs, so its arguments, its checkpointing and its auxiliary loss stay as they are. Only the
head differs: at first it keeps its input and returns logits of no columns; then it is called again, with the fused
operation. This second call is a call of the module, so the hooks of ZeRO-3 and FSDP gather its weight around the
operation, forward and backward. What is a DTensor even then is split by tensor parallelism, whose ranks have the same
tokens: the operation takes it as it is (`group=` of `rlplus.linear_policy_loss`), and no rank has the whole head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rlplus.integrations.measures import measure
from rlplus.loss import PolicyLoss, TokenConstants, linear_logprob, linear_policy_loss
from rlplus.loss.head.causal_lm import head_transforms, plain_head, without_peft
from rlplus.loss.head.head import Head
from rlplus.loss.objective.inputs import check_tensor, check_values, describe, expand_advantage
from rlplus.loss.operations.library import IGNORED
from rlplus.loss.operations.linear_losses import Backward

LM = TypeVar("LM", bound=nn.Module)


@dataclass
class FusedOutput(ModelOutput):
    """The output of a fused model that was called with `targets` (B, T).

    logprob, entropy (B, T): in nats, fp32 (fp64 for fp64 models), 0 where there is no target. They are differentiable
    without `policy`; with it only loss (0-d) is, and stats come from `rlplus.linear_policy_loss`. The other fields
    are the class's own output, but for measured: more numbers of each position, (B, T), for other trainers.
    """

    loss: Tensor | None = None
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    stats: dict[str, Tensor] | None = None
    measured: dict[str, Tensor] | None = None
    aux_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None


KEPT = tuple(field.name for field in fields(FusedOutput))[5:]  # fields of the class's own output


def fuse_head(
    lm: LM,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
    max_scratch_mb: float | None = None,
    backward: Backward = "auto",
    backend: str = "auto",
) -> LM:
    """Let a transformers causal LM, or a peft model of one, compute logprobs and policy losses without its logits.

    Changes lm in place and returns it. Called with `targets`, it returns a `FusedOutput`; without, what it always did,
    for generation. Both work inside DDP, DeepSpeed, FSDP, peft and torch.compile. Each call looks the head up: it may
    be a copy among peft's modules_to_save, or a new one of `resize_token_embeddings`. The model's call then takes:

    - `targets` (B, T) int64: the token that the state at each position predicts, which is `input_ids` moved to the left
      by one; -100 where there is none (prompt, padding): such positions stay out of the head's products, but under
      torch.compile. With the class's logits_to_keep=K: (B, K). Virtual tokens of prompt tuning have none, if
      `fuse_head` was given the peft model.
    - `policy`: arguments of `rlplus.linear_policy_loss` by name: objective, advantage, token_weight and so on. Those
      per token are (B, T), advantage also one per sequence; token_weight is 0 where there is no target.

    temperature, max_scratch_mb, backward, backend: for every call, see `linear_policy_loss`; a second `fuse_head`
    replaces them. dtype: the product with the head's weight has it; None is autocast's, or else the hidden states'.
    Scale, softcap and bias are read as `rlplus.head_of` does, and what it refuses is a ValueError here. `unfuse_head`
    undoes this.
    """
    inner: Any = without_peft(lm)
    unfuse_head(inner)
    _, transform = head_transforms(inner)
    options: dict[str, Any] = {"temperature": temperature, "max_scratch_mb": max_scratch_mb}
    options |= {"backward": backward, "backend": backend}
    options |= {"logit_scale": transform.scale, "logit_softcap": transform.softcap}
    adapter = getattr(lm, "active_peft_config", None)
    inner.forward = inner._fusion = _Fusion(inner, dtype, options, getattr(adapter, "num_virtual_tokens", None) or 0)
    return lm


def unfuse_head(lm: nn.Module) -> None:
    """Give a fused model its own forward back; any other model is left as it is."""
    inner: Any = without_peft(lm)
    if "_fusion" in vars(inner):
        found = [(inner, inner._fusion), *((m, f) for m in inner.modules() if isinstance(f := _own(m), _FusedHead))]
        del inner._fusion
        for module, fused in found:
            del module.forward
            if fused.own is not None:
                module.forward = fused.own


def _own(module: nn.Module) -> Any:
    """The forward that a module has as an attribute of its own, if any."""
    return vars(module).get("forward")


class _FusedHead:
    """`forward` of a fused model's head: the head's own, or a stand-in for it while a fused call awaits its input.

    Called with `op`, it is the fused operation. It is a keyword, so that hooks see an input as always.
    """

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.own = _own(head)
        self.awaiting = False
        self.hidden: Tensor | None = None

    def __call__(self, hidden: Tensor, *, op: Callable[..., Any] | None = None) -> Any:
        if op is not None:
            return op(hidden, self.head.weight, bias=self.head.bias)
        if not self.awaiting:
            return type(self.head).forward(self.head, hidden) if self.own is None else self.own(hidden)
        self.hidden = hidden
        return hidden.new_empty(*hidden.shape[:-1], 0)


class _Fusion:
    """`forward` of a fused model, with the signature of the class's own and two arguments more.

    virtual: the number of positions that prompt tuning puts before the others; measures: those to put into the output.
    """

    measures: tuple[str, ...] = ()

    def __init__(self, lm: Any, dtype: torch.dtype | None, options: dict[str, Any], virtual: int) -> None:
        self.lm = lm
        self.own = _own(lm)
        self.dtype = dtype
        self.options = options
        self.virtual = virtual
        parameters = signature(type(lm).forward).parameters
        open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        self.defaults = {"use_cache": False} if open_ended or "use_cache" in parameters else {}
        self.fixed = {"return_dict": True} if open_ended or "return_dict" in parameters else {}

    @property
    def __signature__(self) -> Signature:
        """The signature by which `generate` and Trainer go."""
        own = signature(type(self.lm).forward)
        more = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in ("targets", "policy")]
        parameters = sorted([*list(own.parameters.values())[1:], *more], key=lambda p: p.kind)
        return own.replace(parameters=parameters)

    def __call__(
        self, *args: Any, targets: Tensor | None = None, policy: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        if targets is None:
            if policy is not None:
                raise ValueError("want targets with policy; got None")
            return self.own_forward(*args, **kwargs)
        if kwargs.get("labels") is not None:
            raise ValueError("want targets or labels: a cross-entropy needs the logits; got both")
        own, hidden = self.run_body(args, kwargs)
        more = hidden.shape[1] - targets.shape[1]
        if more > 0 and more == self.virtual:
            hidden = hidden[:, more:]
        elif more > 0 and kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                f"want targets (B, {hidden.shape[1]}), one per position of inputs_embeds; got {describe(targets)}: for "
                "prompt tuning call fuse_head after get_peft_model, with the peft model"
            )
        return _fused_output(self, own, hidden, targets, policy)

    def own_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.lm).forward(self.lm, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)

    def run_body(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The class's own output, its logits without columns, and the input of its head (B, T, H)."""
        head: Any = plain_head(self.lm)
        if not isinstance(_own(head), _FusedHead):
            head.forward = _FusedHead(head)
        if not torch.compiler.is_compiling():
            _check_hooks(self.lm, head)
        fused = head.forward
        fused.awaiting = True
        try:
            out = self.own_forward(*args, **(self.defaults | kwargs | self.fixed))
        finally:
            fused.awaiting = False
        hidden = fused.hidden
        fused.hidden = None
        assert hidden is not None, "want a forward that calls its head"
        if hasattr(hidden, "full_tensor"):  # made by tensor parallelism in front of the head
            hidden = hidden.full_tensor()
        return out, as_autocast(hidden) if self.dtype is None else hidden.to(self.dtype)


def _check_hooks(lm: Any, head: nn.Linear) -> None:
    """ValueError for a hook that is waiting for logits; libraries' hooks that shard weights take any output."""
    for module in {lm.get_output_embeddings(), head}:
        for hook in module._forward_hooks.values():
            home = getattr(getattr(hook, "func", hook), "__module__", None) or type(hook).__module__
            if home.partition(".")[0] not in ("torch", "deepspeed", "accelerate"):
                raise ValueError(
                    f"want no forward hook on the head of {type(lm).__name__}, which computes no logits when the model "
                    f"is called with targets; got {getattr(hook, '__qualname__', repr(hook))} of {home}: remove it, or "
                    "make it a forward pre-hook"
                )


@contextmanager
def _without_tensor_parallelism(head: nn.Module) -> Iterator[None]:
    """Without the hooks of torch's `parallelize_module`, which turn the head's input and output into DTensors.

    transformers does so in the head's own forward, which a fused call does not use.
    """
    before = [(hooks, list(hooks.items())) for hooks in (head._forward_pre_hooks, head._forward_hooks)]
    changed = [(hooks, items) for hooks, items in before if any(_tensor_parallel(hook) for _, hook in items)]
    for hooks, items in changed:
        for key, hook in items:
            if _tensor_parallel(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, items in changed:
            hooks.clear()
            hooks.update(items)


def _tensor_parallel(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.tensor.")


def as_autocast(hidden: Tensor) -> Tensor:
    """The input of a head in the dtype in which autocast would multiply it."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden
    return hidden.to(torch.get_autocast_dtype(device))


def _fused_output(
    fusion: _Fusion, own: Any, hidden: Tensor, targets: Tensor, policy: Mapping[str, Any] | None
) -> FusedOutput:
    """The second call of the head: on its input `hidden`, with the fused operation. own: the class's own output."""
    head = fusion.lm.get_output_embeddings()

    def call(op: Callable[..., Any]) -> Any:
        with _without_tensor_parallelism(plain_head(fusion.lm)):
            return head(pick(hidden), op=op)

    check_tensor("targets", targets, (hidden.shape[:-1], hidden.device), dtype=torch.int64)
    # Selecting rows waits for the device once, and has no static shape to compile.
    on = targets != IGNORED
    every = torch.compiler.is_compiling()

    def pick(x: Tensor) -> Tensor:
        return x if every else x[on]

    def put(x: Tensor) -> Tensor:
        return x.masked_fill(~on, 0) if every else x.new_zeros(on.shape).masked_scatter(on, x)

    kept = {name: getattr(own, name, None) for name in KEPT}
    if policy is None:
        op = partial(_logprob_and_measures, fusion.measures, target=pick(targets), **fusion.options)
        logprob, entropy, *found = call(op)
        measured = {name: put(x) for name, x in zip(fusion.measures, found, strict=True)}
        return FusedOutput(logprob=put(logprob), entropy=put(entropy), measured=measured or None, **kept)
    options = fusion.options | {"old_logprob": None} | _rows_of(policy, on, pick)
    out: PolicyLoss = call(partial(linear_policy_loss, target=pick(targets), **options))
    return FusedOutput(loss=out.loss, logprob=put(out.logprob), entropy=put(out.entropy), stats=out.stats, **kept)


def _whole(x: Any) -> Any:
    """A DTensor's full tensor; anything else as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _logprob_and_measures(names: tuple[str, ...], hidden: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(N,) each: logprob and entropy, differentiable, and the measures of those names, which gather a split head."""
    found = linear_logprob(hidden, weight, **options)
    if not names:
        return found
    weight = _whole(weight.detach())
    bias = _whole(options["bias"])
    scale = options["logit_scale"]
    cap = options["logit_softcap"]
    T = options["temperature"]
    head = Head(
        hidden.detach().flatten(0, -2), weight, bias, options["target"].flatten(),
        temperature=T / scale, softcap=None if cap is None else cap / T,
    )  # fmt: skip
    return *found, *(x.view(options["target"].shape) for x in measure(names, head))


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
