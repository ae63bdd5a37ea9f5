"""Loading and validation of configurations."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rlplus.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    ScratchModel,
    TrainConfig,
    load_config,
)
from rlplus.config.base import Section
from rlplus.config.ignored import RULES
from rlplus.objective import ALGORITHMS

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))

MINIMAL: dict[str, Any] = {
    "output_dir": "out",
    "model": {"scratch": {}, "dtype": "float32"},
    "data": {"path": "train.jsonl", "demonstration": "solution"},
    "reward": {"kind": "exact_match"},
    "rollout": {"max_response_length": 64},
    "train": {"steps": 3},
}


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    """The lines of the error, without the heading that names the file."""
    with pytest.raises(ValueError, match="does not describe a run") as caught:
        load_config(path, overrides)
    heading, *lines = str(caught.value).splitlines()
    assert str(path) in heading
    return lines


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


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.stepz=4", "train.stepz: unknown key; nearest: train.steps"),
        ("trian.lr=1", "trian.lr: unknown key; nearest: train.lr"),
        ("lr=1", "lr: unknown key; nearest: train.lr"),
        ("Train.LR=1", "Train.LR: unknown key; nearest: train.lr"),
        ("train.zzz=1", "train.zzz: unknown key"),
        ("nothing.at.all=1", "nothing.at.all: unknown key"),
        ("algorithm.objective.zzz=1", "algorithm.objective.zzz: unknown key"),
        ("algorithm.objective.KAPPA=1", "algorithm.objective.KAPPA: unknown key; nearest: algorithm.objective.kappa"),
        ("model.scratch.layer=2", "model.scratch.layer: unknown key; nearest: model.scratch.layers"),
        ("evaluation.data.paht=x", "evaluation.data.paht: unknown key; nearest: evaluation.data.path"),
        ("algorithm.objective.gama=1", "algorithm.objective.gama: unknown key; nearest: algorithm.objective.gamma"),
    ],
)
def test_unknown_key_names_the_nearest(minimal: Path, override: str, line: str) -> None:
    assert line in problems(minimal, override)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps=ten", "train.steps: want a valid integer; got 'ten' (str)"),
        ("train.steps=true", "train.steps: want a valid integer; got True (bool)"),
        ("train.steps=0", "train.steps: want greater than or equal to 1; got 0 (int)"),
        ("train.lr=.nan", "train.lr: want a finite number; got nan (float)"),
        ("train.betas=[0.9, a]", "train.betas.1: want a valid number; got 'a' (str)"),
        ("train.zero_stage=4", "train.zero_stage: want 1, 2 or 3; got 4 (int)"),
        ("rollout.engine=vlm", "rollout.engine: want 'auto', 'vllm' or 'transformers'; got 'vlm' (str)"),
        ("train=5", "train: want a section of keys and values; got 5 (int)"),
        ("data.path=", "data.path: want a path or a list of paths; got ''"),
        ("data.path=[1]", "data.path: want a path or a list of paths; got [1]"),
        ("output_dir=", "output_dir: want at least 1 character; got '' (str)"),
        ("algorithm.objective.gamma=x", "algorithm.objective: want gamma a finite number >= 0; got 'x'"),
        ("rollout={}", "rollout.max_response_length: want a value; the key is missing"),
    ],
)
def test_wrong_value_says_what_was_wanted_and_what_came(minimal: Path, override: str, line: str) -> None:
    assert problems(minimal, override) == [line]


def test_every_problem_gets_its_line(minimal: Path) -> None:
    lines = problems(minimal, "train.steps=x", "rollout.group_size=2.5", "moel.path=y")
    assert [line.split(":")[0] for line in lines] == ["moel.path", "rollout.group_size", "train.steps"]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["model.path=x"], "^model: want exactly one of path and scratch; got both"),
        (["model.scratch=null"], "^model: want exactly one of path and scratch; got neither"),
        (["model.scratch.hidden_size=30"], "^model.scratch: want hidden_size a multiple of 2"),
        (["model.scratch.max_position_embeddings=1000"], "max_position_embeddings at least that; got 1000"),
        (["model.attention=flash_attention_2"], "flash_attention_2 computes in half precision"),
        (["rollout.group_size=1"], "want rollout.group_size >= 2; got 1"),
        (["algorithm.preset=grpo-sft", "rollout.group_size=1"], "want rollout.group_size >= 2; got 1"),
        (["train.prompts_per_update=48"], "^train: want prompts_per_update to divide prompts_per_step"),
        (["train.tokens_per_micro_batch=1000"], "1088 tokens together: want train.tokens_per_micro_batch"),
        (["data.demonstration=null"], "algorithm.preset rlplus uses demonstrations: want data.demonstration"),
        (["data.demonstration=null", "data.max_demonstration_length=9"], "^data: max_demonstration_length is set but"),
        (["data.answer_pattern=("], "^data.answer_pattern: want a regular expression; got '\\('"),
        (["data.answer_pattern=x"], "with exactly one group; got 'x' with 0"),
        (["data.demonstration_template={solution}"], r"want the fields \{demonstration\} and \{answer\}"),
        (["data.demonstration_template=}"], "want a str.format template"),
        (["reward.function=a:b"], "^reward: want exactly one of kind and function; got both"),
        (["reward.on_failure=skip"], "^reward.on_failure: .*mask.*zero.*error"),
        (["reward.kind=math_verify", "reward.pattern=(x)"], "^reward: pattern belongs to kind exact_match"),
        (["evaluation.k=[1, 33]"], "^evaluation: want at least one k, and none above samples"),
        (["evaluation.every=5"], "^evaluation: every is 5 but there is no data"),
        (
            ["data.response_prefix=<t>", "evaluation.data.path=t.jsonl"],
            "^evaluation.data.response_prefix: want data.response_prefix, .*'<t>'; got None",
        ),
        (["algorithm.preset=rlpls"], r"^algorithm.preset: want one of rlplus, .*got 'rlpls' \(nearest: rlplus\)"),
    ],
)
def test_contradictions(minimal: Path, overrides: list[str], match: str) -> None:
    (line,) = problems(minimal, *overrides)
    assert re.search(match, line), line


EVALUATED = ["evaluation.data.path=test.jsonl"]
CLIPPED = ["algorithm.preset=grpo", "train.prompts_per_update=64"]
SERVER = ["rollout.mode=server", "rollout.server_url=http://localhost:1"]
PROCESS = ["rollout.mode=process"]


IGNORED: list[tuple[str, list[str], list[str] | None]] = [
    ("rollout.gpu_memory_utilization=0.9", ["rollout.engine=transformers"], []),
    ("rollout.gpu_memory_utilization=0.9", SERVER, [*SERVER, *EVALUATED]),
    ("rollout.enforce_eager=true", SERVER, ["rollout.engine=transformers"]),
    ("rollout.kv_cache_memory_mb=64", SERVER, ["rollout.engine=transformers"]),
    ("rollout.push_folder=/x", [], PROCESS),
    ("evaluation.samples=4", [], EVALUATED),
    ("evaluation.k=[1, 2]", [], EVALUATED),
    ("evaluation.temperature=0.5", [], EVALUATED),
    ("evaluation.data.demonstration=x", EVALUATED, None),
    ("data.benchmark=x", [], None),
    ("train.max_scratch_mb=9", ["train.backend=reference"], []),
    ("train.grad_clip=2", ["train.deepspeed.gradient_clipping=3"], []),
    ("train.generated_tokens=9", ["algorithm.preset=sft"], []),
    ("train.overlap=true", [*PROCESS, "algorithm.preset=sft"], PROCESS),
    ("algorithm.normalize_std=false", ["algorithm.preset=sft"], []),
    ("algorithm.objective.internal=clip", ["algorithm.preset=sft"], []),
    ("algorithm.objective.mismatch_cap=2", ["algorithm.preset=sft"], []),
    ("algorithm.objective.external=shaped", ["algorithm.preset=grpo"], []),
    ("algorithm.objective.gamma=1", ["algorithm.preset=grpo"], ["algorithm.preset=luffy"]),
    ("algorithm.objective.gamma=1", ["algorithm.objective.external=none"], []),
    ("algorithm.objective.kappa=1", [], ["algorithm.preset=luffy"]),
    ("algorithm.objective.clip_low=0.1", [], CLIPPED),
    ("algorithm.objective.clip_high=0.1", ["algorithm.preset=grpo"], CLIPPED),
    (
        "algorithm.objective.clip_high=0.1",
        ["algorithm.preset=grpo"],
        ["algorithm.preset=grpo", *PROCESS, "train.overlap=true"],
    ),
    ("algorithm.objective.dual_clip=3", ["algorithm.preset=grpo", "train.prompts_per_update=128"], CLIPPED),
]  # an override, a run where it has no effect, one where it has (None: there is none)


@pytest.mark.parametrize(("override", "without", "with_effect"), IGNORED)
def test_a_key_without_effect_is_refused(
    minimal: Path, tmp_path: Path, override: str, without: list[str], with_effect: list[str] | None
) -> None:
    key = override.partition("=")[0]
    (line,) = problems(minimal, *without, override)
    assert line.startswith(f"{key} would have no effect, leave it out: ")
    load_config(minimal, without)
    if with_effect is not None:
        config = load_config(minimal, [*with_effect, override])
        copy = tmp_path / "copy.yaml"  # as a run writes it: every value, defaults included
        copy.write_text(config.to_yaml())
        assert load_config(copy) == config


def test_every_rule_is_tried() -> None:
    assert {case[0].partition("=")[0] for case in IGNORED} == {key for keys, *_ in RULES for key in keys.split()}


def test_a_default_without_effect_is_no_error(minimal: Path) -> None:
    """Else a written configuration would not load again, and no preset could be swapped for another."""
    config = load_config(minimal, ["rollout.gpu_memory_utilization=0.5", "rollout.engine=transformers"])
    assert "gpu_memory_utilization: 0.5" in config.to_yaml()
    load_config(minimal, ["algorithm.preset=grpo", "algorithm.objective.gamma=0"])
    changed = config.rollout.model_copy(update={"gpu_memory_utilization": 0.9})
    assert changed.gpu_memory_utilization == 0.9


@pytest.mark.parametrize("section", [kind for kind in Section.__subclasses__() if kind is not Config])
def test_every_key_is_documented(section: type[Section]) -> None:
    assert [name for name in section.model_fields if not re.search(rf"\b{name}\b", section.__doc__ or "")] == []


@pytest.mark.parametrize("preset", ALGORITHMS)
def test_presets_ask_for_demonstrations_exactly_when_they_use_them(minimal: Path, preset: str) -> None:
    overrides = [f"algorithm.preset={preset}", "data.demonstration=null"]
    if ALGORITHMS[preset].demonstrations == "none":
        assert load_config(minimal, [*overrides, "rollout.group_size=1"]).max_sample_length == 1024 + 64
    else:
        assert "want data.demonstration" in problems(minimal, *overrides)[0]


def test_longest_sample_covers_demonstrations(minimal: Path) -> None:
    config = load_config(minimal, ["data.max_demonstration_length=500"])
    assert (config.max_demonstration_length, config.max_sample_length) == (500, 1524)
    assert config.max_generation_length == 1024 + 64
    grpo = load_config(minimal, ["data.max_demonstration_length=500", "algorithm.preset=grpo"])
    assert grpo.max_sample_length == 1024 + 64


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
