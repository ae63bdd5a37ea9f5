"""A head split over the vocabulary: each rank of a process group has some of its rows, and all have the same tokens.

Per chunk of tokens: every rank's logits, of its own rows of the head, and their statistics; the ranks exchange these,
four numbers a token and rank, and know every token's logprob and entropy; the objective, the same on all ranks; the
gradient of the rank's own logits; the gradients of its rows of weight and bias; and the sum of dhidden over the ranks,
n H numbers. Three GEMMs. No rank has more of the head than its rows, nor logits of others.

Before, they exchange what their calls must have in common, and whether one has failed: no rank waits for another that
raised an error before its first chunk.

Scratch: the backend's bytes of a logit, for each row of the rank that has the most rows of the head.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from math import isnan
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from rlplus.loss.head.head import (
    Gradients,
    Head,
    RunningStatistics,
    Statistics,
    add_dweight,
    dhidden,
    fp16_scale,
    fp16_weights,
)
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import MISMATCH_STATS, STATS, TokenConstants, token_loss

FIRST = ("failed", "rows", "chunk", "tokens", "call")  # the first numbers that ranks exchange; then, of each input
PER_TOKEN = 5 + len(TokenConstants._fields)  # per token, its checksum and the norm by which differences are judged
SAME_BITS = ("targets", "tokens that count")
EXACT, ROUNDED = 1e-12, 0.01  # shares of the norm by which checksums may differ; unrelated ones are as near once in 180


class Blocks(Protocol):
    """A backend's functions for a rank's rows of a head: a head with their weight and bias.

    Targets are relative to the first of them; those outside are none of its tokens. OVERWRITES: whether
    `running_statistics` overwrites the logits that it takes.
    """

    OVERWRITES: bool

    def block_logits(self, head: Head) -> Tensor:
        """hidden weight^T (n, B), accumulated in fp32 (fp64)."""

    def running_statistics(self, head: Head) -> RunningStatistics:
        """Running statistics that have taken nothing yet; or an object with the same methods."""

    def known_rows(self, head: Head, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> Any:
        """The arguments of `block_gradient` about the rows."""

    def block_gradient(self, head: Head, z: Tensor, known: Any) -> Tensor:
        """The logits' gradient (n, B), 0 where dlogprob and dentropy are 0; may overwrite z of `block_logits`."""

    def scratch_per_logit(self, dtype: torch.dtype, device: str, capped: bool = False) -> int:
        """Bytes, for a head with these `Head.logits`; also asked by `rlplus plan`."""


class Shards(NamedTuple):
    """The rows of the head that each rank of the group has, and the tokens that go through at a time."""

    group: dist.ProcessGroup
    lengths: list[int]
    chunk: int

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)][:-1]

    def own(self, head: Head) -> Head:
        """The head of this rank's rows alone; targets of other ranks' are outside."""
        return head._replace(target=head.target - self.starts[self.group.rank()])


@contextmanager
def telling(group: Any, device: torch.device) -> Iterator[None]:
    """Tell the group's other ranks, which are in `meet` or on their way, about an error; it is re-raised here."""
    try:
        yield
    except Exception:
        numbers = torch.zeros(len(FIRST) + 2 * PER_TOKEN, dtype=torch.float64, device=device)
        numbers[FIRST.index("failed")] = 1
        with suppress(RuntimeError):  # the other ranks are gone
            _gathered(numbers, _resolve_process_group(group))
        raise


def meet(
    head: Head, blocks: Blocks, scratch_bytes: float, on: Tensor, call: tuple[Any, ...], per_token: dict[str, Any]
) -> Shards:
    """The parts of the group's ranks. ValueError on all of them if one has failed, or their calls or tokens differ.

    on (N,): the tokens that count; call: what must be the same on all ranks; per_token: tensors (N,) or None.
    """
    group, n = _resolve_process_group(head.group), len(head.target)  # type: ignore[arg-type]
    row = len(head.weight) * (blocks.scratch_per_logit(*head.logits) + blocks.OVERWRITES * head.dtype.itemsize)
    row += head.weight.shape[1] * 2 * (head.hidden.dtype.itemsize + head.dtype.itemsize)
    same = (head.hidden.dtype, head.weight.shape[1], head.temperature, head.softcap, *call)
    given = [name for name, x in per_token.items() if x is not None]
    first = [0, len(head.weight), max(1, int(scratch_bytes // row)), n, crc32(repr((same, given)).encode())]
    half = head.weight.shape[1] // 2
    columns = {
        "targets": head.target,
        "tokens that count": on,
        "hidden states": head.hidden[:, half:].sum(1, dtype=head.dtype),
        "hidden states, their first half": head.hidden[:, :half].sum(1, dtype=head.dtype),
        "temperatures": head.row_temperature,
    }
    columns |= per_token
    numbers = torch.tensor(first, dtype=torch.float64, device=head.target.device)
    ranks = _gathered(torch.cat([numbers, *_checksums(list(columns.values()), on)]), group).tolist()
    _check_same(ranks, list(columns))
    return Shards(group, [int(rank[1]) for rank in ranks], int(min(rank[2] for rank in ranks)))


def _checksums(columns: list[Tensor | None], on: Tensor) -> tuple[Tensor, Tensor]:
    """Sums, weighted by the token's place, of columns (N,) where `on`; and the norms of their terms; (PER_TOKEN,)."""
    rows = torch.zeros(PER_TOKEN, len(on), dtype=torch.float64, device=on.device)
    for row, x in zip(rows, columns, strict=False):
        if x is not None:
            row.copy_(x)
    rows = torch.where(on, rows, 0.0) * torch.arange(1, len(on) + 1, device=on.device)
    return rows.sum(1), torch.linalg.vector_norm(rows, dim=1)


def _check_same(ranks: list[list[float]], names: list[str]) -> None:
    """ValueError unless all ranks have sent the numbers of one call, without a failure."""
    failed, _, _, tokens, calls = list(zip(*ranks, strict=True))[: len(FIRST)]
    where = "of the group that has the head's rows"
    if any(failed):
        which = ", ".join(str(rank) for rank, yes in enumerate(failed) if yes)
        raise ValueError(f"want no error on any rank {where}; got one on rank {which}, which says which")
    got = f"{[int(n) for n in tokens]} tokens by rank" if len(set(tokens)) > 1 else ""
    if not got and len(set(calls)) > 1:
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        raise ValueError(
            f"want the same call on all ranks {where}, its options, dtypes and which inputs it has; got another on "
            f"rank {other} than on rank 0"
        )
    got = got or _other_tokens(ranks, names)
    if got:
        raise ValueError(
            f"want the same tokens on all ranks {where}; got {got}. Where ranks have tokens of their own, gather the "
            "weight instead: under FSDP within the module's forward pass, else by "
            "weight.full_tensor(grad_placements=[Partial()]), whose gradient is the ranks' sum"
        )


def _other_tokens(ranks: list[list[float]], names: list[str]) -> str:
    """The first input whose checksum is another than rank 0's, and where; "" if there is none."""
    for column, name in enumerate(names, len(FIRST)):
        tolerance = (EXACT if name in SAME_BITS else ROUNDED) * ranks[0][column + PER_TOKEN]
        for rank, numbers in enumerate(ranks):
            a, b = ranks[0][column], numbers[column]
            if not (a == b or (isnan(a) and isnan(b)) or abs(a - b) < tolerance):
                return f"as many with other {name} on rank {rank} than on rank 0"
    return ""


def policy_loss(
    blocks: Blocks,
    shards: Shards,
    head: Head,
    constants: TokenConstants,
    objective: Objective,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """-> loss (0-d), logprob (N,), entropy (N,), stats (S,), gradients of hidden, weight and bias where needed.

    With `weight_grad`, fp32 (fp64) of this rank's rows, the gradient of weight is added there.
    """
    logprob, entropy = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    loss = head.hidden.new_zeros((), dtype=head.dtype)
    names = STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS
    stats = loss.new_zeros(len(names))
    grads = _Gradients(blocks, shards, head, needs, fp16_weights(constants, objective), weight_grad)
    for rows, part, z, known in chunks(blocks, shards, head):
        logprob[rows], entropy[rows] = known.logprob, known.entropy
        out = token_loss(known.logprob, known.entropy, constants.rows(rows), objective)
        loss += out.loss
        stats += torch.stack(list(out.stats.values()))
        grads.add(rows, part, z, known, out.dlogprob, out.dentropy if objective.entropy_coef else None)
    return loss, logprob, entropy, stats, grads.finish()


def logprob(blocks: Blocks, shards: Shards, head: Head) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,)."""
    logprob, entropy = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    for rows, _, _, known in chunks(blocks, shards, head):
        logprob[rows], entropy[rows] = known.logprob, known.entropy
    return logprob, entropy


def logprob_backward(
    blocks: Blocks,
    shards: Shards,
    head: Head,
    dlogprob: Tensor,
    dentropy: Tensor,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum(dlogprob * logprob + dentropy * entropy), as in `policy_loss`; recomputes the logits."""
    grads = _Gradients(blocks, shards, head, needs, [dlogprob, dentropy], weight_grad)
    for rows, part, z, known in chunks(blocks, shards, head):
        grads.add(rows, part, z, known, dlogprob[rows], dentropy[rows])
    return grads.finish()


def chunks(blocks: Blocks, shards: Shards, head: Head) -> Iterator[tuple[slice, Head, Tensor, Statistics]]:
    """Which tokens, the head of those and this rank's rows, its logits, and the statistics of the whole rows."""
    for start in range(0, len(head.target), shards.chunk):
        rows = slice(start, min(start + shards.chunk, len(head.target)))
        whole = head.rows(rows)
        part = shards.own(whole)
        z = blocks.block_logits(part) if len(part.weight) else whole.hidden.new_empty(len(part.hidden), 0)
        yield rows, part, z, _merged(whole, shards, _own_statistics(blocks, part, z))


def _own_statistics(blocks: Blocks, part: Head, z: Tensor) -> Statistics:
    if not z.shape[1]:
        none = z.new_zeros(len(z), dtype=part.dtype)
        return Statistics(torch.full_like(none, -torch.inf), none, none, none)
    running = blocks.running_statistics(part)
    running.take(part, z.clone() if blocks.OVERWRITES else z)
    return running.finish()


def _merged(head: Head, shards: Shards, own: Statistics) -> Statistics:
    """The statistics of whole rows, from every rank's."""
    running = RunningStatistics(head, lambda block, rows: Statistics(*rows))
    every = zip(shards.starts, shards.lengths, _gathered(torch.stack(list(own)), shards.group), strict=True)
    for start, length, rows in every:
        running.take(head._replace(weight=head.weight.new_empty(length, 0), target=head.target - start), rows)
    return running.finish()


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of every rank, (ranks, ...)."""
    out = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(out.unbind()), x, group)
    return out


class _Gradients:
    """The inputs' gradients, summed over chunks; weights: factors to which the slopes are proportional, for fp16."""

    def __init__(
        self, blocks: Blocks, shards: Shards, head: Head, needs: list[bool], weights: list[Tensor],
        weight_grad: Tensor | None,
    ) -> None:  # fmt: skip
        self.blocks, self.shards, self.head, self.weight_grad = blocks, shards, head, weight_grad
        self.needed = any(needs) or weight_grad is not None
        self.needs = [needs[0], needs[1] or weight_grad is not None, needs[2]]
        self.grads = Gradients.zeros(head, needs, weight_grad)
        self.scale = fp16_scale(*weights) if head.mixed and head.hidden.dtype == torch.float16 else None
        if self.scale is not None and weight_grad is not None:
            weight_grad.mul_(self.scale)  # a power of two: exact, and undone at the end

    def add(
        self, rows: slice, part: Head, z: Tensor, known: Statistics, dlogprob: Tensor, dentropy: Tensor | None
    ) -> None:
        if not self.needed:
            return
        active = dlogprob != 0 if dentropy is None else (dlogprob != 0) | (dentropy != 0)
        total = part.hidden.new_zeros(part.hidden.shape, dtype=part.dtype) if self.needs[0] else None
        if z.shape[1]:
            self._add(part, z, known, (active, dlogprob, dentropy), total)
        if total is not None:
            dist.all_reduce(total, group=self.shards.group)
            if self.scale is not None:
                total /= self.scale
            self.grads.hidden[rows] = total.masked_fill_(~active[:, None], 0.0).to(self.grads.hidden.dtype)

    def _add(
        self, part: Head, z: Tensor, known: Statistics, slopes: tuple[Tensor, Tensor, Tensor | None],
        total: Tensor | None,
    ) -> None:  # fmt: skip
        """Add to the gradients of weight and bias, and to total (n, H), of the rank's own logits."""
        active, dlogprob, dentropy = slopes
        if self.scale is not None:
            dlogprob, dentropy = dlogprob * self.scale, None if dentropy is None else dentropy * self.scale
        keep: Tensor | slice = slice(None)
        if z.device.type != "cpu":  # counting rows would wait for the device
            part = part._replace(hidden=part.hidden.masked_fill(~active[:, None], 0.0))
        elif not active.all():
            keep = active.nonzero().squeeze(1)
            part, z, known = part.rows(keep), z[keep], Statistics(*(x[keep] for x in known))
            dlogprob, dentropy = dlogprob[keep], None if dentropy is None else dentropy[keep]
        dz = self.blocks.block_gradient(part, z, self.blocks.known_rows(part, known, dlogprob, dentropy))
        dz = dz.to(part.hidden.dtype if part.mixed else part.dtype)  # once for both products
        if total is not None:
            total[keep] = dhidden(dz, part)
        if self.needs[1]:
            add_dweight(self.grads.weight, dz, part.hidden)
        if self.needs[2]:
            self.grads.bias.add_(dz.sum(0, dtype=part.dtype))

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """-> gradients of hidden, weight and bias where needed."""
        if self.scale is not None:
            self.grads.weight.div_(self.scale)
            self.grads.bias.div_(self.scale)
        return self.grads.finish(self.head, self.weight_grad)
