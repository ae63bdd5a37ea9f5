"""Contract of group_advantages and token_weights, against loops over groups and sequences."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlplus import group_advantages, token_weights

REDUCTIONS = ("token", "sequence", "constant", "official")


def bits(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6


# ---- group_advantages


def loop_advantages(
    rewards: list[float], groups: list[int], include: list[bool], normalize_std: bool, eps: float
) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g, i in zip(rewards, groups, include, strict=True) if g == group and i]
        mean = statistics.fmean(members) if len(members) > 1 else 0.0
        std = statistics.stdev(members) if len(set(members)) > 1 else 0.0
        out.append((reward - mean) / (std + eps if normalize_std and std else 1.0))
    return out


@settings(max_examples=80)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.7, 1.0, -2.0]), st.integers(-3, 3), st.booleans()), max_size=24
    ),
    normalize_std=st.booleans(),
    eps=st.sampled_from([1e-6, 0.0, 0.3]),
    with_include=st.booleans(),
)
def test_advantages_match_loops(rows: list, normalize_std: bool, eps: float, with_include: bool) -> None:
    rewards, groups, include = ([row[i] for row in rows] for i in range(3))
    got = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        normalize_std=normalize_std,
        include=torch.tensor(include, dtype=torch.bool) if with_include else None,
        eps=eps,
    )
    want = loop_advantages(rewards, groups, include if with_include else [True] * len(rows), normalize_std, eps)
    assert got.tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_seven_wrong_rollouts_and_one_correct_demonstration() -> None:
    rewards, groups = torch.tensor([0.0] * 7 + [1.0]), torch.zeros(8, dtype=torch.int64)
    assert group_advantages(rewards, groups, normalize_std=False).tolist() == [-0.125] * 7 + [0.875]
    std = math.sqrt(0.125)  # n - 1 in the denominator: (7/64 + 49/64) / 7
    want = torch.tensor([-0.125] * 7 + [0.875]) / (std + 1e-6)
    torch.testing.assert_close(group_advantages(rewards, groups), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_are_exactly_0(dtype: torch.dtype, normalize_std: bool) -> None:
    order = torch.randperm(7 * 11, generator=torch.Generator().manual_seed(0))
    groups = (torch.arange(11) * 10**12 - 5).repeat(7)[order]
    rewards = torch.full((77,), 0.7, dtype=dtype)
    got = group_advantages(rewards, groups, normalize_std=normalize_std)
    assert got.dtype == dtype
    assert torch.equal(got, torch.zeros_like(rewards))


def test_a_group_of_one_keeps_its_reward_and_include_restricts_the_statistics() -> None:
    rewards = torch.tensor([0.25, 1.0, 0.0, 1.0, 0.0, 0.5])
    groups = torch.tensor([7, 3, 3, 3, 3, 3])
    assert group_advantages(rewards, groups)[0] == 0.25
    include = torch.tensor([True, False, True, True, True, True])
    got = group_advantages(rewards, groups, include=include, normalize_std=False)
    assert got.tolist() == [0.25, 0.625, -0.375, 0.625, -0.375, 0.125]
    alone = group_advantages(rewards, groups, include=groups == 7)
    assert torch.equal(alone, rewards)  # nothing to be compared with


def test_advantages_keep_any_shape_and_order() -> None:
    rewards = torch.rand(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups = torch.arange(6).view(6, 1).expand(6, 8)
    want = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(group_advantages(rewards, groups), want, rtol=1e-12, atol=1e-12)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(2))
    shuffled = group_advantages(rewards.flatten()[order], groups.flatten()[order])
    torch.testing.assert_close(shuffled, want.flatten()[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.tensor([1, 0])}, r"want rewards a tensor, floating; got int64 \(2,\)"),
        ({"rewards": [1.0, 0.0]}, "want rewards .*got list"),
        ({"rewards": torch.tensor([1.0, math.nan])}, "want rewards finite everywhere"),
        ({"group_ids": torch.tensor([0, 0, 1])}, r"want group_ids .*int64 \(2,\) on cpu; got int64 \(3,\)"),
        ({"group_ids": torch.tensor([0, 0], dtype=torch.int32)}, "want group_ids .*got int32"),
        ({"group_ids": torch.tensor([0, 0], device="meta")}, "want group_ids .*on cpu; got .*on meta"),
        ({"include": torch.tensor([1.0, 0.0])}, "want include .*bool.*got float32"),
    ],
)
def test_advantages_say_what_they_wanted_and_what_came(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(**({"rewards": torch.ones(2), "group_ids": torch.zeros(2, dtype=torch.int64)} | change))


# ---- token_weights


def loop_weights(
    mask: list[list[bool]], reduction: str, *, external: list[list[bool]] | None = None, max_length: int, ranks: int = 8
) -> list[list[float]]:
    """Token by token from the table of normalisers."""
    kind = external if external and reduction != "official" else [[False] * len(row) for row in mask]
    out = []
    for i, row in enumerate(mask):
        out.append([0.0] * len(row))
        for t, on in enumerate(row):
            if not on:
                continue
            same = [
                [m and k == kind[i][t] for m, k in zip(ms, ks, strict=True)] for ms, ks in zip(mask, kind, strict=True)
            ]
            tokens, sequences = sum(map(sum, same)), sum(map(any, same))
            out[i][t] = {
                "token": 1 / tokens,
                "sequence": 1 / (sequences * sum(same[i])),
                "constant": 1 / (sequences * max_length),
                "official": 1 / (ranks * max_length),
            }[reduction]
    return out


@pytest.mark.parametrize("with_external", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=25)
@given(data=st.data())
def test_weights_match_loops(reduction: str, with_external: bool, data: st.DataObject) -> None:
    B, T = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    grid = st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=B, max_size=B)
    mask, external = data.draw(grid), data.draw(grid) if with_external else None
    got = token_weights(
        torch.tensor(mask),
        reduction,  # type: ignore[arg-type]
        max_length=10,
        ranks=3,
        external=None if external is None else torch.tensor(external),
    )
    want = torch.tensor(loop_weights(mask, reduction, external=external, max_length=10, ranks=3))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("with_external", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_packed_tokens_weigh_what_padded_ones_do(reduction: str, with_external: bool) -> None:
    mask = bits(5, 9, seed=0)
    external = (torch.arange(5) % 2 == 0).view(5, 1).expand(5, 9) if with_external else None
    ids = (100 - 7 * torch.arange(5)).view(5, 1).expand(5, 9)
    padded = token_weights(mask, reduction, max_length=20, external=external)  # type: ignore[arg-type]
    order = torch.randperm(int(mask.sum()), generator=torch.Generator().manual_seed(1))
    packed = token_weights(
        mask[mask][order],
        reduction,  # type: ignore[arg-type]
        max_length=20,
        sequence_ids=ids[mask][order],
        external=None if external is None else external[mask][order],
    )
    assert torch.equal(packed, padded[mask][order])
    assert (padded[~mask] == 0).all()


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["int", "tensor"])
@pytest.mark.parametrize("with_external", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_with_global_totals_weigh_the_same(reduction: str, with_external: bool, kind: Any) -> None:
    mask = bits(8, 9, seed=2)
    external = bits(8, 1, seed=3).expand(8, 9)
    whole = token_weights(mask, reduction, max_length=20, external=external if with_external else None)  # type: ignore[arg-type]
    pairs = with_external and reduction != "official"
    kinds = (mask & ~external, mask & external) if pairs else (mask,)
    tokens = tuple(kind(int(k.sum())) for k in kinds)
    sequences = tuple(kind(int(k.any(1).sum())) for k in kinds)
    totals: dict[str, Any] = {"total_tokens": tokens, "total_sequences": sequences}
    if not pairs:
        totals = {k: v[0] for k, v in totals.items()}
    for parts in (2, 4):
        pieces = [
            token_weights(m, reduction, max_length=20, external=e if with_external else None, **totals)  # type: ignore[arg-type]
            for m, e in zip(mask.chunk(parts), external.chunk(parts), strict=True)
        ]
        assert torch.equal(torch.cat(pieces), whole)


def test_weights_of_every_reduction_on_one_small_batch() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert token_weights(mask).tolist() == [[0.25, 0.25, 0.25, 0], [0.25, 0, 0, 0]]
    third = torch.tensor(1 / 6).item()
    assert token_weights(mask, "sequence").tolist() == [[third, third, third, 0], [0.5, 0, 0, 0]]
    assert token_weights(mask, "constant", max_length=4)[0, 0] == 1 / 8
    assert token_weights(mask, "official", max_length=4)[0, 0] == 1 / 32  # eight ranks
    assert token_weights(mask, "official", max_length=4, ranks=2)[1, 0] == 1 / 8


def test_nothing_unmasked_weighs_nothing() -> None:
    for reduction in REDUCTIONS:
        for shape in ((3, 4), (0, 4), (3, 0)):
            got = token_weights(torch.zeros(shape), reduction, max_length=4)  # type: ignore[arg-type]
            assert torch.equal(got, torch.zeros(shape))


def test_constant_needs_no_sequence_ids_when_the_total_is_known() -> None:
    got = token_weights(torch.tensor([True, False, True]), "constant", max_length=5, total_sequences=4)
    assert got.tolist() == torch.tensor([0.05, 0, 0.05]).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "mean"}, "want reduction one of token, sequence, constant, official; got 'mean'"),
        ({"mask": [1, 0]}, "want mask a tensor; got list"),
        ({"mask": torch.tensor([[0.5, 1.0]])}, r"want mask bool or only 0 and 1.*float32 \(1, 2\)"),
        ({"mask": torch.ones(4), "reduction": "sequence"}, r"want sequence_ids, or a mask .*got a mask \(4,\) alone"),
        ({"reduction": "constant"}, "want max_length >= 1 for reduction 'constant'; got None"),
        ({"reduction": "official", "max_length": 0}, "want max_length >= 1 for reduction 'official'; got 0"),
        ({"ranks": 0}, "want ranks >= 1; got 0"),
        ({"external": torch.ones(2, 4)}, r"want external .*bool.*got float32 \(2, 4\)"),
        ({"sequence_ids": torch.zeros(8, dtype=torch.int64)}, r"want sequence_ids .*\(2, 4\).*got int64 \(8,\)"),
        ({"total_tokens": (4, 4)}, r"want total_tokens one number; got \(4, 4\)"),
        ({"total_tokens": 8, "external": torch.ones(2, 4, dtype=torch.bool)}, "want total_tokens a pair .*got 8"),
        ({"total_sequences": -2}, "want total_sequences >= 0; got -2"),
    ],
)
def test_weights_say_what_they_wanted_and_what_came(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_weights(**({"mask": torch.ones(2, 4)} | change))
