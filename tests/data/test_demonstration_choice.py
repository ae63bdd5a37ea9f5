"""Several demonstrations per prompt: which one a step shows."""

import json
import runpy
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_runs import same, write_start
from run_files import problems, write_minimal
from trainer_runs import metrics, run_config

from rlplus.train.config import Config, DataConfig
from rlplus.train.data import Example, PromptSampler, byte_tokenizer, load_examples, variants
from rlplus.train.trainer import train
from rlplus.train.trainer.rollouts import Rollouts

SCRIPT = Path(__file__).parents[2] / "examples/score_demonstrations.py"


def write(folder: Path, *demonstrations: Any, **columns: list[Any]) -> Path:
    path = folder / "several.jsonl"
    rows = [
        {"prompt": f"{i}+0=", "answer": str(i), "demonstration": value} | {k: v[i] for k, v in columns.items()}
        for i, value in enumerate(demonstrations)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **fields: Any) -> tuple[list[Example], Any]:
    config = DataConfig(path=str(path), demonstration="demonstration", max_dropped_share=0.9, **fields)
    return load_examples(config, byte_tokenizer(), max_demonstration_length=9)


def test_a_list_is_an_example_for_each_and_a_row_for_all(tmp_path: Path) -> None:
    message = [{"role": "assistant", "content": "<3>"}]
    path = write(tmp_path, ["the<0>", "<0>", "much too long"], [None, " "], [], message, ["<4>"])
    examples, report = load(path)
    text = byte_tokenizer().decode
    shown = [e.demonstration and text(e.demonstration[:-1]) for e in examples]
    assert shown == ["the<0>", "<0>", None, None, None, None, "<3>", "<4>"]
    assert [e.index for e in examples] == [0, 0, 0, 1, 1, 2, 3, 4]
    assert (report.rows, report.kept, report.demonstrations, report.demonstrations_too_long) == (5, 5, 4, 1)
    assert variants(examples, "first") == [[0], [3], [5], [6], [7]]
    assert variants(examples, "shortest") == [[1], [3], [5], [6], [7]]
    assert variants(examples, "random") == [[0, 1], [3], [5], [6], [7]]


def test_logprobs_stand_in_a_list_of_lists(tmp_path: Path) -> None:
    """And the likeliest demonstration has the highest mean, not the highest sum."""
    logprobs = [[[-1.0] * 7, [-2.0] * 4], [-1.0] * 4, [None], [None]]
    path = write(tmp_path, ["the<0>", "<0>"], "<1>", [None], None, logprobs=logprobs)
    examples, _ = load(path, behavior_logprob="logprobs")
    assert [len(e.behavior_logprob or ()) for e in examples] == [7, 4, 4, 0, 0]
    assert variants(examples, "likeliest") == [[0], [2], [3], [4]]
    path = write(tmp_path, ["<0>", "<0>"], logprobs=[[[-1.0] * 4]])
    with pytest.raises(ValueError, match=r":1: want 'logprobs' a list of 2, one per demonstration; got 1"):
        load(path, behavior_logprob="logprobs")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["data.demonstration_choice=likeliest"],
            "data: demonstration_choice likeliest goes by behavior_logprob: name the column that holds them",
        ),
        (
            ["data.demonstration=null", "data.demonstration_choice=random"],
            "data: demonstration_choice is set but demonstration is not: name the column that holds them",
        ),
    ],
)
def test_contradictions(tmp_path: Path, overrides: list[str], line: str) -> None:
    assert problems(write_minimal(tmp_path), *overrides) == [line]


def test_a_random_variant_is_a_function_of_seed_and_draw() -> None:
    choices = [[0, 1, 2], [3], [4, 5]]
    sampler = PromptSampler(3, 2, seed=1, variants=choices)
    drawn = [sampler.next() for _ in range(600)]
    counts = Counter(index for batch in drawn for index in batch)
    for group in choices:
        assert sum(counts[index] for index in group) == 400
        for index in group:
            expected = 400 / len(group)
            assert abs(counts[index] - expected) <= 5 * expected**0.5
    again = PromptSampler(3, 2, seed=1, variants=choices)
    again.restore({"n": 3, "seed": 1, "drawn": 2 * 100})
    assert [again.next() for _ in range(500)] == drawn[100:]
    plain = PromptSampler(3, 2, seed=1)
    places = {index: place for place, group in enumerate(choices) for index in group}
    assert [[places[index] for index in batch] for batch in drawn[:9]] == [plain.next() for _ in range(9)]


def several(folder: Path, **sections: Any) -> Config:
    """Two right demonstrations and a wrong one for each prompt."""
    path = write(folder, *([f"<{i}>", f"so <{i}>", "<x>"] for i in range(6)))
    data = {"path": str(path), "demonstration_choice": "random", "max_dropped_share": 0.5}
    return run_config(folder, data={"demonstration": "demonstration", "max_prompt_length": 8} | data, **sections)


def test_a_run_shows_right_ones_at_random_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    draw = Rollouts.draw

    def watched(rollouts: Rollouts, *args: Any) -> Any:
        batch = draw(rollouts, *args)
        for sample in batch.samples:
            if sample.demonstration:
                shown.append(bytes(sample.response[:-1]).decode())
                assert batch.examples[sample.group].demonstration == sample.response
        return batch

    monkeypatch.setattr(Rollouts, "draw", watched)
    config = several(tmp_path, train={"steps": 4}, checkpoint={"every": 1, "keep": 9})
    folder = train(config)
    assert len(shown) == 16
    assert not any("x" in text for text in shown)
    assert {text.startswith("so") for text in shown} == {True, False}
    first, rows = list(shown), metrics(folder)
    kept = shutil.copytree(folder, tmp_path / "kept")
    shown.clear()
    train(config, resume="step-000002")
    assert shown == first[8:]
    assert same(kept, folder)
    assert metrics(folder) == rows


def test_the_script_scores_each(tmp_path: Path) -> None:
    model = write_start(tmp_path / "demonstrator", tied=True)
    config = several(tmp_path, model={"scratch": None, "path": str(model)})
    path, output = tmp_path / "run.yaml", tmp_path / "scored.jsonl"
    path.write_text(config.to_yaml())
    runpy.run_path(str(SCRIPT))["main"]([str(path), "--model", str(model), "--output", str(output)])
    lists = [json.loads(line)["behavior_logprob"] for line in output.read_text().splitlines()]
    assert [[len(values) for values in row] for row in lists] == [[4, 7, 4]] * 6
    assert all(value <= 0 for row in lists for values in row for value in values)
    examples, _ = load(output, behavior_logprob="behavior_logprob")
    assert len(examples) == 18
