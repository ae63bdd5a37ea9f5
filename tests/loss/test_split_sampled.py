"""backward="sampled" of a head that is split over ranks, on ranks that are threads: the right mean, what all ranks know
alike, and exact gradients where every element is kept."""

from typing import Any

import pytest
import torch
from head_cases import EVERYTHING, Head, check_fp64, run, sample, to
from split_heads import CPP, SPLITS, TRITON, V, rows_of, split_run
from thread_ranks import one_launch_at_a_time, together
from torch import Tensor

from rlplus import Objective, linear_logprob

lock = one_launch_at_a_time


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_where_every_element_is_kept_a_sampled_pass_is_exact(split: tuple[int, ...]) -> None:
    head, constants = sample(19, V)
    options: dict[str, Any] = {"backend": "torch", "backward": "sampled", "threshold": 1e-9, "seed": 1}
    got = split_run(split, head, constants, EVERYTHING, **options)
    stats, one = got["stats"], run(head, constants, EVERYTHING, **options)["stats"]
    assert stats["sampled_elements"] == V * stats["active_rows"]
    for name in ("variance", "square", "elements", "flat"):
        torch.testing.assert_close(stats.pop(f"sampled_{name}"), one[f"sampled_{name}"])
    check_fp64(got, head, constants, EVERYTHING)


@pytest.mark.parametrize("backend", ["torch", CPP, TRITON])
def test_the_mean_of_sampled_gradients_is_the_exact_one(backend: str, lock: None) -> None:
    """64 draws of a noise that is known: their mean is off by an eighth of it, give or take a third of that."""
    head, constants = sample(19, V, dtype=torch.float32)
    objective = Objective("ratio", "mis")
    options: dict[str, Any] = {"backend": backend, "backward": "sampled", "threshold": 0.2}

    def work(rank: int, group: Any) -> tuple[list[Tensor], float]:
        own, sums, noise = rows_of(head, (12, 11), rank), [], 0.0
        for seed in range(64):
            found = run(own, constants, objective, group=group, seed=seed, **options)
            noise = float(found["stats"]["sampled_variance"] / found["stats"]["sampled_square"]) ** 0.5
            sums.append(torch.cat([found["dweight"].flatten(), found["dbias"]]))
        return sums, noise

    (first, noise), (second, other) = together(2, work)
    assert noise == other
    assert 0.05 < noise < 1
    draws = torch.stack([torch.cat([x, y]) for x, y in zip(first, second, strict=True)]).double()
    exact = run(to(head, torch.float64), to(constants, torch.float64), objective, backend="torch")
    rows = [(exact["dweight"][own], exact["dbias"][own]) for own in (slice(12), slice(12, None))]
    want = torch.cat([torch.cat([w.flatten(), b]) for w, b in rows])
    error = (draws - want).norm(dim=1).square().mean().sqrt()
    assert (draws.mean(0) - want).norm() < 1.7 * error / 8
    assert error > 0.02 * want.norm()


def test_logprobs_of_a_split_head_have_a_sampled_backward_pass() -> None:
    head, _ = sample(19, V)
    up = torch.randn(19, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def call(part: Head, **options: Any) -> tuple[Tensor, ...]:
        leaf = {k: v.detach().clone().requires_grad_() for k, v in part.items() if k != "target"}
        logprob, entropy = linear_logprob(**leaf, target=head["target"], **options)
        return logprob.detach(), *torch.autograd.grad((up * logprob - entropy).sum(), list(leaf.values()))

    def work(rank: int, group: Any) -> tuple[Tensor, ...]:
        own = rows_of(head, (9, 0, 14), rank)
        return call(own, group=group, backend="torch", backward="sampled", threshold=1e-9, seed=0)

    found, want = together(3, work), call(head, backend="reference")
    got = *found[0][:2], torch.cat([x[2] for x in found]), torch.cat([x[3] for x in found])
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-9, atol=1e-10)
    assert all(torch.equal(found[0][1], x[1]) for x in found)


def test_ranks_that_do_not_all_draw_are_refused() -> None:
    head, constants = sample(9, V)

    def work(rank: int, group: Any) -> None:
        run(
            rows_of(head, (12, 11), rank), constants, EVERYTHING, group=group, backend="torch",
            backward=("exact", "sampled")[rank],
        )  # fmt: skip

    with pytest.raises(ValueError, match="want the same call on all ranks"):
        together(2, work)
