"""On-policy self-distillation: prompts that show demonstrations, a step in float64, and runs with it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_cases import resumed
from teachers import divergence, gradients, log_probabilities, rollouts, sampled, trained
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM
from update_cases import packed

from rlplus.train.config import Config, DataConfig
from rlplus.train.data import Example, Sample, byte_tokenizer, load_examples, pack
from rlplus.train.recipe import Batch, Update
from rlplus.train.recipe.self_teaching import SelfDistillRecipe
from rlplus.train.trainer import Run, open_run, train
from rlplus.train.trainer.run_parts import select_prompts

TEMPLATE = "{prompt}{demonstration}"
RATE = 0.3
LORA = {"rank": 4, "alpha": 8.0}


def self_distill(folder: Path, output: str = "run", recipe: Any = None, **sections: Any) -> Config:
    chosen = {"name": "self-distill", "template": TEMPLATE} | (recipe or {})
    algorithm = {"preset": "grpo", "reduction": "token", "recipe": chosen, "objective": chosen.pop("objective", {})}
    return run_config(folder, output, algorithm=algorithm, **sections)


def move(lm: torch.nn.Module, generator: torch.Generator, size: float = 0.05) -> dict[str, torch.Tensor]:
    """Add noise to what trains; returns it in float64."""
    weights = {name: p.data for name, p in lm.named_parameters() if p.requires_grad}
    for weight in weights.values():
        weight.add_(size * torch.randn(weight.shape, generator=generator))
    return {name: weight.double() for name, weight in weights.items()}


@contextmanager
def whose(lm: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """The model has these weights inside."""
    own = {name: lm.get_parameter(name).data.clone() for name in weights}
    for values in (weights, own):
        for name, value in values.items():
            lm.get_parameter(name).data.copy_(value)
        if values is weights:
            yield


def seen(samples: list[Sample], run: Run) -> list[Example]:
    """An example for each group, whose demonstration the teacher sees in another prompt than the policy's."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (4,), generator=generator).tolist()
    prompts = [tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in lengths]
    return [Example(i, (1,), "", (2,), teacher_prompt=prompt) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("teacher", "loss", "model"),
    [
        ("policy", "reverse_kl", {}),
        ("initial", "sampled", {}),
        pytest.param("policy", "sampled", {}, marks=pytest.mark.slow),
        pytest.param("initial", "reverse_kl", {}, marks=pytest.mark.slow),
        ("initial", "jsd", {"lora": LORA}),
        ("average", "jsd", {}),
        pytest.param("average", "sampled", {}, marks=pytest.mark.slow),
        ("average", "sampled", {"lora": LORA}),
        pytest.param("average", "reverse_kl", {"lora": LORA}, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_one_in_float64(tmp_path: Path, teacher: str, loss: str, model: dict[str, Any]) -> None:
    """With a policy that has moved away from the model that it began as, and from an average."""
    scratch = run_config(tmp_path).model.scratch
    assert scratch is not None
    sections = {"rollout": {"temperature": 0.8}, "model": {"scratch": scratch.model_dump()} | model}
    recipe = {"teacher": teacher, "loss": loss} | ({"teacher_update_rate": RATE} if teacher == "average" else {})
    with open_run(self_distill(tmp_path, recipe=recipe, **sections)) as run:
        generator = torch.Generator().manual_seed(2)
        lm = run.policy.engine.module.lm
        before = move(lm, generator, 0.0)
        if teacher == "average":
            after = move(lm, generator)
            averages = {name: weight + RATE * (after[name] - weight) for name, weight in before.items()}
            run.recipe.saw(Update([], run.recipe.algorithm), [], None)
            move(lm, generator)
            with whose(lm, averages):
                frozen_weights = {name: weight.detach().double() for name, weight in run.policy.weights()}
        else:
            move(lm, generator)
        samples = rollouts()
        batch = run.recipe.collect(lambda: Batch(seen(samples, run), samples, 0.0))
        run.recipe.credit(batch)
        batches = packed(run, samples)
        assert len(batches) >= 2
        value, got = gradients(run, Update(samples, run.recipe.algorithm), batches)
        path = str(run.folder.path / "scratch")
        student, frozen = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for _ in range(2))
        weights = {name: weight.detach().double() for name, weight in run.policy.weights()}
        student.load_state_dict(weights, strict=False)
        if teacher == "average":
            frozen.load_state_dict(frozen_weights, strict=False)
        asked = student if teacher == "policy" else frozen
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            logp = log_probabilities(student, sample.prompt, sample.response, 0.8)
            with torch.no_grad():
                shown = batch.examples[sample.group].teacher_prompt
                logq = log_probabilities(asked, shown, sample.response, 0.8)
            if loss == "sampled":
                advantage = (sampled(logq, sample) - sampled(logp, sample)).detach()
                each = -advantage * (sampled(logp, sample) - sampled(logp, sample).detach()).exp()
            else:
                each = divergence(logp, logq, loss)
            total = total + each[trained(sample)].sum()
            tokens += int(trained(sample).sum())
        assert value == pytest.approx(float(total.detach()) / tokens, rel=1e-4)
        assert run.recipe.metrics()["distill/divergence"][1] == tokens
        if model:  # adapters: the head and the embeddings have no gradient
            assert all(".lora_" in name and float(gradient.abs().max()) > 0 for name, gradient in got.items())
            return
        (total / tokens).backward()
        for name, p in student.named_parameters():
            bound = {"rtol": 1e-3, "atol": 2e-6 * float(p.grad.abs().max())}
            torch.testing.assert_close(got[name].double(), p.grad, msg=name, **bound)


def test_a_teacher_that_sees_no_more_teaches_nothing(tmp_path: Path) -> None:
    with open_run(self_distill(tmp_path)) as run:
        samples = rollouts()
        for sample in samples:
            sample.advantage, sample.teacher_prompt = 1.0, sample.prompt
        value, got = gradients(run, Update(samples, run.recipe.algorithm), packed(run, samples))
        assert value == pytest.approx(0, abs=1e-9)
        assert max(float(gradient.abs().max()) for gradient in got.values()) < 1e-8


def test_micro_batches_of_policy_and_teacher_have_the_same_tokens_in_the_same_order() -> None:
    """Both within the budget, which counts the longer prompt."""
    samples = rollouts()
    for number, sample in enumerate(samples):
        sample.teacher_prompt = [number, *([7] * (number % 11))]
    ones = [torch.ones(len(sample.response)) for sample in samples]
    batches = pack(samples, ones, row_length=24, tokens_per_micro_batch=48, pad_id=256)
    assert len(batches) > 2
    for batch in batches:
        teacher = batch.teacher
        assert teacher is not None
        assert teacher.teacher is None
        for part in (batch, teacher):
            assert part.input_ids.numel() <= 48
            assert part.input_ids.shape[1] <= 24
        for name in ("target", "sequence", "token_weight"):
            assert torch.equal(getattr(batch, name), getattr(teacher, name))
        first = [int((batch.sequence == s).nonzero()[0]) for s in batch.sequence.unique()]
        for entry in first:  # the prompt's last token predicts the response's first
            sample = samples[int(batch.sequence[entry])]
            for part, prompt in ((batch, sample.prompt), (teacher, sample.teacher_prompt)):
                row = int(part.rows[entry])
                ids, places = part.input_ids.flatten(), part.position_ids.flatten()
                assert ids[row + 1 - len(prompt) : row + 1].tolist() == list(prompt)
                assert int(places[row]) == len(prompt) - 1
    with pytest.raises(ValueError, match="want at most row_length 12 tokens; got"):
        pack(samples, ones, row_length=12, tokens_per_micro_batch=48, pad_id=256)


def write_rows(folder: Path) -> Path:
    """A prompt in text with a demonstration that has braces, one without a demonstration, and one of messages."""
    rows = [
        {"prompt": "1+1=", "answer": "2", "demonstration": "{two}"},
        {"prompt": "2+2=", "answer": "4", "demonstration": None},
        {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+3="}], "answer": "6",
         "demonstration": "six"},
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_teachers_prompt_is_the_rows_with_its_demonstration_in_the_last_message(tmp_path: Path) -> None:
    data = DataConfig.model_validate({"path": str(write_rows(tmp_path)), "demonstration": "demonstration"})
    tokenizer = byte_tokenizer()
    template = "{prompt} Hint: {demonstration}!"
    plain, without, chat = load_examples(data, tokenizer, max_demonstration_length=99, teacher_template=template)[0]
    assert without.teacher_prompt is None
    assert tokenizer.decode(plain.teacher_prompt) == "1+1= Hint: {two}!"
    assert tokenizer.decode(chat.prompt) == "<|system|>\nAdd.\n<|user|>\n3+3=\n<|assistant|>\n"
    assert tokenizer.decode(chat.teacher_prompt) == "<|system|>\nAdd.\n<|user|>\n3+3= Hint: six!\n<|assistant|>\n"
    assert [e.teacher_prompt for e in load_examples(data, tokenizer, max_demonstration_length=99)[0]] == [None] * 3
    cut = load_examples(data.model_copy(update={"max_dropped_share": 1.0}), tokenizer, max_demonstration_length=5,
                        teacher_template=template)[0]  # fmt: skip
    assert [example.teacher_prompt is None for example in cut] == [True, True, False]


def test_prompts_without_a_demonstration_are_left_out(tmp_path: Path) -> None:
    """Demonstrations are not graded: the scorer is never asked."""
    data = {"path": str(write_rows(tmp_path)), "max_prompt_length": 70}
    config = self_distill(tmp_path, data=data, train={"tokens_per_micro_batch": 128}, model={"scratch": {}})
    examples = load_examples(config.data, byte_tokenizer(), max_demonstration_length=99, teacher_template=TEMPLATE)[0]
    selected = select_prompts(config, examples, None, None)
    assert [example.index for example in selected.examples] == [0, 2]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"data": {"demonstration": None}}, "self-distill: want data.demonstration, which the teacher sees; got none"),
        (
            {"recipe": {"template": "{prompt}"}},
            r"want the fields \{prompt\} and \{demonstration\}, other braces doubled",
        ),
        ({"recipe": {"template": "{prompt}{demonstration"}}, "want a str.format template, braces doubled"),
        ({"recipe": {"template": "{prompt}{demonstration}{x}"}}, "want a str.format template, braces doubled"),
        ({"recipe": {"teacher": "else"}}, "policy"),
        ({"recipe": {"teacher_update_rate": 0.1}}, "teacher_update_rate belongs to teacher average; got policy"),
        ({"recipe": {"teacher": "average", "teacher_update_rate": 0}}, "teacher_update_rate"),
        (
            {"recipe": {"teacher": "average"}, "model": {"scratch": {}, "lora": LORA}, "train": {"zero_stage": 3}},
            "its teacher average does not support model.lora with train.zero_stage 3",
        ),
        ({"train": {"tokens_per_micro_batch": 46}}, r"prompt of the teacher \(39 tokens\) and response have 47 tokens"),
        (
            {"recipe": {"teacher": "average", "loss": "sampled", "objective": {"kl_coef": 0.1}}},
            "its teacher average is in the place of the reference of algorithm.objective.kl_coef: want 0",
        ),
    ],
)
def test_settings_without_use_are_refused(tmp_path: Path, sections: dict[str, Any], text: str) -> None:
    """The longest prompt has data.max_prompt_length, a demonstration and the template: 8 + 8 + 23, and a response 8."""
    with pytest.raises(ValueError, match=text):
        self_distill(tmp_path, **sections)


@pytest.mark.parametrize(
    ("loss", "teacher", "steps"),
    [
        pytest.param("reverse_kl", "policy", 20, marks=pytest.mark.slow),
        pytest.param("sampled", "policy", 20, marks=pytest.mark.slow),
        pytest.param("sampled", "average", 20, marks=pytest.mark.slow),
        ("reverse_kl", "average", 6),
    ],
)
def test_a_run_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, teacher: str, steps: int
) -> None:
    recipe = {"name": "self-distill", "template": TEMPLATE, "loss": loss, "teacher": teacher}
    rows = resumed(tmp_path, monkeypatch, {"preset": "grpo", "recipe": recipe}, SelfDistillRecipe, steps)
    assert all(row["actor/grad_norm"] > 0 and row["mismatch/mean"] < 1e-5 for row in rows)


def test_the_average_of_a_model_in_bf16_loses_no_small_changes(tmp_path: Path) -> None:
    """In bf16 a change of a 500th part of a weight would be none."""
    recipe = {"teacher": "average", "teacher_update_rate": 0.002}
    with open_run(self_distill(tmp_path, recipe=recipe, model={"scratch": {}, "dtype": "bfloat16"})) as run:
        lm, average = run.policy.engine.module.lm, run.recipe.teacher.average
        first = move(lm, torch.Generator(), 0.0)
        second = move(lm, torch.Generator().manual_seed(1), 0.5)
        for _ in range(100):
            average.update()
        for name, copied in run.policy.reference.lm.named_parameters():
            expected = second[name] + 0.998**100 * (first[name] - second[name])
            torch.testing.assert_close(average.parts[name], expected.flatten().float(), rtol=1e-4, atol=1e-5)
            assert torch.equal(copied.flatten(), average.parts[name].bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("teacher", ["policy", "initial", "average"])
def test_a_run_in_shards(tmp_path: Path, stage: int, teacher: str) -> None:
    """The forward passes of the teacher stand between the policy's: the metrics are the same as with ZeRO-1."""
    found = []
    for zero_stage in (1, stage):
        section = {"steps": 3, "prompts_per_update": 2, "zero_stage": zero_stage}
        rows = metrics(train(self_distill(tmp_path, f"run-{zero_stage}", {"teacher": teacher}, train=section)))
        found.append([(row["distill/divergence"], row["actor/grad_norm"]) for row in rows])
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=1e-3)
