"""The head of a transformers causal LM, and the transformation that the model's class applies to its logits.

Gemma 2 caps them, Cohere, Granite and Falcon-H1 scale them, MiniCPM3 divides the hidden states first. The
configuration names the numbers but not their use: Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it,
MPT ignores its `logit_scale`. So every reading of the numbers is a candidate, and the class's own `forward` decides. It
runs with stand-ins for body and head, whose outputs are known in fp64: this takes milliseconds and reads no weights,
which may be on the meta device or sharded.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from math import inf
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
LARGEST = 100.0  # the probe's logits run from -LARGEST to LARGEST
TOLERANCE = 1e-5  # relative to the largest value: several classes compute in fp32


class LogitTransform(NamedTuple):
    """z -> softcap * tanh(scale * z / softcap); scale * z without a softcap."""

    scale: float
    softcap: float | None

    def __call__(self, z: Tensor) -> Tensor:
        return self.scale * z if self.softcap is None else self.softcap * (self.scale * z / self.softcap).tanh()


class HeadArguments(TypedDict):
    """weight (V, H) and bias (V,) or None: the model's own parameters. The others: see `LogitTransform`."""

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    logit_softcap: float | None


def head_of(model: nn.Module) -> HeadArguments:
    """The head of a transformers causal LM as keyword arguments of `linear_policy_loss` and `linear_logprob`.

    The hidden states that go with it are `model.base_model(...).last_hidden_state`; Llama 4's text model has them in
    `model.model(...).last_hidden_state`. For a peft model, its base model; a head among peft's modules_to_save is the
    active adapter's copy. ValueError for a head that is not a plain `nn.Linear` (LoRA, quantized), for one sharded by
    ZeRO-3, and for a class that does anything else to hidden states or logits than `LogitTransform`.
    """
    model = without_peft(model)
    transform = logit_transform(model)
    head = plain_head(model)
    shape = (head.out_features, head.in_features)
    if head.weight.shape != shape:
        raise ValueError(
            f"want the head of {_kind(model)} whole, {shape}; got {tuple(head.weight.shape)}: under ZeRO-3 call this "
            "within deepspeed.zero.GatheredParameters"
        )
    return HeadArguments(
        weight=head.weight, bias=head.bias, logit_scale=transform.scale, logit_softcap=transform.softcap
    )


def logit_transform(model: nn.Module) -> LogitTransform:
    """The step from W hidden + b to the model's logits, found without reading W and b. ValueError as `head_of`."""
    before, after = head_transforms(model)
    if before != 1 and plain_head(without_peft(model)).bias is not None:
        raise ValueError(f"want no bias in a head whose hidden states are scaled; {_kind(without_peft(model))} has one")
    return after._replace(scale=before * after.scale)


def head_transforms(model: nn.Module) -> tuple[float, LogitTransform]:
    """The factor on the hidden states before the head, and the step from its output to the model's logits.

    ValueError as `head_of`.
    """
    model = without_peft(model)
    head = plain_head(model)
    hidden = _ramps(head.in_features)
    z = LARGEST * _ramps(head.out_features) ** 3  # many small ones, on which a small softcap shows the scale
    at_head, logits = _run(model, head, hidden, z)
    scales, softcaps = _candidates(model)
    before = _reading(at_head, hidden, [LogitTransform(scale, None) for scale in scales])
    if before is None:
        raise ValueError(f"{_kind(model)} changes the hidden states before the head in a way that is not supported")
    after = _reading(logits, z, [LogitTransform(*numbers) for numbers in product(scales, softcaps)])
    if after is None:
        raise ValueError(
            f"want logits softcap * tanh(scale * z / softcap) of z = W hidden + b, scale in {scales}, softcap in "
            f"{softcaps}; {_kind(model)} computes others, {_difference(logits, z)}"
        )
    return before.scale, after


def _ramps(n: int) -> Tensor:
    """(1, 2, n): rows of different size and direction."""
    ramp = torch.linspace(-1, 1, n, dtype=torch.float64, device="cpu")
    return torch.stack([ramp, -ramp / 2])[None]


def without_peft(model: Any) -> Any:
    """The transformers model inside a peft model; other models as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: Any) -> Any:
    """The module that makes the hidden states: `base_model`, which of Llama 4's text model is the model itself."""
    if model.base_model is not model:
        return model.base_model
    bodies = [child for child in model.children() if hasattr(child, "get_input_embeddings")]
    return bodies[0] if len(bodies) == 1 else model


def _kind(model: nn.Module) -> str:
    return type(model).__name__


def plain_head(model: Any) -> nn.Linear:
    """The module that computes the logits of a model without peft's wrapper. ValueError unless it is a plain Linear.

    Where peft keeps a copy of the head for each adapter (modules_to_save), the active one's, or the original.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"want a transformers model with get_output_embeddings(); {_kind(model)} has no head")
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        active = [] if head.disable_adapters else head.active_adapters
        head = copies[active[0]] if active and active[0] in copies else head.original_module
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"want the head of {_kind(model)} a plain torch.nn.Linear; got {type(head).__module__}.{_kind(head)}: "
            "merge its adapter, or leave the head out of LoRA and quantization"
        )
    return head


def _candidates(model: Any) -> tuple[list[float], list[float | None]]:
    """Factors and softcaps that the configuration's numbers may stand for."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    scales = [1.0]
    softcaps = list[float | None]()
    for config in configs:
        scales += (s for name in SCALES for v in _number(config, name) for s in (v, 1 / v))
        width = _number(config, "hidden_size")
        scales += (v / w for v in _number(config, "dim_model_base") for w in width)  # MiniCPM's own code
        softcaps += (v for name in SOFTCAPS for v in _number(config, name))
    return list(dict.fromkeys(scales)), list(dict.fromkeys([*softcaps, None]))


def _number(config: Any, name: str) -> Iterator[float]:
    value = getattr(config, name, None)
    if isinstance(value, int | float) and 0 < value < inf:
        yield float(value)


class _BodyOutput:
    """The output of a body, with last hidden states only."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _run(model: Any, head: nn.Linear, hidden: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The input of the head if the body returns `hidden` (1, n, H), and the logits if the head returns z."""
    names = {child: name for name, child in model._modules.items()}
    wrapped = model.get_output_embeddings()
    whole = body_of(model)
    if whole not in names or wrapped not in names:
        raise ValueError(f"want a model whose body and head are its own children; {_kind(model)} has them elsewhere")
    at_head: list[Tensor] = []

    def head_forward(x: Tensor) -> Tensor:
        at_head.append(x)
        return z.clone()

    body = _with_forward(whole, lambda *_, **__: _BodyOutput(hidden))
    if "decoder" in body._modules:  # OPT and Bart call it past their body
        body._modules = body._modules | {"decoder": _with_forward(whole.decoder, body.forward)}
    stand_in = _copy(model)
    stand_in._modules = model._modules | {names[whole]: body, names[wrapped]: _with_forward(head, head_forward)}
    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            logits = type(model).forward(stand_in, input_ids=ids).logits
    except Exception as error:  # any model's code
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"could not run {_kind(model)}.forward with a stand-in for its body: {reason}") from error
    shapes = [tuple(x.shape) for x in (*at_head, logits)]
    if shapes != [hidden.shape, z.shape]:
        raise ValueError(f"want one call of the head, and its logits whole; {_kind(model)} has shapes {shapes}")
    return at_head[0], logits


def _copy(module: Any) -> Any:
    """A shallow copy without hooks, which shard and gather. `copy.copy` makes a new model of a `fully_shard`-ed one."""
    other = object.__new__(type(module))
    hooks = [name for name in vars(module) if name.endswith("_hooks")]
    vars(other).update(vars(module) | {name: OrderedDict() for name in hooks})
    return other


def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Any:
    other = _copy(module)
    other.forward = forward
    return other


def _reading(got: Tensor, z: Tensor, candidates: list[LogitTransform]) -> LogitTransform | None:
    """The candidate that turns z into `got`."""
    for transform in candidates:
        want = transform(z)
        tolerance = max(TOLERANCE, torch.finfo(got.dtype).eps) * want.abs().max()
        if bool(((got - want).abs() <= tolerance).all()):
            return transform
    return None


def _difference(logits: Tensor, z: Tensor) -> str:
    distance = (logits - z).abs()
    at = distance.argmax()
    return f"{logits.flatten()[at]:.6g} of z = {z.flatten()[at]:.6g}"
