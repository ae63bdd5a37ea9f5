"""Self-distillation in which the teacher sees a correct response of the group: which one, where, and runs with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import draw_rewards, resumed
from trainer_runs import metrics, run_config

from rlplus.train.config import Config, DataConfig
from rlplus.train.data import Example, Sample, byte_tokenizer, load_examples
from rlplus.train.data.prompts import RESPONSE_ID, encode_prompts, with_response
from rlplus.train.recipe import Batch
from rlplus.train.recipe.self_teaching import SelfDistillRecipe
from rlplus.train.trainer import open_run, train

END = byte_tokenizer().eos_token_id
TEMPLATE = "{prompt}{demonstration}"
LONG = {"max_position_embeddings": 256}


def sdpo(folder: Path, recipe: dict[str, Any] | None = None, **sections: Any) -> Config:
    algorithm = {"preset": "sdpo", "recipe": {"template": TEMPLATE} | (recipe or {})}
    return run_config(folder, algorithm=algorithm, **sections)


def test_the_first_other_response_with_the_reward_is_shown_without_its_end(tmp_path: Path) -> None:
    """Others have no update: in a group without such a response, and the only one of its group."""
    rewards = [(0.0, 0.5, 1.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.9), (1.0,)]
    samples = [
        Sample((5, group), [10 * group + place, *([] if place == 2 else [END])], group, False, place == 2, None, reward)
        for group, of_group in enumerate(rewards)
        for place, reward in enumerate(of_group)
    ]
    examples = [Example(group, (5, group), "", None, teacher_prompt=(7, RESPONSE_ID, group)) for group in range(4)]
    with open_run(sdpo(tmp_path)) as run:
        batch = run.recipe.collect(lambda: Batch(examples, [replace(sample) for sample in samples], 0.0))
        assert len(batch.samples) == len(samples)
        run.recipe.credit(batch)
        (update,) = run.recipe.updates(batch)
        found = [(tuple(sample.response[:1]), tuple(sample.teacher_prompt)) for sample in update.samples]
        assert found == [
            ((0,), (7, 2, 0)),
            ((1,), (7, 2, 0)),
            ((2,), (7, 3, 0)),
            ((3,), (7, 2, 0)),
            ((10,), (7, 12, 1)),
            ((11,), (7, 12, 1)),
        ]
        assert run.recipe.metrics()["distill/shown"] == (6, 10)
        assert [sample.advantage for sample in batch.samples] == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("prefix", [None, "<think>"])
@pytest.mark.parametrize("template", ["{prompt} Hint: {demonstration}!", "{prompt} {demonstration}"])
def test_a_response_stands_where_a_demonstration_would(tmp_path: Path, template: str, prefix: str | None) -> None:
    """Text, and chat messages: the same tokens as if the response had been part of the text."""
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+3="}]
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": chat, "answer": "6"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [row | {"demonstration": f"{prefix or ''}so {{4}}."} for row in rows]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    tokenizer, recipe = byte_tokenizer(), {"template": template}
    given = {"path": str(path), "demonstration": None, "response_prefix": prefix, "max_prompt_length": 70}
    config = sdpo(tmp_path, recipe, data=given,
                  train={"tokens_per_micro_batch": 256}, model={"scratch": LONG})  # fmt: skip
    read = load_examples(config.data, tokenizer, max_demonstration_length=99,
                         teacher_template=template, shows_responses=True)[0]  # fmt: skip
    data = DataConfig.model_validate({"path": str(tmp_path / "shown.jsonl"), "demonstration": "demonstration"})
    expected = load_examples(data, tokenizer, max_demonstration_length=99, teacher_template=template)[0]
    response = tokenizer("so {4}.").input_ids
    end = tokenizer(prefix or "").input_ids
    for one, other in zip(read, expected, strict=True):
        assert one.demonstration is None
        assert with_response(one.teacher_prompt, response) == [*other.teacher_prompt, *end]
        assert len(with_response(one.teacher_prompt, [1] * 8)) <= config.max_training_prompt


def test_prompts_need_no_demonstration(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open_run(sdpo(tmp_path, data={"path": str(path), "demonstration": None})) as run:
        assert [example.demonstration for example in run.examples] == [None] * 4


@pytest.mark.parametrize("template", ["{{ messages[0].content * 2 }}", "no message"])
def test_a_chat_template_that_does_not_show_the_place_once_is_refused(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    message = [{"role": "user", "content": "\ufdd0"}]
    number = template.count("2") * 2
    with pytest.raises(ValueError, match=rf"row 3: want one place for the response .*; got {number}$"):
        encode_prompts([("row 3", message, None)], tokenizer, None, around_response=True)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"rollout": {"group_size": 1}}, "it shows other responses: want rollout.group_size >= 2; got 1"),
        (
            {"recipe": {"shows": "demonstration", "shown_reward": 0.5}},
            "shown_reward belongs to shows response; got demonstration",
        ),
        ({"recipe": {"shown_reward": float("nan")}}, "(?s)shown_reward.*finite number"),
        (
            {"recipe": {"template": TEMPLATE * 2}},
            r"template: want \{demonstration\} once, with shows response; got it 2 times",
        ),
        ({"rollout": {"function": "turns.py:play"}}, "want no rollout.function and environment; got turns.py:play"),
        (
            {"train": {"tokens_per_micro_batch": 46}},
            r"prompt of the teacher \(39 tokens\) and response have 47 tokens",
        ),
    ],
)
def test_settings_without_use_are_refused(tmp_path: Path, sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sdpo(tmp_path, **sections)


@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """In some steps nothing is shown, and nothing trained on."""
    algorithm = {"preset": "sdpo", "recipe": {"template": TEMPLATE}}
    rows = resumed(tmp_path, monkeypatch, algorithm, SelfDistillRecipe, steps)
    assert len({row["distill/shown"] for row in rows}) > 1
    for row in rows:
        assert (row["distill/shown"] > 0) == (row["actor/updated"] > 0) == ("actor/grad_norm" in row)


def test_a_refilled_step_shows_responses_of_its_own_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several draws of a run; the groups that are kept have a correct response, and a wrong one."""
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    batches, collect = [], SelfDistillRecipe.collect
    monkeypatch.setattr(SelfDistillRecipe, "collect", lambda *rest: batches.append(collect(*rest)) or batches[-1])
    algorithm = {"preset": "sdpo", "recipe": {"template": TEMPLATE}, "refill": {"max_draws": 20}}
    rows = metrics(train(run_config(tmp_path, algorithm=algorithm, train={"steps": 3})))
    assert any(row["batch/draws"] > 1 for row in rows)
    for batch, row in zip(batches, rows, strict=True):
        shown = 0
        for number, example in enumerate(batch.examples):
            group = batch.samples[4 * number : 4 * number + 4]
            right = [sample for sample in group if sum(sample.response) % 7 == 0]
            assert 1 <= len(right) <= 3
            for sample in group:
                assert tuple(sample.prompt) == example.prompt
                if others := [other.response for other in right if other is not sample]:
                    response = others[0][:-1] if others[0][-1] == END else others[0]
                    assert sample.teacher_prompt == with_response(example.teacher_prompt, response)
                    shown += 1
                else:
                    assert sample.teacher_prompt is None
        assert row["distill/shown"] == shown / 16
        assert row["actor/updated"] == 1
