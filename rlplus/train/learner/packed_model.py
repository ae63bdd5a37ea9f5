"""A causal LM called with packed sequences, without DeepSpeed: the trainer wraps it, the planner measures it.

From restarting positions transformers makes a mask of (L, L) for each row, under which its `sdpa` computes all L²
products and cannot take its flash kernels. Here each sequence is an attention of its own, causal and without a mask.
Sequences of about the same length are one call, padded at their ends, because a call for each took more time than its
products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rlplus.common import agree
from rlplus.loss.head.causal_lm import body_of, logit_transform
from rlplus.train.data import MicroBatch, Sample, pack
from rlplus.train.learner.routing_replay import RoutingReplay
from rlplus.train.learner.sequence import SequenceGroup

NAME = "sdpa"  # the name is kept: transformers treats some names specially
PADDED = 1.25  # times the products of a group's sequences that it has with its padding, at most; so for its tokens, too
LONG_ROW = 1024  # tokens of a row from which it is done; in shorter ones a mask costs no more


class _Places(NamedTuple):
    """Every group's tokens as places among the tokens of all rows, one group after the other: shapes are (sequences,
    longest), and a shorter sequence repeats its last token. back: the place among these of each row's token."""

    tokens: Tensor
    shapes: tuple[tuple[int, int], ...]
    back: Tensor


@dataclass
class Spans:
    """The lengths of the sequences in each row, padding at its end included; they add up to the row's length.

    A model's argument, which hands it on to its attention. taken: the number of layers that it has come to.
    """

    rows: tuple[tuple[int, ...], ...]
    taken: int = 0
    _places: _Places | None = None

    def places(self, device: torch.device) -> _Places:
        """The same for every layer."""
        if self._places is None:
            found = []
            shapes = []
            back = torch.empty(sum(map(sum, self.rows)), dtype=torch.long)
            count = 0
            for group in _groups([length for row in self.rows for length in row]):
                start, length = torch.tensor(group).T[:, :, None]
                column = torch.arange(group[0][1])
                each = start + torch.minimum(column, length - 1)
                real = column < length
                back[each[real]] = count + real.flatten().nonzero().flatten()
                found.append(each.flatten())
                shapes.append((len(group), len(column)))
                count += each.numel()
            self._places = _Places(torch.cat(found).to(device), tuple(shapes), back.to(device))
        return self._places


def _groups(lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Sequences of about the same length: first token, counted over all rows, and length, the longest first."""
    groups: list[list[tuple[int, int]]] = []
    products = 0
    for start, length in sorted(zip(accumulate(lengths, initial=0), lengths, strict=False), key=lambda s: -s[1]):
        if not groups or (len(groups[-1]) + 1) * groups[-1][0][1] ** 2 > PADDED * (products + length**2):
            groups.append([])
            products = 0
        groups[-1].append((start, length))
        products += length**2
    return groups


def takes_spans(lm: PreTrainedModel) -> bool:
    """Whether the model's attention is `sdpa`, and gets what arguments the model does not know."""
    return lm.config._attn_implementation == NAME and bool(lm._supports_attention_backend)


def register() -> None:
    """Make transformers' `sdpa` look for `Spans`; nothing changes for a model that is called without."""
    core = AttentionInterface()[NAME]
    if hasattr(core, "takes_spans"):
        return

    @wraps(core)
    def attend(*args: Any, spans: Spans | None = None, **options: Any) -> tuple[Tensor, Any]:
        if spans is None:
            whole: tuple[Tensor, Any] = core(*args, **options)
            return whole
        spans.taken += 1
        return attend_apart(core, spans, *args, **options), None

    attend.takes_spans = True  # type: ignore[attr-defined]
    AttentionInterface.register(NAME, attend)


def attend_apart(
    core: Callable[..., tuple[Tensor, Any]],
    spans: Spans,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """(R, heads, L, D) each -> (R, L, heads, D), by `core` for each group of sequences; with a mask, for each sequence.

    attention_mask, such as a sliding window's: (R or 1, heads or 1, L, L), of which each sequence gets its square.
    """
    causal = getattr(module, "is_causal", True) if options.get("is_causal") is None else options["is_causal"]
    if attention_mask is not None or not causal:
        return _one_by_one(core, spans, module, (query, key, value), attention_mask, *args, **options)
    tokens, shapes, back = spans.places(query.device)
    whole = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if len(back) != len(whole[0]):
        raise ValueError(f"want lengths of {len(whole[0])} tokens, the rows'; got {len(back)}")
    # One selection and `split`: in the backward pass a selection for each group would make zeros of the whole's size.
    groups = zip(*(x.index_select(0, tokens).split([n * longest for n, longest in shapes]) for x in whole), strict=True)
    found = []
    for shape, parts in zip(shapes, groups, strict=True):  # the padding is at the end, where no token attends to it
        own = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        found.append(core(module, *own, None, *args, **options)[0].flatten(0, 1))
    return torch.cat(found).index_select(0, back).unflatten(0, (len(query), -1))


def _one_by_one(
    core: Callable[..., tuple[Tensor, Any]],
    spans: Spans,
    module: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> Tensor:
    rows = []
    count = len(inputs[0])
    masks = [None] * count if mask is None else mask.expand(count, -1, -1, -1).unbind()
    # Not by slices: in the backward pass each of them would be padded with zeros to the size of the whole.
    for lengths, whole, *qkv in zip(spans.rows, masks, *(x.unbind() for x in inputs), strict=True):
        apart = []
        begin = 0
        for parts in zip(*(each.split(lengths, 1) for each in qkv), strict=True):
            own = slice(begin, begin := begin + parts[0].shape[1])
            each = (part[None] for part in parts)
            square = None if whole is None else whole[None, :, own, own]
            apart.append(core(module, *each, square, *args, **options)[0])
        rows.append(torch.cat(apart, 1))
    return torch.cat(rows)


class PackedModel(nn.Module):
    """A causal LM called with packed sequences; only hidden states that predict a response token reach the head.

    The `forward` of the head is replaced, so that ZeRO-3's hooks on that module gather its weight around the fused op.
    `group`: the ranks that share each micro-batch with this one; it is then called with this rank's shard.
    gathers_head: False where the op has the head's rows itself (`ShardedHead`): ZeRO-3 gathers a weight as soon as code
    reads it. masks: whether sequences of a row are kept apart by a mask, or, where the model allows it, by an attention
    of their own; None = by the length of the rows. replay: whether a micro-batch's experts are replayed.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        group: SequenceGroup | None,
        *,
        gathers_head: bool = True,
        masks: bool | None = None,
        replay: bool = False,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.group = group
        self.gathers_head = gathers_head
        self.masks = masks
        self.replay = RoutingReplay(lm) if replay else None
        register()
        self.transform = logit_transform(lm)
        lm.get_output_embeddings().forward = MethodType(_fused_head, lm.get_output_embeddings())

    def forward(self, batch: MicroBatch, op: Callable[..., Any]) -> Any:
        config = self.lm.config
        spans = None
        if self.group is not None:
            inputs = self.group.inputs(batch, config, self.lm.dtype)
        else:
            inputs = batch.model_inputs(config._attn_implementation)
            spans = self._spans(batch)
        if spans is not None:
            # With a mask transformers looks for no restarts in the positions, and of one without holes it makes none of
            # its own, but for sliding windows.
            inputs |= {"attention_mask": torch.ones_like(batch.input_ids), "spans": spans}
        if self.replay is not None:
            self.replay.use(batch.experts)
        body = body_of(self.lm)(**inputs)
        if self.replay is not None and not torch.is_grad_enabled():
            self.replay.use(None)
        if spans is not None and not spans.taken:
            raise ValueError(
                f"want a model that hands on its arguments to transformers' sdpa, or model.attention eager; "
                f"{type(self.lm).__name__} does not, and packed sequences would see each other"
            )
        hidden = body.last_hidden_state.flatten(0, 1)[batch.rows]
        scale, softcap = self.transform
        op = partial(op, logit_scale=scale, logit_softcap=softcap)
        return self.lm.get_output_embeddings()(hidden, op) if self.gathers_head else op(hidden, None)

    def _spans(self, batch: MicroBatch) -> Spans | None:
        """The sequences of a micro-batch, if each is to have an attention of its own."""
        if not takes_spans(self.lm) or all(len(row) == 1 for row in batch.lengths):
            return None
        masks = batch.input_ids.shape[1] < LONG_ROW if self.masks is None else self.masks
        return None if masks else Spans(batch.lengths)


def _fused_head(head: nn.Linear, hidden: Tensor, op: Callable[..., Any]) -> Any:
    return op(hidden, head.weight, bias=head.bias)


def probe_batch(vocabulary: int, parallel: int, ends: int = 0) -> MicroBatch:
    """This rank's shard of a packed row of two short sequences.

    ends: the token at both ends of the first sequence. A convolution in the second one would see its last token.
    """
    lengths = (5 * parallel, 3 * parallel)  # the first one extends over the border of a shard
    first, second = ([i % vocabulary for i in range(2, n + 2)] for n in lengths)
    first[0] = first[-1] = ends % vocabulary
    samples = [Sample(ids[:1], ids[1:], 0, False, False, None) for ids in (first, second)]
    weight = [torch.ones(len(s.response), dtype=torch.float32) for s in samples]
    (batch,) = pack(
        samples, weight, row_length=sum(lengths), tokens_per_micro_batch=sum(lengths), pad_id=0, multiple=parallel
    )
    return batch.shard(dist.get_rank() % parallel, parallel) if parallel > 1 else batch


def check_both_ways(
    model: Any, call: Callable[..., Tensor], device: torch.device, vocabulary: int, parallel: int, attention: str
) -> None:
    """`check_attention` for each way in which a `PackedModel` may keep sequences apart. call: it, or what wraps it."""
    masks = model.masks
    for model.masks in (True, False) if masks is None else (masks,):
        check_attention(
            lambda batch: call(batch.to(device), lambda hidden, *_, **__: hidden), vocabulary, parallel, attention
        )
    model.masks = masks


@torch.no_grad()
def check_attention(hidden: Callable[[MicroBatch], Tensor], vocabulary: int, parallel: int, attention: str) -> None:
    """ValueError unless each sequence of a packed row attends to its own past and not to the other. Collective.

    hidden: shard of a micro-batch -> hidden states (N, H) of its `rows`. An attention implementation, or a model's own
    code, that ignores restarting positions would train on the wrong context without any error.
    """

    def states(ends: int) -> tuple[Tensor, Tensor]:
        shard = probe_batch(vocabulary, parallel, ends)
        return hidden(shard).float(), shard.sequence

    base, sequence = states(0)
    changed, _ = states(1)
    change = (changed - base).abs()
    scale = float(base.abs().max()) if len(base) else 1.0
    leaks = bool((change[sequence == 1] > 1e-3 * scale).any())
    own = change[sequence == 0]
    blind = len(own) > 0 and not bool((own[-1] > 0).any())
    leaks = bool(agree.largest(leaks))
    blind = bool(agree.largest(blind))
    if leaks or blind:
        problem = "see each other" if leaks else "do not see their own past"
        raise ValueError(
            f"packed sequences {problem} under model.attention={attention} with this model: want an attention that "
            "keeps sequences apart where position_ids restart (transformers' sdpa, eager and flash_attention_2 do, in "
            "models that hand position_ids on to it)"
        )
