"""`rlplus init`: a configuration that loads, fits and reads its data, with choices that other settings confirm."""

from pathlib import Path
from typing import Any

import pytest
from init_cases import init, installed_vllm, questions, written

from rlplus.tools.cli import main
from rlplus.tools.init import start
from rlplus.tools.init.fitting import FULL, FULL_AT, LORA, TOKENS, find_fitting
from rlplus.tools.plan import GIB, make_cluster, make_plan
from rlplus.tools.plan.data_report import plan_data
from rlplus.tools.plan.search import SCRATCH_MB
from rlplus.train.config import AlgorithmConfig, Config, ScratchModel, load_config, merged
from rlplus.train.data import byte_tokenizer, load_examples, response_text
from rlplus.train.learner.pretrained import make_scratch_model, write_model
from rlplus.train.reward import Scorer

SEVEN = "Qwen/Qwen2.5-Math-7B"  # its architecture comes with rlplus


vllm_is_installed = installed_vllm


def test_the_file_loads_fits_and_reads_its_data(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    assert init(model, questions(tmp_path), out, "--gpu", "24g", "rollout.group_size=16") == 0
    said = capsys.readouterr().out
    assert "40 prompts (prompt question, answer answer, demonstration answer), graded by math_verify" in said
    assert "all weights are trained" in said
    assert f"rlplus plan {out} --data --gpu 24g, then rlplus train {out}" in said
    assert "whether demonstrations help depends on their form: --logprob" in said
    config = load_config(out)
    assert (config.rollout.group_size, config.train.prompts_per_step) == (16, 40)
    assert (config.algorithm.preset, config.data.answer_pattern) == ("rlplus", "#### (.+)")
    assert config.max_sample_length <= 1024  # the model's positions
    examples, report = load_examples(config.data, byte_tokenizer(), max_demonstration_length=512)
    assert (examples[3].answer, report.kept, report.demonstrations) == ("4", 40, 40)
    assert config.data.max_demonstration_length == 128
    assert max(report.prompt_lengths) <= config.data.max_prompt_length < max(report.prompt_lengths) + 128
    assert main(["plan", str(out), "--gpus", "1", "--gpu", "24g", "--data"]) == 0
    assert "It fits." in capsys.readouterr().out
    text = out.read_text()
    assert "group_size: 16  # responses to a prompt" in text
    assert init(model, questions(tmp_path), out, "--gpu", "24g") == 2
    assert "want --out a new file" in capsys.readouterr().err
    assert out.read_text() == text


def pass_the_reward(begun: Config) -> list[bool]:
    """Whether each demonstration passes the run's own reward, with a box where the prompt asks for one."""
    tokenizer = byte_tokenizer()
    examples, report = load_examples(begun.data, tokenizer, max_demonstration_length=512)
    assert report.demonstrations == report.rows
    texts = [response_text(tokenizer, example.demonstration or (), None) for example in examples]
    prompts = [tokenizer.decode(list(example.prompt)) for example in examples]
    with Scorer(begun.reward.model_copy(update={"workers": 1})) as scorer:
        return [one.value == 1 for one in scorer(texts, [e.answer for e in examples], prompts=prompts)]


SAID = [{"role": "user", "content": "1?"}]
SOLVED = {"prompt": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("rows", "template"),
    [
        ([{"question": f"{i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(4)], True),
        ([SOLVED | {"solution": "1 and 1 make 2"}], True),
        ([SOLVED | {"solution": "1 and 1 make 2"}, SOLVED | {"solution": r"\boxed{2}"}], True),
        ([SOLVED | {"solution": r"They make \boxed{2}."}] * 2, False),
        ([{**SOLVED, "prompt": [{"role": "user", "content": r"1+1? Use \boxed{}."}], "solution": "It is 2."}], True),
        ([{**SOLVED, "prompt": [{"role": "user", "content": "1+1?"}], "solution": "It is 2."}], False),
    ],
    ids=["gsm8k", "plain", "some have a box", "all have a box", "the row asks", "none asks"],
)
def test_demonstrations_have_the_box_that_the_prompts_ask_for(
    model: str, tmp_path: Path, rows: list[dict[str, Any]], template: bool
) -> None:
    """And the reward is 0 without an end, and of the last box where every prompt asks for one."""
    begun = start(model, written(tmp_path, rows), make_cluster(1, "24g"))
    config, asks = begun.config, isinstance(next(iter(rows[0].values())), str)
    assert all(pass_the_reward(config))
    assert (config.data.demonstration_template is not None) == template
    assert (config.reward.cut_off, config.reward.kind) == ("zero", "math_verify_box" if asks else "math_verify")
    assert (config.data.system_prompt is not None) == asks
    assert "cut_off: zero  # a response that was cut off is worth 0" in begun.text


def test_a_model_without_a_chat_template_is_asked_for_no_box(tmp_path: Path) -> None:
    """A system prompt would need the template."""
    folder, tokenizer = tmp_path / "plain", byte_tokenizer()
    scratch = ScratchModel(hidden_size=32, layers=1, heads=2, intermediate_size=64, max_position_embeddings=1024)
    write_model(make_scratch_model(scratch, tokenizer, seed=0), str(folder))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    config = start(str(folder), questions(tmp_path), make_cluster(1, "24g")).config
    assert (config.data.system_prompt, config.data.chat, config.reward.box) == (None, False, "auto")
    assert all(pass_the_reward(config))


def test_columns_by_their_names(model: str, tmp_path: Path) -> None:
    """Letters are graded as choices, chat messages stay, a column may be named, and an answer is no demonstration."""
    cluster = make_cluster(1, "24g")
    chat = [{"prompt": [{"role": "user", "content": "A or B?"}], "solution": "B"}]
    config = start(model, written(tmp_path, chat), cluster).config
    assert (config.reward.kind, config.data.chat, config.data.answer) == ("choice", False, "solution")
    assert (config.data.demonstration, config.algorithm.preset) == (None, "grpo")
    named = [{"text": "1+1?", "value": 2, "solution": "1 and 1 make 2"}]
    config = start(model, written(tmp_path, named), cluster, ["data.prompt=text", "data.answer=value"]).config
    assert (config.reward.kind, config.data.chat, config.data.demonstration) == ("math_verify_box", True, "solution")
    assert "boxed" in str(config.data.system_prompt)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"prompt": "1+1?", "reward_model": {"ground_truth": "2"},
          "target": [{"role": "assistant", "content": "It is 2."}]},
         ("prompt", "reward_model.ground_truth", "target")),  # LUFFY's
        ({"question": "1+1?", "target": "2", "response": "It is 2."}, ("question", "target", "response")),
        ({"problem": "1+1?", "solution": "2"}, ("problem", "solution", None)),
        ({"problem": "1+1?", "answer": "2", "solution": "It is 2."}, ("problem", "answer", "solution")),
    ],
)  # fmt: skip
def test_a_column_has_one_meaning(
    row: dict[str, Any], names: tuple[str | None, ...], model: str, tmp_path: Path
) -> None:
    data = start(model, written(tmp_path, [row] * 4), make_cluster(1, "24g")).config.data
    assert (data.prompt, data.answer, data.demonstration) == names


def test_columns_are_those_that_every_row_has(model: str, tmp_path: Path) -> None:
    """Whichever row comes first; a null is a value that a row may have."""
    rows: list[dict[str, Any]] = [
        {"question": "1+1?", "answer": None, "final_answer": "2"},
        {"question": "1+1?", "answer": "2", "prompt": "p"},
        {"question": "1+1?", "answer": "2", "final_answer": "2"},
    ]
    cluster, given = make_cluster(1, "24g"), ["data.max_dropped_share=0.5"]
    for order in (rows, rows[::-1], rows[1:] + rows[:1]):
        data = start(model, written(tmp_path, order), cluster, given).config.data
        assert (data.prompt, data.answer) == ("question", "answer")


def test_answers_that_no_grader_reads_are_counted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By init and by plan --data, without demonstrations, too."""
    answers = ["2", "proof", "notfound", "3", "see the book", "x + 1"]
    data, out = written(tmp_path, [{"problem": "1+1?", "answer": answer} for answer in answers]), tmp_path / "run.yaml"
    assert init(model, data, out, "--gpu", "24g", "train.prompts_per_step=4") == 0
    wanted = "answers: 3 of 6 cannot be read by math_verify_box: every response there is worth 0 (first: row 2, 'proof'"
    said = " ".join(capsys.readouterr().out.split())
    assert wanted in said
    assert "--logprob" not in said
    main(["plan", str(out), "--gpus", "1", "--gpu", "24g", "--data"])
    assert wanted in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("row", "hidden"),
    [
        ({"question": "Which turns?", "choices": ["a planet", "a stone"], "answer": 0}, True),
        ({"question": "Which turns? A) a planet B) a stone", "choices": ["a planet", "a stone"], "answer": 0}, True),
        ({"question": "Which turns?", "choices": {"text": ["a planet", "a stone"], "label": ["A", "B"]}, "answer": "A"},
         True),
        ({"question": "Which turns?", "options": ["a planet", "a stone"], "answer": "B"}, True),
        ({"question": "A) a planet B) a stone", "choices": ["a planet", "a stone"], "answer": "A"}, False),
        ({"question": "2 or 3?", "choices": ["2", "3"], "answer": "2"}, False),
        ({"question": "Which turns?", "choices": ["a planet", "a stone"], "answer": "a planet"}, False),
    ],
)  # fmt: skip
def test_answers_that_point_at_choices_are_refused(
    row: dict[str, Any], hidden: bool, model: str, tmp_path: Path
) -> None:
    """No response can give them where the prompt does not show the choices with letters."""
    path, cluster = written(tmp_path, [row] * 4), make_cluster(1, "24g")
    if not hidden:
        start(model, path, cluster)
        return
    with pytest.raises(
        ValueError, match=r"the answers in 'answer' point at '(choices|options)' in 4 of 4 rows .* prompts"
    ):
        start(model, path, cluster)
    (elsewhere := tmp_path / "questions").mkdir()
    config = start(model, questions(elsewhere), cluster).config
    data = config.data.model_copy(update={"path": path, "answer_pattern": None, "demonstration": None})
    planned = plan_data(config.model_copy(update={"data": data, "algorithm": AlgorithmConfig(preset="grpo")}))
    assert any("point at" in line for line in planned.summaries)


def fits(values: dict[str, Any], gpus: int, gpu: str, **train: Any) -> bool:
    config = Config.model_validate(merged(values, {"train": train}))
    memory = make_plan(config, make_cluster(gpus, gpu)).memory
    return memory.fits and memory.peak <= FULL_AT * memory.capacity


@pytest.mark.parametrize(("gpus", "gpu"), [(8, "40g"), (1, "80g")])
def test_nothing_milder_fits(gpus: int, gpu: str, tmp_path: Path) -> None:
    """By the plan as a user asks it: a lower ZeRO stage, a larger micro-batch and all weights in place of LoRA."""
    begun = start(SEVEN, questions(tmp_path), make_cluster(gpus, gpu))
    values, train = begun.config.model_dump(mode="json"), begun.config.train
    assert fits(values, gpus, gpu)
    assert (begun.config.model.lora is None) == (gpus == 8)
    least = {"tokens_per_micro_batch": begun.config.max_sample_length, "max_scratch_mb": SCRATCH_MB[-1]}
    lowest = merged(values, {"rollout": {"gpu_memory_utilization": 0.55}})  # enough for the engine's weights
    for stage in range(1, train.zero_stage):
        assert not fits(lowest, gpus, gpu, zero_stage=stage, **least)
    larger = [n for n in TOKENS if n > train.tokens_per_micro_batch]
    assert not any(fits(lowest, gpus, gpu, tokens_per_micro_batch=n) for n in larger)
    if begun.config.model.lora is not None:
        without = merged(values, {"model": {"lora": None}})
        assert not any(fits(without, gpus, gpu, zero_stage=stage, **least) for stage in (1, 2, 3))


@pytest.mark.slow
def test_seven_billion_weights_fit_24_gb_by_the_trainers_own_engine(tmp_path: Path) -> None:
    """QLoRA whose engine has no copy; a cache of twice the size does not fit, and a copy does not either."""
    begun = start(SEVEN, questions(tmp_path), make_cluster(1, "24g"))
    rollout, lora = begun.config.rollout, begun.config.model.lora
    assert lora is not None
    assert (lora.quantization, rollout.engine, rollout.share_weights) == ("nf4", "transformers", True)
    values, cache = begun.config.model_dump(mode="json"), rollout.kv_cache_memory_mb
    assert cache is not None
    assert fits(values, 1, "24g")
    assert not fits(merged(values, {"rollout": {"kv_cache_memory_mb": 2 * cache}}), 1, "24g")
    assert not fits(merged(values, {"rollout": {"share_weights": False}}), 1, "24g")
    reasons = " ".join(begun.reasons)
    assert "they do not fit beside vLLM's copy of the weights: all weights are trained, LoRA" in reasons
    assert "slower than vLLM" in reasons
    assert 'pip install -e ".[qlora]"' in reasons
    assert "share_weights: true  # the engine generates with the trainer's weights" in begun.text
    assert "sleep" not in begun.text


def test_an_engine_that_is_too_large_for_one_gpu_has_several(tmp_path: Path) -> None:
    begun = start(SEVEN, questions(tmp_path), make_cluster(4, "16g"))
    assert begun.config.rollout.tensor_parallel_size > 1
    alone = merged(begun.config.model_dump(mode="json"), {"rollout": {"tensor_parallel_size": 1}})
    assert not fits(alone, 4, "16g")


@pytest.mark.parametrize(
    "fixed",
    [
        {"model": {"lora": {"rank": 4, "quantization": "nf4"}}},  # no ZeRO-3, which the last tuning has
        {"train": {"zero_stage": 3, "shard_head": True}},  # no ZeRO below 3
    ],
    ids=["nf4", "shard_head"],
)
def test_what_does_not_go_with_a_fixed_key_is_left_out(fixed: dict[str, Any], tmp_path: Path) -> None:
    assert find_fitting(sections(tmp_path), fixed, make_cluster(2, "2g")) is None


def sections(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": "out",
        "model": {"path": SEVEN, "gradient_checkpointing": True},
        "data": {"path": questions(tmp_path)},
        "reward": {"kind": "math_verify"},
        "rollout": {"engine": "vllm", "sleep": True},
        "algorithm": {"preset": "grpo"},
        "train": {"epochs": 1, "prompts_per_step": 64, "prompts_per_update": 32},
    }


def test_fixed_keys_stay_and_only_the_tunings_asked_for_are_tried(tmp_path: Path) -> None:
    base, cluster = sections(tmp_path), make_cluster(1, "80g")
    assert find_fitting(base, {}, cluster, [FULL]) is None
    fixed = {"rollout": {"max_response_length": 4096 - 1024}, "train": {"lr": 3e-6}, "model": {"lora": {"rank": 4}}}
    found = find_fitting(base, fixed, cluster, [FULL, LORA])
    assert found is not None
    assert (found.config.rollout.max_response_length, found.config.train.lr) == (3072, 3e-6)
    assert found.config.model.lora is not None
    assert (found.config.model.lora.rank, found.refused) == (4, ())


def test_what_would_fit_is_said(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no settings make .* fit on 1 x 3 GiB GPU: it would on 1 x 24 GiB \(all w"):
        start(model, questions(tmp_path), make_cluster(1, "3g"))
    on_24 = start(model, questions(tmp_path), make_cluster(1, "24g"))
    assert make_plan(on_24.config, make_cluster(1, "24g")).memory.peak > 3 * FULL_AT * GIB


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1+1?"}], "want a column of the answer, by one of the names answer, .*; got question"),
        ([{"question": "1?", "answer": "1"}, {"answer": "2"}], "rows.jsonl:2: want a column 'question'; got answer"),
        ([{"question": "1?", "answer": ""}], "got 1 rows, 0 kept, 0 demonstrations; 1 rows without an answer"),
        ([], "want at least one row; got none"),
        (
            [{"answer": "1", "question": [{"role": "user", "content": "1?"}]}] * 3
            + [{"answer": "1", "question": [*SAID, {"role": "assistant", "content": "It is 1."}]}],
            "want chat messages whose last one is a user's or a tool's; got an assistant's.*'It is 1.'",
        ),
        ([{"answer": "1"}, {"prompt": "1?", "answer": "1"}], "rows.jsonl:1: want a column 'prompt'; got answer"),
    ],
)
def test_data_that_training_refuses(rows: list[dict[str, Any]], message: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        start(model, written(tmp_path, rows), make_cluster(1, "24g"))


def test_wrong_files_and_models_get_the_words_of_train(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data, out = questions(tmp_path), tmp_path / "run.yaml"
    (wrong := tmp_path / "wrong.jsonl").write_text('{"question": 1')
    for options, message in (
        ((model, str(tmp_path / "none.jsonl")), "want a data file; got --data"),
        ((model, str(wrong)), f"{wrong}:1: invalid JSON"),
        (("owner/none", data), "want --model a Hugging Face folder or hub name; got 'owner/none': no such folder; HF_"),
        ((model, data, "--gpu", "24"), "want --gpu one of"),
        ((model, data, "rollout.n=4"), "rollout.n: unknown key; verl's rollout.n is rollout.group_size here"),
        ((model, data, "rollout=5"), "rollout: want a section of keys and values; got 5 (int)"),
        ((model, data, "model.dtype=x"), "model.dtype: want 'float32' or 'bfloat16'; got 'x' (str)"),
        ((model, data, "data.chat=7"), "data.chat: want a valid boolean; got 7 (int)"),
        ((model, data, "model.lora.rnk=7"), "model.lora.rnk: "),
    ):
        name, file, *rest = options
        assert init(name, file, out, *(rest or ["--gpu", "24g"])) == 2, message
        assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_machine_without_a_gpu_is_said(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data, out = questions(tmp_path), tmp_path / "run.yaml"
    assert init(model, data, out, "--gpus", "2") == 0
    said = capsys.readouterr().out
    assert "this machine has no GPU, so its CPU trains: name the GPUs of another one by --gpu and --gpus" in said
    assert f"rlplus plan {out} --data --gpus 2, then torchrun --nproc_per_node 2 -m rlplus" in said
    assert main(["plan", str(out), "--gpus", "2"]) == 0
    assert "2 x cpu, " in capsys.readouterr().out
    assert init(model, data, tmp_path / "named.yaml", "--gpu", "24g") == 0
    assert "this machine has no GPU" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "want --gpus of at least 1; got 0"),
        (["--gpus", "0", "--gpu", "h100"], "want --gpus of at least 1; got 0"),
        (["--out", "no/such/run.yaml"], "want --out a file in a folder that exists; got no/such/run.yaml"),
    ],
)
def test_wrong_options_are_refused_before_the_search(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def searched(*arguments: object) -> None:
        raise AssertionError("the search began")

    monkeypatch.setattr("rlplus.tools.init.start", searched)
    assert init("no-model", "no-data.jsonl", tmp_path / "run.yaml", *options) == 2
    assert message in capsys.readouterr().err
