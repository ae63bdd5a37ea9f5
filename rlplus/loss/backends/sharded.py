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

from rlplus.loss.backends import PolicyCall, PolicyResult, Slopes
from rlplus.loss.backends.sampled import Drawn
from rlplus.loss.backends.torch_draws import draw
from rlplus.loss.head.gradient_sum import Gradients, GradientSum, Index, Want
from rlplus.loss.head.head import Head, RunningStatistics, Statistics, cap_slope, capped, scaled
from rlplus.loss.objective.tokens import FLOOR, TokenConstants, stat_names, token_loss

FIRST = ("failed", "rows", "chunk", "tokens", "call")  # the first numbers that ranks exchange; then, of each input
PER_TOKEN = 5 + len(TokenConstants._fields)  # per token, its checksum and the norm by which differences are judged
SAME_BITS = ("targets", "tokens that count")
# Shares of the norm by which checksums may differ; unrelated ones are as near as ROUNDED once in 180.
EXACT = 1e-12
ROUNDED = 0.01
GOLDEN = 0.6180339887  # multiples of it, without their whole part, are far apart
LESS = 6  # a chunk of draws has so many times fewer rows: p, shares, running sums and what compares them


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

    def part(self, head: Head) -> Head:
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
    group = _resolve_process_group(head.group)  # type: ignore[arg-type]
    n = len(head.target)
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
    lengths = [int(rank[FIRST.index("rows")]) for rank in ranks]
    chunk = int(min(rank[FIRST.index("chunk")] for rank in ranks))
    return Shards(group, lengths, chunk)


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
            want = ranks[0][column]
            got = numbers[column]
            if not (want == got or (isnan(want) and isnan(got)) or abs(want - got) < tolerance):
                return f"as many with other {name} on rank {rank} than on rank 0"
    return ""


def policy_loss(blocks: Blocks, shards: Shards, call: PolicyCall) -> PolicyResult:
    """As a backend's; the gradients of weight and bias are those of this rank's rows."""
    head, constants, objective, want = call
    logprob = head.new_column()
    entropy = head.new_column()
    loss = head.hidden.new_zeros((), dtype=head.dtype)
    stats = loss.new_zeros(len(stat_names(constants)))
    grads = ShardedGradients(blocks, shards, head, want, call.factors)
    for rows, part, z, known in chunks(blocks, shards, head):
        logprob[rows] = known.logprob
        entropy[rows] = known.entropy
        out = token_loss(known.logprob, known.entropy, constants.rows(rows), objective)
        loss += out.loss
        stats += torch.stack(list(out.stats.values()))
        grads.add_chunk(rows, part, z, known, out.dlogprob, out.dentropy if objective.entropy_coef else None)
    return PolicyResult(loss, logprob, entropy, stats, grads.finish())


def logprob(blocks: Blocks, shards: Shards, head: Head) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,)."""
    logprob = head.new_column()
    entropy = head.new_column()
    for rows, _, _, known in chunks(blocks, shards, head):
        logprob[rows] = known.logprob
        entropy[rows] = known.entropy
    return logprob, entropy


def logprob_backward(blocks: Blocks, shards: Shards, head: Head, slopes: Slopes, want: Want) -> Gradients:
    """As a backend's; the logits are computed again."""
    grads = ShardedGradients(blocks, shards, head, want, list(slopes))
    for rows, part, z, known in chunks(blocks, shards, head):
        grads.add_chunk(rows, part, z, known, *slopes.rows(rows))
    return grads.finish()


def chunks(blocks: Blocks, shards: Shards, head: Head) -> Iterator[tuple[slice, Head, Tensor, Statistics]]:
    """Which tokens, the head of those and this rank's rows, its logits, and the statistics of the whole rows."""
    for start in range(0, len(head.target), shards.chunk):
        rows = slice(start, min(start + shards.chunk, len(head.target)))
        whole = head.rows(rows)
        part = shards.part(whole)
        z = blocks.block_logits(part) if len(part.weight) else whole.hidden.new_empty(len(part.hidden), 0)
        yield rows, part, z, _merged(whole, shards, _part_statistics(blocks, part, z))


def _part_statistics(blocks: Blocks, part: Head, z: Tensor) -> Statistics:
    if not z.shape[1]:
        none = z.new_zeros(len(z), dtype=part.dtype)
        return Statistics(torch.full_like(none, -torch.inf), none, none, none)
    running = blocks.running_statistics(part)
    running.take(part, z.clone() if blocks.OVERWRITES else z)
    return running.finish()


def _merged(head: Head, shards: Shards, statistics: Statistics) -> Statistics:
    """The statistics of whole rows, from every rank's."""
    running = RunningStatistics(head, lambda block, rows: Statistics(*rows))
    every = zip(shards.starts, shards.lengths, _gathered(torch.stack(list(statistics)), shards.group), strict=True)
    for start, length, rows in every:
        running.take(head._replace(weight=head.weight.new_empty(length, 0), target=head.target - start), rows)
    return running.finish()


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of every rank, (ranks, ...)."""
    out = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(out.unbind()), x, group)
    return out


class ShardedGradients(GradientSum):
    """The inputs' gradients: hidden's summed over the ranks, weight's and bias's of this rank's rows of the head."""

    def __init__(self, blocks: Blocks, shards: Shards, head: Head, want: Want, factors: list[Tensor]) -> None:
        super().__init__(head, want, factors)
        self.blocks = blocks
        self.group = shards.group

    def add_chunk(
        self, rows: slice, part: Head, z: Tensor, known: Statistics, dlogprob: Tensor, dentropy: Tensor | None
    ) -> None:
        """z (n, V): the rank's own logits of these rows. Collective, and alike on all ranks."""
        if not self.want.some:
            return
        active = dlogprob != 0 if dentropy is None else (dlogprob != 0) | (dentropy != 0)
        if z.shape[1]:
            slopes = self.scaled(dlogprob), None if dentropy is None else self.scaled(dentropy)
            z = self.blocks.block_gradient(part, z, self.blocks.known_rows(part, known, *slopes))
        dz = z.to(part.hidden.dtype if part.mixed else part.dtype)  # once for both products
        self.add(rows, part, dz, active, clean=True)

    def set_hidden(self, rows: Index, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.group)
        super().set_hidden(rows, gradient)


class ShardedDrawer:
    """`sampled.Drawer` of the head of this rank's rows: each rank draws from these, for a sampled backward pass.

    A rank has random numbers of its own, so that errors of different ranks are not alike.
    """

    def __init__(self, blocks: Blocks, shards: Shards, whole: Head) -> None:
        self.blocks = blocks
        self.whole = whole
        self.shards = shards._replace(chunk=max(1, shards.chunk // LESS))

    def draws(self, head: Head, on: Tensor, scratch_bytes: float) -> Iterator[tuple[slice, Drawn]]:
        """head: of this rank's rows. Collective."""
        for rows, part, z, known in chunks(self.blocks, self.shards, self.whole):
            yield rows, self._drawn(part, on[rows], z, known)

    def _drawn(self, part: Head, on: Tensor, z: Tensor, known: Statistics) -> Drawn:
        if not z.shape[1]:
            none = known.entropy[:0]
            number = part.target[:0]
            zeros = torch.zeros_like(known.entropy)
            return Drawn(known.logprob, known.entropy, number, number, none, none, None, None, zeros, zeros, zeros != 0)
        assert part.uniform is not None
        part = part._replace(uniform=(part.uniform + GOLDEN * self.shards.group.rank()) % 1)
        x = scaled(z, part)
        slope = cap_slope(x, part)
        logp = capped(x, part).sub_(known.reference[:, None]).sub_(known.logsum[:, None]).clamp_(min=FLOOR)
        return draw(part, on, logp, torch.empty_like(logp), known.logprob, known.entropy, slope)
