"""A run goes on with another number of ranks: the same bits are divided anew, and nothing that waits is lost."""

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from engine_runs import changed, model
from other_ranks import CASES, STEPS, fixed_rollouts, on_one, write_cases
from recipe_cases import drawn_batch, recipe_of
from trainer_runs import metrics, on_ranks, run_config, write_state

from rlplus.common.agree import initialize_distributed
from rlplus.train.config import Config, TrainConfig
from rlplus.train.data import Sample
from rlplus.train.learner.deepspeed_settings import check_resharding
from rlplus.train.learner.resharding import _frozen, _in_a_row, _in_parts, _Move
from rlplus.train.recipe import Recipe
from rlplus.train.recipe.replay import Remembered
from rlplus.train.trainer import train
from rlplus.train.trainer.rollouts import Drawn, _share

# DeepSpeed's converter confuses the parameters that are "in turns".
BY_CONVERTER = ["unfinished", "waiting", "ZeRO-1", "ZeRO-3", "LoRA, ZeRO-2"]
CHECKPOINT = Path(f"checkpoints/step-{STEPS[0]:06d}")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script, folder = processes.SUPPORT / "other_ranks.py", tmp_path_factory.mktemp("cases")
    write_cases(folder)
    initialize_distributed()
    on_ranks(script, folder, "first", *CASES)
    with fixed_rollouts():
        for name in CASES:
            on_one(folder, name)
    on_ranks(script, folder, "again", *CASES)
    return folder


@pytest.fixture
def runs(every: Path, name: str) -> Path:
    return every / name


def unequal(one: Any, other: Any, where: str) -> list[str]:
    """The places where two values differ by a bit; NaN is like NaN, and a batch's seconds do not count."""
    if is_dataclass(one) and is_dataclass(other):
        one, other = vars(one), vars(other)
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*dict.fromkeys((*one, *other))]
        return [line for k in keys if k != "seconds" for line in unequal(one.get(k), other.get(k), f"{where}, {k}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [line for i, pair in enumerate(zip(one, other, strict=True)) for line in unequal(*pair, f"{where}, {i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [where]
    return [] if repr(one) == repr(other) or type(one).__name__ == "LossScaler" else [where]


def read(file: Path) -> Any:
    return torch.load(file, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_bit_changes_on_the_way_over_one_rank(name: str, runs: Path) -> None:
    """Two ranks write, one takes it over and writes, two take that over and write: the same, without a step."""
    first, last = runs / "first" / CHECKPOINT, runs / "moved" / CHECKPOINT
    files = [file.relative_to(first) for file in first.rglob("*.pt") if not file.name.startswith("rng-")]
    assert sum("optim_states" in file.name for file in files) >= 2
    for file in files:
        assert not unequal(read(first / file), read(last / file), str(file))
    if name == "waiting":
        assert sum(len(read(first / f"rank-{rank}.pt")["recipe"][1]) for rank in (0, 1)) == 3
    if name == "unfinished":
        assert all(len(read(first / f"rank-{rank}.pt")["rollouts"]) == 2 for rank in (0, 1))
    states = [json.loads((place / "state.json").read_text()) for place in (first, runs / "one" / CHECKPOINT, last)]
    assert [state.pop("world_size") for state in states] == [2, 1, 2]
    assert all({**state, "config": 0, "files": 0} == {**states[0], "config": 0, "files": 0} for state in states)


def relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), 1e-3)


def apart(first: Path, second: Path) -> tuple[float, float]:
    """The largest relative difference of a metric, and of a weight's norm."""
    rows = [*zip(metrics(first), metrics(second), strict=True)]
    assert len(rows) == STEPS[-1]
    assert all(one.keys() == other.keys() for one, other in rows)
    one, other = model(first), model(second)
    weights = (float((other[name].double() - w.double()).norm() / w.double().norm()) for name, w in one.items())
    return max(relative(row[name], again[name]) for row, again in rows for name in row), max(weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_ends_as_a_run_that_had_two_ranks_all_the_time(name: str, runs: Path) -> None:
    """But for rounding, which a run on one rank measures: the sums of its gradients have another order, too."""
    rounding, found = (apart(runs / "whole", runs / other) for other in ("alone", "parts"))
    assert rounding[0] < 1e-4 or "bfloat16" in str(CASES[name]), "not rounding"
    for much, most in zip(found, rounding, strict=True):
        assert much <= 4 * most + 1e-6
    steps = [row["actor/updated"] for row in metrics(runs / "parts")]
    assert steps == [1.0] * STEPS[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_CONVERTER)
def test_one_rank_has_what_deepspeeds_converter_reads(name: str, runs: Path, tmp_path: Path) -> None:
    """On one rank the flat tensors are the parameters one after the other, at every stage."""
    of_two, of_one = (runs / kind / CHECKPOINT / "policy" for kind in ("first", "one"))
    out = tmp_path / "universal/policy"
    out.mkdir(parents=True)
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(SimpleNamespace(input_folder=str(of_two), output_folder=str(out), **workers, **options))
    (file,) = of_one.glob("*model_states.pt")
    shapes = read(file)["param_shapes"]
    (file,) = of_one.glob("*optim_states.pt")
    saved = read(file)["optimizer_state_dict"]
    flat = saved.get("fp32_flat_groups") or saved["single_partition_of_fp32_groups"]
    states = (saved.get("optimizer_state_dict") or saved["base_optimizer_state"])["state"]
    for group, names in enumerate(shapes):
        start = 0
        for parameter, shape in names.items():
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                value = flat[group] if key == "fp32" else states[group][key]
                want = read(out / f"zero/{parameter}/{key}.pt")
                want = want["param"] if isinstance(want, dict) else want
                got = value[start : start + shape.numel()]
                assert torch.equal(got, want.flatten()), (parameter, key)
                assert got.count_nonzero()
            start += shape.numel()


class AsRank:
    """Makes torch.distributed say that this process is one of so many ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __call__(self, rank: int, world: int) -> None:
        self._patch.setattr("torch.distributed.get_rank", lambda *_: rank)
        self._patch.setattr("torch.distributed.get_world_size", lambda *_: world)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> AsRank:
    initialize_distributed()
    return AsRank(monkeypatch)


@pytest.mark.parametrize("layout", ["a row", "parts"])
def test_a_number_that_no_rank_has_is_named(layout: str) -> None:
    shapes = [{"a": torch.Size([3, 3]), "b": torch.Size([5])}]
    if layout == "a row":
        ranks = [_in_a_row(shapes, [5], rank) for rank in range(3)]
        whole, sizes = _in_a_row(shapes, [14], 0), [14]
    else:
        ranks = [_in_parts(shapes, rank, 3) for rank in range(3)]
        whole, sizes = _in_parts(shapes, 0, 1), [14]
    parts = [torch.zeros(5) for _ in ranks]
    numbers = torch.arange(1.0, 15.0)
    for layout_of, part in zip(ranks, parts, strict=True):
        for name, (_, start, first, count) in layout_of.items():
            place = first + (9 if name == "b" else 0)
            part[start : start + count] = numbers[place : place + count]
    assert torch.equal(_Move(whole, sizes, ranks).flat([[part] for part in parts])[0], numbers)
    missing = r"want 9 numbers of a from number 0; \d are missing|want 5 numbers of b from number 0; \d are missing"
    with pytest.raises(ValueError, match=missing):
        _Move(whole, sizes, ranks[:2]).flat([[part] for part in parts[:2]])


def test_each_group_has_its_moments_and_counts_its_own_steps() -> None:
    shapes = [{"a": torch.Size([4])}, {"b": torch.Size([2, 3])}]
    before = [_in_parts(shapes, rank, 2) for rank in range(2)]
    moments = [[torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0, 7.0])], [torch.tensor([3.0, 4.0]), torch.ones(3)]]
    saved = [{g: {"step": torch.tensor(9.0), "exp_avg": x} for g, x in enumerate(own)} for own in moments]
    move = _Move(_in_parts(shapes, 0, 1), [4, 6], before)
    states = move.states(saved)
    assert states[0]["exp_avg"].tolist() == [1, 2, 3, 4]
    assert states[1]["exp_avg"].tolist() == [5, 6, 7, 1, 1, 1]
    states[0]["step"] += 1  # AdamW does so
    assert [float(states[group]["step"]) for group in (0, 1)] == [10, 9]
    assert float(saved[0][0]["step"]) == 9
    assert move.states([{}, {}]) == {}, "no update was made before"


def test_weights_that_do_not_train_are_divided_anew(as_rank: AsRank) -> None:
    whole = {"a": torch.arange(7.0), "b": torch.arange(12.0).view(3, 4)}
    shapes = {name: weight.shape for name, weight in whole.items()}

    def fragments(ranks: int) -> list[dict[str, torch.Tensor]]:
        filled = {name: torch.zeros(-(-w.numel() // ranks) * ranks) for name, w in whole.items()}
        for name, weight in whole.items():
            filled[name][: weight.numel()] = weight.flatten()
        return [{name: w.chunk(ranks)[rank] for name, w in filled.items()} for rank in range(ranks)]

    models = [{"frozen_param_shapes": shapes, "frozen_param_fragments": each} for each in fragments(2)]
    for world in (1, 3):
        for rank, want in enumerate(fragments(world)):
            as_rank(rank, world)
            got = _frozen(models)
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)


def dealt(indices: Sequence[int], ranks: int) -> list[Drawn]:
    """A batch as that many ranks have it, with three responses of each prompt and what waits behind it."""
    found = []
    for rank in range(ranks):
        own = list(indices[rank::ranks])
        samples = [Sample([i], [i, k], g, False, True, None) for g, i in enumerate(own) for k in range(3)]
        found.append(Drawn(own, samples, 1.0 + rank, 4, unfinished=rank + 1))
    return found


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 3), (6, 4), (3, 2), (4, 12)])
def test_a_batch_is_dealt_out_as_if_so_many_had_drawn_it(before: int, now: int) -> None:
    indices = [7, 3, 9, 1, 8, 2, 6, 4, 0, 5, 11, 10]
    old, want = dealt(indices, before), dealt(indices, now)
    got = [_share(old, rank, now) for rank in range(now)]
    assert [replace(batch, seconds=0.0, unfinished=0) for batch in got] == [
        replace(batch, seconds=0.0, unfinished=0) for batch in want
    ]
    assert sum(batch.unfinished for batch in got) == sum(batch.unfinished for batch in old)
    assert {batch.seconds for batch in got} == {float(before)}


def test_unequal_shares_are_refused() -> None:
    old = dealt(range(7), 2)
    with pytest.raises(ValueError, match=r"want 2 ranks, .*unequal shares of a batch .*, 3 to 4 prompts.*got 3"):
        _share(old, 0, 3)


def test_demonstrations_wait_where_as_many_ranks_would_have_put_them(tmp_path: Path, as_rank: AsRank) -> None:
    recipe = recipe_of(tmp_path, algorithm={"preset": "relift"})

    def states(world: int) -> list[Any]:
        """Steps of six prompts, of which the even ones are unsolved."""
        found = []
        for rank in range(world):
            as_rank(rank, world)
            each = recipe_of(tmp_path, algorithm={"preset": "relift"})
            for step in range(3):
                batch = drawn_batch([[float(i % 2)] for i in range(6)], first=6 * step)
                batch.examples = batch.examples[rank::world]
                samples = [s for s in batch.samples if s.group % world == rank]
                batch.samples = [replace(sample, group=sample.group // world) for sample in samples]
                each.collect(lambda batch=batch: batch)
            found.append(each.state())
        return found

    written = {world: states(world) for world in (1, 2, 3)}
    assert [len(waiting) for _, waiting in written[3]] == [3, 3, 3]
    for before in written:
        for now in written:
            for rank in range(now):
                as_rank(rank, now)
                assert recipe.redistributed(written[before]) == written[now][rank]


def test_each_remembered_rollout_has_one_rank(tmp_path: Path, as_rank: AsRank) -> None:
    recipe = recipe_of(tmp_path, algorithm={"preset": "exgrpo"})
    rollouts = {place: Remembered([place], [-1.0], 1.0) for place in range(0, 20, 3)}
    solved = dict.fromkeys(rollouts, 2)
    states = [(5, True, solved, {p: r for p, r in rollouts.items() if p % 2 == rank}) for rank in range(2)]
    for world in (1, 3):
        shares = []
        for rank in range(world):
            as_rank(rank, world)
            steps, started, known, own = recipe.redistributed(states)
            assert (steps, started, known) == (5, True, solved)
            assert all(place % world == rank for place in own)
            shares.append(own)
        assert {p: r for own in shares for p, r in own.items()} == rollouts
        assert sum(map(len, shares)) == len(rollouts)


class Counting(Recipe):
    """A recipe of a user's, which says nothing of other ranks."""

    def state(self) -> int:
        return 7


def test_a_state_that_nobody_knows_to_share_is_refused(tmp_path: Path) -> None:
    initialize_distributed()
    recipe = Counting(run_config(tmp_path))
    wanted = r"recipe Counting does not say how other ranks share the states of 2: want 2 ranks, .*; got 1 ranks$"
    with pytest.raises(ValueError, match=wanted):
        recipe.redistributed([7, 7])
    assert recipe.redistributed([None, None]) is None


ZERO = "train.deepspeed.zero_optimization"


@pytest.mark.parametrize(
    ("zero", "named"),
    [
        (None, r"train\.optimizer adamw8bit, whose moments share scales"),
        ({"elastic_checkpoint": True}, rf"{ZERO}\.elastic_checkpoint"),
        ({"offload_optimizer": {"device": "nvme"}}, rf"{ZERO}\.offload_optimizer"),
    ],
)
def test_what_others_cannot_divide_is_refused(zero: dict[str, Any] | None, named: str) -> None:
    section: dict[str, Any] = {"deepspeed": {"zero_optimization": zero}} if zero else {"optimizer": "adamw8bit"}
    message = rf"it was written by 8 ranks with {named}.*which 2 cannot divide anew\. Resume with 8 ranks; with train"
    with pytest.raises(ValueError, match=message):
        check_resharding(TrainConfig(steps=1, **section), 8, 2)
    check_resharding(TrainConfig(steps=1, deepspeed={"zero_optimization": {"offload_optimizer": None}}), 8, 2)


def written_by(ranks: int, config: Config, **train_section: Any) -> None:
    """Make a run's checkpoint one of so many ranks with these settings, as far as its state says."""
    saved = Path(config.output_dir) / "checkpoints/step-000001"
    state = json.loads((saved / "state.json").read_text())
    state["config"]["train"] |= train_section
    write_state(saved, state | {"world_size": ranks})


def test_the_refusal_comes_before_a_model_is_made(tmp_path: Path) -> None:
    config = run_config(tmp_path, train={"steps": 1})
    train(config)
    written_by(8, config, optimizer="adamw8bit")
    with pytest.raises(ValueError, match=r"step-000001: it was written by 8 ranks with train\.optimizer adamw8bit"):
        train(changed(config, "train", optimizer="adamw8bit"), resume="newest")
