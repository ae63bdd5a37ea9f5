"""Loading of configurations: files, overrides, paths, what cannot be read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from run_files import write_minimal

from rlplus.train.algorithm import ALGORITHMS, Gate, Interleaved, Prefix, Refill, Shaping
from rlplus.train.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    ScratchModel,
    TrainConfig,
    load_config,
    recorded_config,
)
from rlplus.train.reward import rules_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write_minimal(tmp_path)


def test_shipped_configurations_exist() -> None:
    assert {"gsm8k-tiny.yaml", "qwen2.5-math-7b.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configuration_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(copy) == config


def test_paper_setting() -> None:
    config = load_config(next(path for path in CONFIGS if path.name == "qwen2.5-math-7b.yaml"))
    assert config.model.overrides == {"rope_theta": 40000, "max_position_embeddings": 16384}
    assert (config.model.dtype, config.model.attention) == ("bfloat16", "flash_attention_2")
    assert (config.train.prompts_per_step, config.train.prompts_per_update, config.rollout.group_size) == (128, 64, 8)
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (1024, 8192)
    assert (config.train.lr, config.train.betas, config.train.weight_decay) == (1e-6, (0.9, 0.999), 0.01)
    assert (config.rollout.temperature, config.evaluation.temperature, config.evaluation.samples) == (1.0, 0.6, 5)
    algorithm = config.algorithm.resolve()
    assert (algorithm.objective.gamma, algorithm.objective.kl_coef, algorithm.objective.internal) == (0.5, 0.0, "ratio")
    assert config.reward.require_think
    assert config.data.response_prefix == config.evaluation.data.response_prefix == "<think>\n"
    assert config.max_sample_length == 9216
    assert config.max_generation_length == 2048 + 8192


def test_defaults(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.algorithm.resolve() == ALGORITHMS["rlplus"]
    assert config.max_demonstration_length == 64
    assert config.data.paths == ["train.jsonl"]
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.lr=1e-6", "train", "lr", 1e-6),
        ("train.lr=2E-4", "train", "lr", 2e-4),
        ("train.lr=1", "train", "lr", 1.0),
        ("train.betas=[0.9, 0.95]", "train", "betas", (0.9, 0.95)),
        ("model.gradient_checkpointing=true", "model", "gradient_checkpointing", True),
        ("rollout.max_logprob_gap=null", "rollout", "max_logprob_gap", None),
        ("rollout.max_logprob_gap=1e-3", "rollout", "max_logprob_gap", 1e-3),
        ("output_dir=2024", "", "output_dir", "2024"),
        ("data.path=a=b.jsonl", "data", "path", "a=b.jsonl"),
        ("data.path=[a.jsonl, b.jsonl]", "data", "path", ["a.jsonl", "b.jsonl"]),
        (r"data.answer_pattern=#### (.+)$", "data", "answer_pattern", "#### (.+)$"),
        (r"data.answer_pattern=[a-z]: (.*)", "data", "answer_pattern", "[a-z]: (.*)"),
        (r"data.answer_pattern='(\d+) '", "data", "answer_pattern", r"(\d+) "),
        ("data.answer_pattern=null", "data", "answer_pattern", None),
        ("data.answer_pattern=", "data", "answer_pattern", None),
        ("data.system_prompt=yes: 1", "data", "system_prompt", "yes: 1"),
    ],
)
def test_override_is_typed_by_its_key(minimal: Path, override: str, section: str, key: str, value: object) -> None:
    config = load_config(minimal, [override])
    found = getattr(getattr(config, section) if section else config, key)
    assert found == value
    assert type(found) is type(value)


def test_overrides_reach_free_form_and_absent_sections(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "model.overrides.rope_theta=1e4",
            "train.deepspeed.zero_optimization.reduce_bucket_size=500",
            "evaluation.data.path=test.jsonl",
            "algorithm.preset=grpo",
            "algorithm.objective.clip_high=2.8e-1",
            "algorithm.reduction=token",
            "train.prompts_per_update=64",
            "train.steps=7",
            "train.steps=8",
        ],
    )
    assert config.model.overrides == {"rope_theta": 1e4}
    assert config.train.deepspeed == {"zero_optimization": {"reduce_bucket_size": 500}}
    assert config.evaluation.data is not None
    assert config.evaluation.data.path == "test.jsonl"
    assert config.train.steps == 8
    algorithm = config.algorithm.resolve()
    assert (algorithm.objective.clip_high, algorithm.objective.clip_low, algorithm.reduction) == (0.28, 0.2, "token")
    assert ALGORITHMS["grpo"].objective.clip_high == 0.2


@pytest.mark.parametrize(
    ("name", "new", "own", "change", "changed"),
    [
        (
            "refill",
            Refill(max_draws=9),
            Refill(low=0.2, high=0.8),
            "max_draws=9",
            Refill(low=0.2, high=0.8, max_draws=9),
        ),
        (
            "shaping",
            Shaping(overlong=0.5),
            Shaping(wrong=-1.0, overlong=0.2),
            "overlong=0.5",
            Shaping(wrong=-1.0, overlong=0.5),
        ),
    ],
)
def test_refill_and_shaping_are_the_presets_or_changed_or_none(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, name: str, new: Any, own: Any, change: str, changed: Any
) -> None:
    def resolved(*overrides: str) -> Any:
        config = load_config(minimal, ["algorithm.preset=grpo", *overrides])
        copy = minimal.with_name("copy.yaml")
        copy.write_text(config.to_yaml())
        assert load_config(copy) == config
        return getattr(config.algorithm.resolve(), name)

    assert resolved() is None
    assert resolved(f"algorithm.{name}.{change}") == new
    monkeypatch.setitem(ALGORITHMS, "grpo", replace(ALGORITHMS["grpo"], **{name: own}))
    assert resolved() == own
    assert resolved(f"algorithm.{name}.{change}") == changed
    assert resolved(f"algorithm.{name}=null") is None


def test_a_recipe_has_the_presets_options_but_for_the_changes(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another recipe has its own defaults, also if its options have the same names."""

    def resolved(*overrides: str) -> Any:
        config = load_config(minimal, ["algorithm.preset=hpt", *overrides])
        copy = minimal.with_name("copy.yaml")
        copy.write_text(config.to_yaml())
        assert load_config(copy) == config
        return config.algorithm.resolve().recipe

    monkeypatch.setitem(ALGORITHMS, "hpt", replace(ALGORITHMS["hpt"], recipe=Gate(solved=3)))
    assert resolved() == Gate(solved=3)
    assert resolved("algorithm.recipe.keep=true") == Gate(solved=3, keep=True)
    assert resolved("algorithm.recipe.name=gate", "algorithm.recipe.solved=2") == Gate(solved=2)
    monkeypatch.setitem(ALGORITHMS, "hpt", replace(ALGORITHMS["hpt"], recipe=Prefix(steps=9)))
    assert resolved("algorithm.recipe.name=interleaved") == Interleaved()


def test_response_prefix_with_its_newline(minimal: Path) -> None:
    """In the file in double quotes, on the command line as it is or in double quotes."""
    minimal.write_text(
        minimal.read_text().replace("path: train.jsonl", 'path: train.jsonl\n  response_prefix: "<think>\\n"')
    )
    assert load_config(minimal).data.response_prefix == "<think>\n"
    for value, wanted in [("<t>\n", "<t>\n"), ('"<t>\\n"', "<t>\n"), ("<t>\\n", "<t>\\n"), ("null", None), ("", None)]:
        config = load_config(minimal, [f"data.response_prefix={value}"])
        assert config.data.response_prefix == wanted
        copy = minimal.with_name("copy.yaml")
        copy.write_text(config.to_yaml(), encoding="utf-8")
        assert load_config(copy) == config


def test_yaml_file_reads_scientific_notation_and_refuses_repeated_keys(minimal: Path) -> None:
    text = minimal.read_text()
    minimal.write_text(text.replace("steps: 3", "steps: 3\n  lr: 5e-5"))
    assert load_config(minimal).train.lr == 5e-5
    minimal.write_text(text.replace("steps: 3", "steps: 3\n  steps: 4"))
    with pytest.raises(ValueError, match=r"run.yaml:\d+:\d+: invalid YAML: the key 'steps' is given twice"):
        load_config(minimal)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml: no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="it is a folder"):
        load_config(tmp_path)
    path = tmp_path / "bad.yaml"
    for text, match in [
        ("train: {steps: 3", r"bad\.yaml:1:17: invalid YAML"),
        ("a: b: c", r"bad\.yaml:1:5: invalid YAML"),
        ("- 1", "want sections .*; got list"),
        ("", "want sections .*; got NoneType"),
        ("train: !!python/object:os.system {}", "invalid YAML"),
        ("a: 1\noutput_dir: 2024-99-99", r"bad\.yaml:2:13: invalid YAML: month must be in"),
        ("train: {steps: 0x_}", r"bad\.yaml:1:16: invalid YAML: invalid literal for int"),
        (f"train: {{steps: {'9' * 5000}}}", r"bad\.yaml:1:16: invalid YAML: Exceeds the limit"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=match):
            load_config(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"bad\.yaml, line 1: want UTF-8 text"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("train.lr", "want an override as section.key=value"),
        ("=3", "want an override as section.key=value"),
        ("train..lr=3", "want an override as section.key=value"),
        ("train.steps.x=3", "train.steps is not a section, it is 3"),
        ("train.betas=[1", "not valid YAML"),
        ("train.steps=2024-99-99", "override 'train.steps=2024-99-99': the value is not valid YAML"),
    ],
)
def test_malformed_overrides(minimal: Path, override: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load_config(minimal, [override])


def test_paths_start_at_the_current_directory_and_the_home_folder(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load_config(minimal, ["output_dir=~/out", "data.path=[~/a.jsonl, b.jsonl]"])
    assert config.output_dir == str(tmp_path / "home" / "out")
    assert config.data.paths == [str(tmp_path / "home" / "a.jsonl"), "b.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert load_config("run.yaml").data.paths == ["train.jsonl"]


def test_sections_can_be_made_in_code() -> None:
    config = Config(
        output_dir="out",
        model=ModelConfig(scratch=ScratchModel(), dtype="float32"),
        data=DataConfig(path=["a.jsonl"], demonstration="solution"),
        reward=RewardConfig(function="my.rewards:exact"),
        rollout={"max_response_length": 16},  # type: ignore[arg-type]
        algorithm=AlgorithmConfig(objective={"gamma": 1}),
        train=TrainConfig(steps=1, betas=(0.9, 0.95)),
        evaluation=EvaluationConfig(data=DataConfig(path="b.jsonl"), k=[1, 32]),
    )
    assert config.algorithm.resolve().objective.gamma == 1


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: " + "[" * 3000, "nested too deeply"),
        ("model: " + "{a: " * 3000, "nested too deeply"),
        (BOMB, "its aliases stand for more than 100000 values"),
        ("model: &a [*a]", "nested too deeply"),
        (b"output_dir: ab\nmodel: \xff", "line 2: want UTF-8 text; got"),
    ],
)
def test_yaml_that_would_exhaust_the_reader_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_aliases_are_fine_in_reason(minimal: Path) -> None:
    text = minimal.read_text().replace("output_dir:", "output_dir: &out", 1)
    minimal.write_text(text)
    assert load_config(minimal, ["checkpoint={every: 7}"]).checkpoint.every == 7
    deep = "[" * 3000
    with pytest.raises(ValueError, match="the value is not valid YAML"):
        load_config(minimal, [f"evaluation.k={deep}"])


@pytest.mark.parametrize(
    ("given", "same", "other"),
    [
        ({"kind": "math_verify"}, {"cut_off": "zero"}, {"box": "optional"}),
        ({"kind": "exact_match", "pattern": "(.)"}, {"cut_off": "zero", "box": "optional"}, {"cut_off": "grade"}),
        ({"function": "a:b"}, {"cut_off": "grade", "box": "optional"}, {"cut_off": "zero"}),
        ({"function": {"a:b": 1.0, "oat": 1.0}}, {"box": "optional"}, {"cut_off": "grade"}),
    ],
)
def test_rules_that_mean_the_same_are_equal(given: Any, same: dict[str, str], other: dict[str, str]) -> None:
    """Values that are given, and those that auto has for the grader."""
    auto, stated, another = (RewardConfig(**given, **more) for more in ({}, same, other))
    assert auto.stated == stated.stated
    assert auto.stated != another.stated
    for name in auto.names:
        rules = [rules_of(name, each.cut_off, each.box) for each in (auto, auto.stated)]
        assert rules[0] == rules[1]


def test_what_an_earlier_version_wrote_down_is_read(minimal: Path) -> None:
    """Up to 0.3.0 there was a folder for weights, which changes no sample, and a tuning of kernels, which changes bits
    unless it was none; other keys that are gone are refused.

    Its graders took every response, so that a run of it resumes with that rule only.
    """
    now = load_config(minimal, ["reward.cut_off=grade", "reward.box=optional"])
    written = now.model_dump(mode="json")
    written["rollout"]["push_folder"], written["train"]["tuning"] = "/dev/shm", None
    written["train"]["memory"] = "least"  # other rounding, as a resumed run could choose
    assert recorded_config(written) == now
    with pytest.raises(ValueError, match=r"train\.tuning: unknown key"):
        recorded_config(written | {"train": written["train"] | {"tuning": "auto"}})
    newer = load_config(minimal).model_dump(mode="json")
    assert recorded_config(newer).reward.cut_off == recorded_config(newer).reward.box == "auto"
    for rule in ("cut_off", "box"):
        del written["reward"][rule]
    assert recorded_config(written) == now
    written["rollout"]["pushed_folder"] = "/dev/shm"
    with pytest.raises(ValueError, match=r"rollout\.pushed_folder: unknown key"):
        recorded_config(written)
