"""The simulation of engines behind decision 034: against a token by token one, the plan, and laws."""

import random

import numpy as np
import pytest
from plan_cases import PAPER, make_plan, paper

from experiments import segment_times
from experiments.segment_times import Engine, draw, main, make_engine, mean_age
from rlplus.tools.plan import make_cluster

PROMPT = 10
WEIGHTS_ALONE = Engine(weights=6.0, cache=0.0, flop=0.0, slots=1, bandwidth=2.0, flops=1.0)


def token_by_token(engine: Engine, sequences: list[tuple[int, int]]) -> float:
    """Each step samples a token of each sequence that runs; the memory or the arithmetic takes longer."""
    queue, running, seconds = list(sequences), [], 0.0
    while queue or running:
        while queue and len(running) < engine.slots:
            running.append([*queue.pop(0)])
        read = engine.weights + engine.cache * sum(there for there, _ in running)
        seconds += max(read / engine.bandwidth, engine.flop * len(running) / engine.flops)
        running = [[there + 1, left - 1] for there, left in running if left > 1]
    return seconds


@pytest.mark.parametrize("slots", [1, 3, 8, 100])
@pytest.mark.parametrize("flop", [0.0, 40.0, 1000.0])
def test_decoding_is_that_of_a_loop_over_tokens(slots: int, flop: float) -> None:
    """Bound by memory, by arithmetic, and by one after the other."""
    rng = random.Random(0)
    sequences = [(rng.randrange(30), rng.randint(1, 40)) for _ in range(50)]
    engine = Engine(100.0, 1.5, flop, slots, 2.0, 1.0)
    assert engine.decode(sequences) == pytest.approx(token_by_token(engine, sequences), rel=1e-12)


@pytest.mark.parametrize("segment", [None, 7680, 5000])
def test_responses_as_long_as_allowed_take_what_the_plan_says(segment: int | None) -> None:
    """Whole waves of as many as the plan's cache holds; the plan's mean context is half a token longer."""
    long = ("algorithm.preset=grpo", "rollout.max_response_length=15000", "evaluation.data.max_prompt_length=1024")
    chosen = (f"rollout.segment={segment}",) if segment else ()
    cluster = make_cluster(8, "a100-80g")
    slots = make_plan(paper(*long), cluster).sequences
    config = paper(*long, *chosen, f"train.prompts_per_step={8 * slots}", "train.prompts_per_update=null")
    plan = make_plan(config, cluster)
    engine = make_engine(config, "a100-80g", 8, 15_000)
    assert engine.slots == slots == plan.sequences > 8
    batches = np.full((config.rollout.waiting + 1, slots, 8), 15_000)
    assert engine.step(batches, 1024, segment or 15_000) == pytest.approx(plan.seconds["generate"], rel=1e-4)


def test_a_draw_samples_as_many_tokens_as_a_batch_has() -> None:
    """One at a time, for three seconds each, whatever the segments; what is there is read again in arithmetic alone."""
    lengths = draw((4, 3), 20.0, 0.8, 0.5, 40, seed=1)
    assert lengths.min() < lengths.max() == 40
    for segment, batches in ((40, 1), (20, 2), (7, 6)):
        seconds = WEIGHTS_ALONE.step(np.stack([lengths] * batches), PROMPT, segment)
        assert seconds == pytest.approx(3.0 * lengths.sum(), rel=1e-12)
    arithmetic = Engine(0.0, 0.0, 1.0, 1, 1.0, 1.0)
    again = sum(PROMPT + there for length in lengths.flat for there in range(7, int(length), 7))
    seconds = arithmetic.step(np.stack([lengths] * 6), PROMPT, 7)
    assert seconds == pytest.approx(4 * PROMPT + again + lengths.sum(), rel=1e-12)


def test_ages_of_tokens() -> None:
    """Segments of 3 that wait two steps: 8 tokens have 2 2 2 1 1 1 0 0, 4 tokens 2 2 2 1."""
    assert mean_age(np.array([8, 4]), 3, 2) == pytest.approx((9 + 7) / 12)
    assert mean_age(np.array([8, 4]), 8, 0) == 0


def test_lengths_have_the_median_and_the_shared_variance() -> None:
    logs = np.log(draw((4000, 8), 3000.0, 0.8, 0.5, 10**9, seed=0))
    assert np.median(logs) == pytest.approx(np.log(3000), abs=0.05)
    assert logs.var() == pytest.approx(0.64, rel=0.05)
    assert logs.mean(1).var() == pytest.approx(0.32 + 0.32 / 8, rel=0.1)


def test_the_command_prints_a_row_per_segment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(segment_times, "STEPS", 1)
    monkeypatch.setattr(segment_times, "make_plan", make_plan)
    main([str(PAPER), "train.prompts_per_step=64", "--segments", "4096"])
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("segment  mean  slots  generation s  step s  age")
    assert [row.split()[0] for row in rows] == ["whole", "4096"]
    rest = []
    for row, chosen in zip(rows, ((), ("rollout.segment=4096",)), strict=True):
        _, mean, _, generation, step, age, *longest = map(float, row.replace("whole", "0").split())
        plan = make_plan(paper("train.prompts_per_step=64", *chosen), make_cluster(8, "a100-80g")).seconds
        assert longest == [round(plan["generate"]), round(plan["total"])]
        assert 3000 < mean < 4100
        assert generation < longest[0]
        assert generation < step < longest[1]
        assert (age > 0) == bool(chosen)
        rest.append(step - generation)
    assert rest[1] > 1.02 * rest[0], "demonstrations have no engine's logprobs: a pass over all of them"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.overlap=1", "want rollout.mode colocated, .* train.overlap 0; got process, 1 and 1"),
        ("rollout.tensor_parallel_size=2", "tensor_parallel_size 1 .*; got colocated, 2 and 0"),
    ],
)
def test_what_is_not_simulated_is_refused(override: str, message: str) -> None:
    chosen = (override, "rollout.mode=process", "rollout.sleep=false") if "overlap" in override else (override,)
    with pytest.raises(ValueError, match=message):
        segment_times.measure(paper(*chosen), "a100-80g", 8, (3000.0, 0.8, 0.0))
    with pytest.raises(ValueError, match=r"want room for a sequence of .* tokens; got -1 slots"):
        segment_times.measure(paper(), "a100-80g", 8, (3000.0, 0.8, 0.0), -1)
