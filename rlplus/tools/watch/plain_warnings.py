"""Warnings about a run that is followed, in plain words."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlplus.common.terminal import duration
from rlplus.tools.watch.followed_run import FollowedRun
from rlplus.train.config import MAX_LOGPROB_GAPS

RECENT = 5  # steps whose means are looked at
QUIET_S = 600.0  # time without a token, a grade or a micro-batch; an engine that hangs is ended after less
NEAR_LIMIT = 0.5  # share of rollout.max_logprob_gap, above which the run stops
OFF = 0.1  # share of tokens whose probabilities differ by more than 10%
OLD = 1.0  # a batch's age in steps
MOVED = 0.1  # the KL to the batch's policy
CLIPPED = 0.2  # the share of clipped ratios
# Shares of responses.
CUT = 0.5
UNREAD = 0.5
UNGRADED = 0.1


def warnings_of(run: FollowedRun) -> list[str]:
    """Sentences: first about the life of the run, then about its last steps."""
    recent = run.data.metrics[-RECENT:]
    return [*_of_life(run), *_of_engine(recent, run.settings), *_of_updates(recent), *run.problems]


def _of_life(run: FollowedRun) -> Iterator[str]:
    life = run.life
    now = life.now or {}
    if life.state == "gone":
        yield (
            f"No sign of life for {duration(life.since)}: the run was killed, or its machine is down or cannot write. "
            "`rlplus train` with --resume goes on from the newest checkpoint; this page follows it."
        )
    elif life.state == "running" and (quiet := float(now.get("quiet_seconds", 0.0)) + life.since) > QUIET_S:
        yield f"No progress for {duration(quiet)}: the run lives, and still is in “{now.get('phase', '')}”."
    elif life.state == "unknown":
        yield "There is no progress.json: a version of rlplus that wrote none trains here, or nothing does."


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(step[name]) for step in steps if name in step]
    return fmean(values) if values else None


def _of_engine(steps: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Iterator[str]:
    gap = _mean(steps, "mismatch/mean")
    given = settings.get("rollout.max_logprob_gap")
    default = MAX_LOGPROB_GAPS.get(settings.get("model.dtype", ""))
    limit = NEAR_LIMIT * given if given else default
    if gap is not None and limit and gap > limit:
        stops = (
            f"the run stops at {given:.2g} (rollout.max_logprob_gap)" if given else "the run ends unless it is rounding"
        )
        yield (
            f"The rollout engine and the trainer give the sampled tokens different probabilities: their logprobs are "
            f"{gap:.2g} apart on average, and {stops}."
        )
    off = _mean(steps, "mismatch/outside_10pct")
    if off is not None and off > OFF:
        yield (
            f"{off:.0%} of the sampled tokens have a probability in the trainer that is more than 10% off the rollout "
            "engine's: gradients are of samples from a slightly different policy (algorithm.objective.mismatch_cap)."
        )
    age = _mean(steps, "batch/staleness")
    moved = _mean(steps, "actor/kl_old") or 0.0
    clipped = sum(_mean(steps, f"actor/clip_fraction_{side}") or 0.0 for side in ("low", "high"))
    if age is not None and age >= OLD and (moved > MOVED or clipped > CLIPPED):
        yield (
            f"Samples are stale: the policy that drew them is {age:.2g} steps old, and the trained one has moved away "
            f"from it (KL {moved:.2g}, {clipped:.0%} of ratios clipped). A smaller train.overlap or train.lr or a "
            "larger rollout.segment helps."
        )


def _of_updates(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(steps) == RECENT and _mean(steps, "actor/updated") == 0:
        yield (
            f"No update in the last {RECENT} steps: all rewards in a group are equal, so nothing has a gradient. The "
            "problems may be too hard or too easy, or the grader does not read the answers."
        )
    if (bad := _mean(steps, "actor/nonfinite") or 0.0) > 0:
        yield f"{bad:.0%} of the last updates were skipped: their gradient had NaN or infinity."
    for name, most, what in (
        ("response_length/clipped", CUT, "were cut off at rollout.max_response_length, most likely before an answer"),
        ("reward/no_box", UNREAD, "have no box, which their prompts or the grader ask for"),
        ("reward/unparsed", UNREAD, "have no answer that the grader can read"),
        ("reward/masked", UNGRADED, "could not be graded: the grader ran out of time or died"),
    ):
        if (share := _mean(steps, name) or 0.0) > most:
            yield f"{share:.0%} of the last responses {what}."
