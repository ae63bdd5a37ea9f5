"""Ratios of whole sequences and tokens of high entropy: the op's loss against formulas over whole sequences."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trainer_runs import metrics, run_config

from rlplus import Objective, policy_loss
from rlplus.common import agree
from rlplus.train.algorithm import Algorithm, algorithm
from rlplus.train.algorithm.options import Prefix
from rlplus.train.data import MicroBatch, Sample, pack
from rlplus.train.learner.batch import needs_statistics, set_statistics
from rlplus.train.trainer import train

LENGTHS = (5, 3, 4, 6)  # the responses'; the last one is a demonstration
GSPO = algorithm("gspo")


def micro_batch() -> tuple[MicroBatch, Tensor, Tensor]:
    """A packed batch with old and engine logprobs, and the current logprob and entropy (N,)."""
    samples = [Sample([1, 2], [3] * n, 0, i == 3, False, None if i == 3 else [0.0] * n) for i, n in enumerate(LENGTHS)]
    for sample, advantage in zip(samples, (1.0, -2.0, 0.5, 1.5), strict=True):
        sample.advantage = advantage
    weights = [torch.full((n,), 1 / (4 * n)) for n in LENGTHS]
    (batch,) = pack(samples, weights, row_length=8, tokens_per_micro_batch=64, pad_id=0)
    g = torch.Generator().manual_seed(1)
    logprob, old, engine, entropy = torch.rand(4, sum(LENGTHS), generator=g, dtype=torch.float64)
    logprob = -0.1 - 2 * logprob
    batch.old_logprob = logprob + 0.3 * (old - 0.4)
    batch.engine_logprob = torch.where(batch.external, torch.nan, batch.old_logprob + 0.4 * (engine - 0.5))
    return batch, logprob, entropy


def loss_of(batch: MicroBatch, logprob: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    logprob = logprob.clone().requires_grad_()
    wide = {name: getattr(batch, name).double() for name in ("advantage", "token_weight")}
    engine = batch.engine_logprob if objective.mismatch_cap else None
    options = {"external": batch.external, "old_logprob": batch.old_logprob, "engine_logprob": engine}
    loss, _ = policy_loss(logprob, **wide, **options, objective=objective)
    return loss, torch.autograd.grad(loss, logprob)[0]


def by_sequences(batch: MicroBatch, logprob: Tensor, a: Algorithm) -> tuple[Tensor, Tensor]:
    """The loss of the batch's rollouts, one sequence at a time."""
    logprob, o = logprob.clone().requires_grad_(), a.objective
    old = logprob.detach() if batch.old_logprob is None else batch.old_logprob
    loss = logprob.sum() * 0
    for s in range(3):
        on = batch.sequence == s
        A, gap = batch.advantage[on][0].item(), (old - batch.engine_logprob)[on]
        log_ratio = (logprob - old)[on]
        if a.ratio_level == "sequence":  # sg(s) p / sg(p), as in verl; TRL's gradient goes through the mean
            log_ratio = log_ratio - log_ratio.detach() + log_ratio.detach().mean()
        r = log_ratio.exp()
        surrogate = torch.minimum(r * A, r.clamp(1 - o.clip_low, 1 + o.clip_high) * A)
        w = {"token": gap, "sequence": gap.sum(), "geometric": gap.mean()}[a.mismatch_level].exp()
        if o.mismatch_cap is not None:
            outside = (w < o.mismatch_low) | (w > o.mismatch_cap)
            clamped = w.clamp(o.mismatch_low, o.mismatch_cap)
            surrogate = surrogate * (torch.where(outside, 0.0, w) if o.mismatch_mode == "mask" else clamped)
        loss = loss - (surrogate.expand(LENGTHS[s]) * batch.token_weight[on].double()).sum()
    return loss, torch.autograd.grad(loss, logprob)[0]


CORRECTED: dict[str, Any] = {"mismatch_cap": 1.15, "mismatch_low": 0.9}


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("mode", ["truncate", "mask", None])
@pytest.mark.parametrize("mismatch_level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_the_loss_is_that_of_whole_sequences(
    ratio_level: Any, mismatch_level: Any, mode: str | None, on_policy: bool
) -> None:
    fields = {} if mode is None else CORRECTED | {"mismatch_mode": mode}
    objective = Objective("clip", "none", clip_low=0.03, clip_high=0.02, **fields)
    a = Algorithm(objective, "sequence", ratio_level=ratio_level, mismatch_level=mismatch_level)
    batch, logprob, entropy = micro_batch()
    if on_policy:
        batch.engine_logprob += logprob - batch.old_logprob
        batch.old_logprob = None
    want = by_sequences(batch, logprob, a)
    if needs_statistics(a, on_policy):
        set_statistics([batch], [(logprob, entropy)], a, 1)
    torch.testing.assert_close(loss_of(batch, logprob, objective), want, rtol=1e-6, atol=1e-9)


def test_demonstrations_keep_their_old_policy() -> None:
    a = replace(GSPO, objective=Objective("clip", "mis"))
    batch, logprob, entropy = micro_batch()
    old = batch.old_logprob
    set_statistics([batch], [(logprob, entropy)], a, 1)
    assert torch.equal(batch.old_logprob[batch.external], old[batch.external])
    assert not torch.isclose(batch.old_logprob, old)[~batch.external].any()


@pytest.mark.parametrize("mismatch_level", ["sequence", "geometric"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_a_demonstrated_prefix_counts_as_little_as_a_prompt(mismatch_level: Any, on_policy: bool) -> None:
    """Ratio and weight of a sequence count its sampled tokens only."""
    batch, logprob, entropy = micro_batch()
    place = torch.cat([torch.arange(n) for n in LENGTHS])
    sampled = (batch.sequence < 3) & (place >= batch.sequence)  # prefixes of 0, 1 and 2 tokens
    batch.external = ~sampled
    batch.engine_logprob = batch.engine_logprob.masked_fill(~sampled, torch.nan)
    if on_policy:
        batch.old_logprob = None
    names = [name for name, value in vars(batch).items() if isinstance(value, Tensor) and value.ndim == 1]
    alone = replace(batch, **{name: getattr(batch, name)[sampled] for name in names})
    a = replace(GSPO, mismatch_level=mismatch_level)
    set_statistics([batch], [(logprob, entropy)], a, 1)
    set_statistics([alone], [(logprob[sampled], entropy[sampled])], a, 1)
    assert batch.old_logprob is not None
    torch.testing.assert_close(batch.old_logprob[sampled], alone.old_logprob, rtol=0, atol=1e-12)
    torch.testing.assert_close(batch.engine_logprob[sampled], alone.engine_logprob, rtol=0, atol=1e-12)
    assert batch.engine_logprob[~sampled].isnan().all()
    assert batch.old_logprob.isfinite().all()


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_only_the_tokens_of_the_highest_entropy_have_a_surrogate(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.common.agree.gathered", lambda value: [value])
    a = Algorithm(Objective("clip", "none"), top_entropy=share)
    batch, logprob, entropy = micro_batch()
    rollouts = ~batch.external
    threshold = torch.quantile(entropy[rollouts], 1 - share)
    advantage, kept = batch.advantage, batch.external | (entropy >= threshold)
    set_statistics([batch], [(logprob, entropy)], a, 1)
    assert torch.equal(batch.advantage, advantage.where(kept, torch.zeros(())))
    assert torch.equal(batch.entropy_weight, batch.token_weight.where(kept, torch.zeros(())))
    assert 0 < (kept & rollouts).sum() <= share * rollouts.sum() + 1


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_demonstrated_tokens_of_the_highest_entropy_have_a_surrogate(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two micro-batches, one with higher entropies. Sampled tokens and the entropy bonus are as before."""
    monkeypatch.setattr("rlplus.common.agree.gathered", lambda value: [value])
    a = Algorithm(Objective(), external_top_entropy=share)
    (one, logprob, entropy), (two, _, _) = micro_batch(), micro_batch()
    advantages = one.advantage, two.advantage
    set_statistics([one, two], [(logprob, entropy), (logprob, entropy + 1.0)], a, 1)
    shown = torch.cat([entropy[one.external], entropy[one.external] + 1.0])
    kept = shown >= shown.sort().values[int(len(shown) * (1 - share))]
    assert 0 < kept.sum() <= share * len(shown) + 1
    got = torch.cat([one.advantage[one.external], two.advantage[two.external]])
    want = torch.cat([advantages[0][one.external], advantages[1][two.external]])
    assert torch.equal(got, want.where(kept, torch.zeros(())))
    assert torch.equal(one.advantage[~one.external], advantages[0][~one.external])
    assert one.entropy_weight is None


def test_a_pass_is_made_only_where_something_changes() -> None:
    capped = Objective("clip", mismatch_cap=2.0)
    for a, on_policy, off_policy in (
        (algorithm("grpo"), False, False),
        (GSPO, False, True),
        (Algorithm(capped, mismatch_level="token"), False, False),
        (Algorithm(capped, mismatch_level="geometric"), True, True),
        (Algorithm(Objective(), top_entropy=0.2), True, True),
        (Algorithm(Objective(), external_top_entropy=0.2), True, True),
        (Algorithm(Objective(), external_top_entropy=0.2, recipe=Prefix(trained=False)), False, False),
    ):
        assert (needs_statistics(a, True), needs_statistics(a, False)) == (on_policy, off_policy)


def test_the_sums_go_over_the_ranks_that_share_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards of a micro-batch, the collective played by a sum over what both would send."""
    whole, logprob, entropy = micro_batch()
    shards = [whole.shard(i, 2) for i in range(2)]
    own = [whole.rows % whole.input_ids.shape[1] // shards[0].input_ids.shape[1] == i for i in range(2)]
    assert all((shards[0].sequence == s).any() and (shards[1].sequence == s).any() for s in (0, 3))

    def gathered(part: Tensor, neighbours: int) -> list[Tensor]:
        assert neighbours == 2
        other = shards[1 - here].sequence
        values = (logprob - whole.old_logprob)[own[1 - here]]
        counted = torch.stack([torch.bincount(other, w) for w in (values, torch.ones_like(values))])
        return [part, counted] if here == 0 else [counted, part]

    monkeypatch.setattr(agree, "gathered", gathered)
    reference, _, _ = micro_batch()
    set_statistics([reference], [(logprob, entropy)], GSPO, 1)
    for here, shard in enumerate(shards):
        shard.old_logprob = whole.old_logprob[own[here]]
        set_statistics([shard], [(logprob[own[here]], entropy[own[here]])], GSPO, 2)
        torch.testing.assert_close(shard.old_logprob, reference.old_logprob[own[here]], rtol=0, atol=1e-12)


def test_a_sure_token_of_a_sequence_that_has_drifted_has_its_ratio() -> None:
    """The stand-in for its old logprob is above 0."""
    batch, logprob, entropy = micro_batch()
    first = batch.sequence == 0
    logprob[first] = torch.tensor([-0.01, -2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    batch.old_logprob = torch.where(first, 0.75 * logprob, batch.old_logprob)
    batch.token_weight = batch.token_weight.masked_fill(batch.external, 0.0)
    exact, _ = by_sequences(batch, logprob, GSPO)
    set_statistics([batch], [(logprob, entropy)], GSPO, 1)
    assert batch.old_logprob[first].max() > 0.3
    torch.testing.assert_close(loss_of(batch, logprob, GSPO.objective)[0], exact)


# ---- in a run


@pytest.fixture
def some_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that an untrained model gets every other time, so that every update has a gradient."""

    def draw_rewards(samples: Any, *_: Any) -> None:
        for i, sample in enumerate(samples):
            sample.reward = float(i % 2)

    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)


@pytest.mark.usefixtures("some_right")
def test_a_run_trains_on_the_tokens_of_high_entropy(tmp_path: Path) -> None:
    for share in (1.0, 0.25):
        algorithm = {"preset": "grpo", "top_entropy": share}
        (row,) = metrics(train(run_config(tmp_path, str(share), algorithm=algorithm, train={"steps": 1})))
        assert row["actor/active_rows"] == pytest.approx(
            share, abs=0.05
        )  # first tokens of a group have the same entropy


@pytest.mark.usefixtures("some_right")
def test_a_run_with_weights_and_ratios_of_sequences(tmp_path: Path) -> None:
    """Ratios of sequences are nearer to 1 than ratios of tokens. Engine and trainer agree."""
    rows = []
    for ratio_level in ("token", "sequence"):
        algorithm = {"preset": "gspo", "ratio_level": ratio_level}
        algorithm |= {"mismatch_level": "sequence", "objective": {"mismatch_cap": 2.0}}
        changes = {"steps": 1, "prompts_per_update": 2, "lr": 1e-2}
        (row,) = metrics(train(run_config(tmp_path, ratio_level, algorithm=algorithm, train=changes)))
        assert row["mismatch/mean"] < 1e-5
        assert row["mismatch/truncated"] == 0
        rows.append(row)
    assert 0 < rows[1]["actor/kl_old"] < rows[0]["actor/kl_old"]


@pytest.fixture
def some_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other group all rewards are 0."""

    def draw_rewards(samples: Any, *_: Any) -> None:
        for i, sample in enumerate(samples):
            sample.reward = float(i % 2 and sample.group % 2)

    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)


@pytest.mark.usefixtures("some_equal")
def test_what_has_no_gradient_counts_in_every_statistic(tmp_path: Path) -> None:
    """A KL term with a coefficient of 1e-12 gives every sample a gradient, and changes no number beyond rounding."""
    rows, models = [], []
    for kl_coef in (0.0, 1e-12):
        algorithm = {"preset": "grpo", "top_entropy": 0.5, "objective": {"kl_coef": kl_coef}}
        changes = {"steps": 1, "prompts_per_update": 2, "lr": 1e-2}
        folder = train(run_config(tmp_path, f"{kl_coef}", algorithm=algorithm, train=changes))
        (row,) = metrics(folder)
        rows.append(row)
        models.append(load_file(folder / "model/model.safetensors"))
    assert rows[0]["batch/solve_none"] == 0.5
    shares = [row.pop("actor/active_rows") for row in rows]
    assert 0 < shares[0] < 0.35 < shares[1]  # about a quarter of the tokens; with KL more
    assert rows[0] == pytest.approx(rows[1], rel=1e-4, abs=1e-7)
    for name, weight in models[0].items():
        torch.testing.assert_close(weight, models[1][name], rtol=0, atol=1e-4)
