"""Invalid configurations and their error messages."""

import re
from pathlib import Path

import pytest
from run_files import problems, write_minimal

from rlplus.loss.objective.surrogates import EXTERNAL
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import load_config
from rlplus.train.config.loading import _kinds, valid_keys

VALIDATED = ["validation.every=5", "validation.data.path=validation.jsonl"]


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write_minimal(tmp_path)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.stepz=4", "train.stepz: unknown key; nearest: train.steps"),
        ("trian.lr=1", "trian.lr: unknown key; nearest: train.lr"),
        ("lr=1", "lr: unknown key; nearest: train.lr"),
        ("Train.LR=1", "Train.LR: unknown key; nearest: train.lr"),
        ("train.learning_rate=1", "train.learning_rate: unknown key; TRL's learning_rate is train.lr here"),
        ("num_generations=8", "num_generations: unknown key; TRL's num_generations is rollout.group_size here"),
        ("train.batch_size=8", "train.batch_size: unknown key; here it is train.prompts_per_step, in prompts"),
        (
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.optim.lr: unknown key; verl's actor.optim.lr is train.lr here",
        ),
        (
            "rollout.generate_max_len=9",
            "rollout.generate_max_len: unknown key; OpenRLHF's generate_max_len is rollout.max_response_length here",
        ),
        (
            "algorithm.objective.beta=0.1",
            "algorithm.objective.beta: unknown key; TRL's beta is algorithm.objective.kl_coef here",
        ),
        ("gamma=1", "gamma: unknown key; nearest: algorithm.objective.gamma"),
        ("algorithm.gamma=1", "algorithm.gamma: unknown key; nearest: algorithm.objective.gamma"),
        ("clip_low=.3", "clip_low: unknown key; nearest: algorithm.objective.clip_low"),
        ("entropy_coeff=0", "entropy_coeff: unknown key; nearest: algorithm.objective.entropy_coef"),
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
        (
            "rollout.engine=vlm",
            "rollout.engine: want 'auto', 'vllm', 'sglang' or 'transformers'; got 'vlm' (str); nearest: vllm",
        ),
        (
            "reward.kind=mathverify",
            "reward.kind: want 'exact_match', 'choice', 'code', 'math_verify', 'math_verify_box', "
            "'math_verify_strict' or 'oat'; got 'mathverify' (str); nearest: math_verify",
        ),
        ("train=5", "train: want a section of keys and values; got 5 (int)"),
        ("data.path=", "data.path: want a path or a list of paths; got ''"),
        ("data.path=[1]", "data.path: want a path or a list of paths; got [1]"),
        ("output_dir=", "output_dir: want at least 1 character; got '' (str)"),
        ("algorithm.objective.gamma=x", "algorithm.objective.gamma: want a finite number >= 0; got 'x'"),
        (
            "algorithm.objective={mismatch_low: 3, mismatch_cap: 2}",
            "algorithm.objective: want mismatch_low < mismatch_cap; got 3 and 2",
        ),
        ("rollout={}", "rollout.max_response_length: want a value; the key is missing"),
    ],
)
def test_wrong_value_says_what_was_wanted_and_what_came(minimal: Path, override: str, line: str) -> None:
    assert problems(minimal, override) == [line]


def test_every_wrong_option_of_an_objective_has_its_key(minimal: Path) -> None:
    assert problems(minimal, "algorithm.objective={external: mi, clip_low: -1, kl_estimator: k9}") == [
        f"algorithm.objective.external: want one of {', '.join(EXTERNAL)}; got 'mi'; nearest: mis",
        "algorithm.objective.clip_low: want a finite number >= 0; got -1",
        "algorithm.objective.kl_estimator: want one of k2, k3, k3-unbiased; got 'k9'",
    ]


NUMBERS = [key for key in valid_keys() if _kinds(key.split(".")) & {int, float}]


@pytest.mark.parametrize("key", [key for key in NUMBERS if int in _kinds(key.split("."))])
def test_no_count_may_be_absurd(minimal: Path, key: str) -> None:
    assert any(line.startswith(f"{key}: want ") for line in problems(minimal, f"{key}=1{'0' * 30}"))


@pytest.mark.parametrize("key", [key for key in NUMBERS if key.endswith("_s")])
def test_no_time_may_be_longer_than_timers_take(minimal: Path, key: str) -> None:
    assert problems(minimal, f"{key}=1e300")[-1] == f"{key}: want less than or equal to 2000000; got 1e+300 (float)"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "rollout.group_size=1000000000",
            "want train.prompts_per_step times rollout.group_size at most 1048576; got 128 times 1000000000",
        ),
        (
            "train.prompts_per_step=1000000000",
            "want train.prompts_per_step times rollout.group_size at most 1048576; got 1000000000 times 8",
        ),
        ("reward.workers=100000", "reward.workers: want less than or equal to 1024; got 100000 (int)"),
        ("evaluation.samples=10000000", "evaluation.samples: want less than or equal to 1048576; got 10000000 (int)"),
        ("train.seed=4294967296", "train.seed: want less than 4294967296; got 4294967296 (int)"),
    ],
)
def test_more_than_a_machine_could_hold_is_refused(minimal: Path, override: str, line: str) -> None:
    assert line in problems(minimal, override)


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
        (["train.deepspeed.zero_optimization=5"], "^train: deepspeed.zero_optimization: want a section .*; got 5"),
        (["train.deepspeed.zero_optimization.offload_param=5"], "offload_param: want a section of keys .*; got 5"),
        (["train.deepspeed.zero_optimization.stage=2"], "want it from zero_stage 1; got 2"),
        (["train.tokens_per_micro_batch=1000"], "1088 tokens together: want train.tokens_per_micro_batch"),
        (["data.demonstration=null"], "algorithm.preset rlplus uses demonstrations: want data.demonstration"),
        (["data.demonstration=null", "data.max_demonstration_length=9"], "^data: max_demonstration_length is set but"),
        (["data.answer_pattern=("], "^data.answer_pattern: want a regular expression; got '\\('"),
        (["data.answer_pattern=x"], "with exactly one group; got 'x' with 0"),
        (["data.demonstration_template={solution}"], r"want the fields \{demonstration\} and \{answer\}"),
        (["data.demonstration_template=}"], "want a str.format template"),
        (["data.demonstration_template={demonstration:d}"], "want a str.format template.*Unknown format code 'd'"),
        (["reward.function=a:b"], "^reward: want exactly one of kind and function; got both"),
        (["reward.on_failure=skip"], "^reward.on_failure: .*mask.*zero.*error"),
        (["reward.kind=math_verify", "reward.pattern=(x)"], "^reward: pattern belongs to kind exact_match"),
        (["evaluation.k=[1, 33]"], "^evaluation: want at least one k, and none above samples"),
        (["evaluation.temperature=0"], "^evaluation: temperature 0 is greedy.*: want samples 1; got 32$"),
        (["evaluation.temperature=0.001"], r"^evaluation.temperature: want 0 \(greedy\) or at least 0.01; got 0.001$"),
        (["evaluation.every=5"], "^evaluation: every is 5 but there is no data"),
        (["validation.every=5"], "^validation: every is 5 but there is no data"),
        (
            [*VALIDATED, "data.response_prefix=<t>"],
            "^validation.data.response_prefix: want data.response_prefix, ",
        ),
        (["validation.every=5", "validation.data.path=train.jsonl"], "are not trained on; got train.jsonl, as in data"),
        (
            [*VALIDATED, "rollout.tensor_parallel_size=2"],
            "^validation.every: ranks evaluate at their own pace, .* rollout.tensor_parallel_size 2 needs several",
        ),
        (
            ["data.response_prefix=<t>", "evaluation.data.path=t.jsonl"],
            "^evaluation.data.response_prefix: want data.response_prefix, .*'<t>'; got None",
        ),
        (["algorithm.recipe.name=plian"], r"^algorithm.recipe.name: want one of plain.*'plian'; nearest: plain"),
        (["algorithm.advantage=pass@k", "algorithm.advantage_k=9"], "at most the 8 members of a group; got 9"),
        (
            ["algorithm.preset=relift", "algorithm.recipe.batch=0"],
            "^algorithm.recipe.batch: want greater than or equal to 1; got 0",
        ),
        (
            ["algorithm.preset=hpt", "algorithm.recipe.solved=-1"],
            "^algorithm.recipe.solved: want greater than or equal to 0; got -1",
        ),
        (["algorithm.preset=hpt", "algorithm.recipe.keep=1"], "^algorithm.recipe.keep: want a valid boolean; got 1"),
        (
            ["algorithm.preset=uft", "algorithm.recipe.schedule=cosin"],
            r"^algorithm.recipe.schedule: want 'binomial', .*; got 'cosin' \(str\); nearest: cosine",
        ),
        (
            ["algorithm.preset=uft", "algorithm.recipe.high=2"],
            "^algorithm.recipe.high: want less than or equal to 1; got 2",
        ),
        (
            ["algorithm.preset=uft", "algorithm.recipe.low=0.99"],
            "^algorithm.recipe: want low <= high; got 0.99 and 0.95",
        ),
        (["algorithm.preset=uft", "algorithm.recipe.steps=0"], "recipe.steps: want greater than or equal to 1; got 0"),
        (["algorithm.preset=uft", "algorithm.recipe.segments=true"], "recipe.segments: want a valid integer; got True"),
        (
            ["algorithm.preset=uft", "algorithm.recipe.members=0"],
            "recipe.members: want greater than or equal to 1; got 0",
        ),
        (
            ["algorithm.preset=uft", "algorithm.recipe.members=9"],
            "recipe prefix: want members at most rollout.group_size 8; got 9",
        ),
        (
            ["algorithm.preset=uft", "algorithm.recipe={schedule: cosine, segments: 4}"],
            "recipe: segments belongs to schedule binomial; got cosine",
        ),
        (
            ["algorithm.preset=uft", "algorithm.recipe={schedule: random, steps: 4}"],
            "recipe: steps belongs to schedule binomial or window or linear or cosine; got random",
        ),
        (
            ["algorithm.preset=uft", "data.max_demonstration_length=65"],
            "recipe prefix: want data.max_demonstration_length at most rollout.max_response_length.*got 65 and 64",
        ),
        (
            ["algorithm.preset=grpo", "algorithm.recipe.name=interleaved"],
            "algorithm.recipe interleaved: want a preset with rollouts and demonstrations; got grpo",
        ),
        (
            ["algorithm.preset=sft", "algorithm.recipe.name=gate"],
            "algorithm.recipe gate: want a preset with rollouts and demonstrations; got sft",
        ),
        (
            ["algorithm.recipe.name=gate", "train.overlap=true", "rollout.mode=process"],
            "^train.overlap does not support algorithm.recipe gate",
        ),
        (["algorithm.preset=relift", "algorithm.refill.low=0"], "recipe interleaved takes: want algorithm.refill null"),
        (["algorithm.preset=hpt", "algorithm.refill.low=0"], "algorithm.recipe gate takes: want algorithm.refill null"),
        (
            ["algorithm.preset=dapo", "algorithm.advantage=mean"],
            "advantage mean is .*: want algorithm.shaping null and algorithm.reward_kl_coef 0$",
        ),
        (
            ["algorithm.reward_kl_coef=0.1"],
            "^algorithm.reward_kl_coef does not support demonstrations: want a preset without; got rlplus$",
        ),
        (
            ["algorithm.preset=prime", "algorithm.reward_kl_coef=0.1"],
            "^algorithm.recipe process-reward: it does not support algorithm.reward_kl_coef$",
        ),
        (
            ["algorithm.preset=grpo", "algorithm.reward_kl_coef=0.1", "train.sequence_parallel=2"],
            "^algorithm.reward_kl_coef does not support train.sequence_parallel > 1; got 2$",
        ),
        (
            [
                "algorithm.preset=grpo",
                "algorithm.reward_kl_coef=0.1",
                "train.overlap=true",
                "rollout.mode=process",
            ],
            "^algorithm.reward_kl_coef does not support train.overlap$",
        ),
        (
            ["algorithm.preset=grpo", "algorithm.reward_kl_coef=0.1", "algorithm.advantage=mean"],
            "advantage mean is .*: want algorithm.shaping null and algorithm.reward_kl_coef 0$",
        ),
        (
            ["algorithm.preset=hpt", "train.deepspeed.zero_optimization.compute_grad_norm=false"],
            "^algorithm.skip_grad_norm needs .*compute_grad_norm true; got False$",
        ),
        (["rollout.vllm.dtype=float16"], "^rollout: vllm.dtype: leave it out, the engine has the policy's, model.dty"),
        (["rollout.vllm=fp8"], "^rollout.vllm: want a section of keys and values; got 'fp8'"),
        (["train.overlap=-1"], "^train.overlap: want greater than or equal to 0; got -1"),
        (["train.overlap=1.5"], "^train.overlap: want a valid integer; got 1.5"),
        (
            ["algorithm.preset=grpo", "algorithm.recipe.name=replay"],
            "replay: want a preset with rollouts .*; got grpo$",
        ),
        (
            ["algorithm.preset=exgrpo", "algorithm.objective.external=none"],
            "recipe replay: want a loss .*external; got none$",
        ),
        (
            ["algorithm.preset=exgrpo", "algorithm.refill.low=0"],
            "recipe replay: it chooses .*: want algorithm.refill null$",
        ),
        (["algorithm.preset=exgrpo", "rollout.function=a:b"], "recipe replay: it does not support rollout.function$"),
        (["algorithm.preset=exgrpo", "algorithm.recipe.share=2"], "recipe.share: want less than or equal to 1; got 2 "),
        (
            ["algorithm.preset=exgrpo", "train.overlap=1", "rollout.mode=process"],
            "^train.overlap does not support algorithm.recipe replay$",
        ),
        (
            ["algorithm.preset=hpt", "algorithm.recipe.solvd=1"],
            "^algorithm.recipe.solvd: unknown key; nearest: algorithm.recipe.solved$",
        ),
        (
            ["algorithm.recipe={name: gate, critic_updates: -3}"],
            "^algorithm.recipe.critic_updates: unknown key; it belongs to algorithm.recipe.name critic$",
        ),
        (["algorithm.recipe=3"], "^algorithm.recipe: want a section of keys and values; got 3 "),
        (
            ["algorithm.recipe.name=no_such_module:Mine"],
            "^algorithm.recipe.name: want file.py:Class or .*no_such_module",
        ),
        (
            ["algorithm.recipe.name=none.py:Mine"],
            "^algorithm.recipe.name: .* got none.py:Mine: there is no file .*none.py$",
        ),
        (
            ["algorithm.recipe.name=math:sqrt"],
            "^algorithm.recipe.name: want a subclass of rlplus.train.recipe.Recipe; math:sqrt is",
        ),
        (["algorithm.recipe.name=math:Sqrt"], "^algorithm.recipe.name: .*module 'math' has no attribute 'Sqrt'$"),
        (["algorithm.recipe.x=1"], "^algorithm.recipe.x: unknown key$"),
        (
            ["algorithm.refill.hihg=1"],
            "^algorithm.refill.hihg: unknown key; nearest: algorithm.refill.high$",
        ),
        (["algorithm.refill.x=1"], "^algorithm.refill.x: unknown key$"),
        (["algorithm.refill.low=2"], "^algorithm.refill: want low <= high; got 2 and 1$"),
        (
            ["algorithm.shaping.overlng=1"],
            "^algorithm.shaping.overlng: unknown key; nearest: algorithm.shaping.overlong$",
        ),
        (["algorithm.shaping.overlong=2"], "^algorithm.shaping.overlong: want less than or equal to 1; got 2 "),
        (["algorithm.refill.low=0", "rollout.group_size=2"], "want rollout.group_size >= 3; got 2"),
        (
            ["algorithm.refill.low=0", "rollout.mode=process", "train.overlap=true"],
            "^algorithm.refill takes several draws, and train.overlap one ahead: want algorithm.refill null",
        ),
        (["algorithm.recipe.name=critic"], "recipe critic does not support demonstrations: .*got rlplus$"),
        (["algorithm.preset=ppo", "train.sequence_parallel=2"], "recipe critic does not support train.seq.*; got 2$"),
        (["algorithm.preset=ppo", "model.lora={}"], "recipe critic does not support model.lora"),
        (
            ["algorithm.preset=ppo", "train.overlap=true", "rollout.mode=process"],
            "recipe critic does not support train.overlap",
        ),
        (["algorithm.preset=ppo", "train.prompts_per_step=1"], "critic_updates at most the 8 samples .*; got 12$"),
        (["algorithm.preset=ppo", "algorithm.recipe.lr=0"], "^algorithm.recipe.lr: want greater than 0; got 0 "),
        (
            ["algorithm.preset=ppo", "algorithm.recipe.gamma=1.1"],
            "recipe.gamma: want less than or equal to 1; got 1.1 ",
        ),
        (
            ["algorithm.preset=ppo", "algorithm.recipe.critic_updates=1.5"],
            "recipe.critic_updates: want a valid integer; got 1.5",
        ),
        (["algorithm.preset=prime", "train.sequence_parallel=2"], "recipe process-reward does not support train.seq"),
        (
            ["algorithm.preset=prime", "algorithm.shaping.wrong=-1"],
            r"outcomes in \[0, 1\]: want algorithm.shaping null$",
        ),
        (
            ["algorithm.preset=prime", "algorithm.recipe.update=first"],
            "recipe.update: want 'after' or 'before'; got 'first' ",
        ),
        (["algorithm.preset=prime", "algorithm.recipe.beta=-1"], "recipe.beta: want greater than 0; got -1 "),
        (
            ["algorithm.preset=prime", "algorithm.recipe.weight_decay=x"],
            "recipe.weight_decay: want a valid number; got 'x'",
        ),
        (["algorithm.preset=ppo", "algorithm.recipe.whiten=1"], "recipe.whiten: want a valid boolean; got 1"),
        (["algorithm.preset=rlpls"], r"^algorithm.preset: want one of rlplus, .*got 'rlpls'; nearest: rlplus"),
    ],
)
def test_contradictions(minimal: Path, overrides: list[str], match: str) -> None:
    (line,) = problems(minimal, *overrides)
    assert re.search(match, line), line


@pytest.mark.parametrize("preset", ALGORITHMS)
def test_presets_ask_for_demonstrations_exactly_when_they_use_them(minimal: Path, preset: str) -> None:
    overrides = [f"algorithm.preset={preset}", "data.demonstration=null", "algorithm.refill=null"]
    overrides += ["algorithm.recipe.teacher=a-teacher"] if preset in ("gkd", "opd") else []
    algorithm = ALGORITHMS[preset]
    if not (algorithm.needs_demonstrations or algorithm.recipe.demonstration_prompt):
        assert load_config(minimal, [*overrides, "rollout.group_size=1"]).max_sample_length == 1024 + 64
    elif preset != "sdpo":  # which shows responses
        assert "want data.demonstration" in problems(minimal, *overrides)[0]


@pytest.mark.parametrize("name", ["interleaved", "gate", "prefix"])
def test_a_group_of_one_is_for_recipes_that_give_no_place_to_a_demonstration(minimal: Path, name: str) -> None:
    config = load_config(minimal, [f"algorithm.recipe.name={name}", "rollout.group_size=1"])
    assert config.algorithm.resolve().objective == ALGORITHMS["rlplus"].objective
    assert config.max_sample_length == config.max_generation_length == 1024 + 64


def test_longest_sample_covers_demonstrations(minimal: Path) -> None:
    config = load_config(minimal, ["data.max_demonstration_length=500"])
    assert (config.max_demonstration_length, config.max_sample_length) == (500, 1524)
    assert config.max_generation_length == 1024 + 64
    grpo = load_config(minimal, ["data.max_demonstration_length=500", "algorithm.preset=grpo"])
    assert grpo.max_sample_length == 1024 + 64
