"""`python -m experiments.real.steps`: a step's phases, tokens and work, of rlplus and, with TRL, of three trainers."""

import json
import re
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from experiments.real import steps, timed_trainers
from experiments.real.boxed import ASKED, reward, rewards
from experiments.real.steps import PHASES, Settings, Shape, never_sampled, parse, summary, table, with_work
from experiments.real.timed_trainers import Clock, profiled, watch
from rlplus.train.config import load_config
from rlplus.train.data import byte_tokenizer

VOCABULARY = len(byte_tokenizer()) + 1
ROWS = 8
ROOT = Path(__file__).parents[2]


def make_model(folder: Path, vocabulary: int = VOCABULARY, tied: bool = False) -> Any:
    """A model that, untied, never samples its last token."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, tie_word_embeddings=tied, **sizes, **special)
    config._attn_implementation = "eager"
    model = Qwen2ForCausalLM(config)
    if not tied:  # the first of the hidden states is large
        model.model.embed_tokens.weight.data[:, 0] = 3.0
        model.lm_head.weight.data[-1, 0] = -30.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def make_data(file: Path) -> None:
    rows = (
        {"prompt": f"{i} + {10**i} = ", "answer": str(i + 10**i), "demonstration": f"so \\boxed{{{i + 10**i}}}"}
        for i in range(ROWS)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The command on a tiny model; returns what it wrote."""
    monkeypatch.chdir(ROOT)
    make_model(tmp_path / "model")
    make_data(tmp_path / "rows.jsonl")

    def measure(*options: str) -> dict[str, Any]:
        places = [str(tmp_path / name) for name in ("model", "rows.jsonl", "found.json")]
        steps.main([*places, "--engine", "transformers", "--steps", "2", *options])
        found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
        assert str(tmp_path) not in json.dumps(found), "paths of the machine are no result"
        return found

    return measure


@pytest.fixture
def here(command: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The command with its trainers in this process."""

    def run(trainer: str, folder: Path) -> dict[str, Any]:
        timed_trainers.main(trainer, folder)
        return {"trainer": trainer, "load": [0.0, 0.0]} | json.loads((folder / "measured.json").read_text())

    monkeypatch.setattr(steps, "run", run)
    return command


def check_steps(run: dict[str, Any]) -> None:
    for step in run["steps"]:
        seconds = step["seconds"]
        assert sum(seconds.get(phase, 0.0) for phase in PHASES) == pytest.approx(seconds["step"])
        assert all(seconds[phase] > 0 for phase in ("forward_backward", "optimizer", "rest"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("\\boxed{1} no, \\boxed{1,008}", 1), ("\\boxed{$1008.0}", 1), ("1008", 0), ("\\boxed{1008} \\boxed{}", 0)],
)
def test_the_last_box_is_graded_and_no_two_rewards_are_equal(text: str, value: int) -> None:
    """So that each response of a group has an advantage, and training needs its backward pass."""
    assert value <= reward(text, "1008") < value + 1e-3
    texts = [f"{i}" for i in range(50)]
    assert len({*rewards(texts, ["7"] * 50)}) == 50


@pytest.mark.parametrize("tied", [True, False])
def test_work_is_what_torch_counts_and_half_of_its_square_of_attention(tied: bool, tmp_path: Path) -> None:
    model, tokens = make_model(tmp_path / "model", 300, tied), 24
    make_data(tmp_path / "rows.jsonl")
    config = steps.write_config(
        str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), Settings(steps=1), tmp_path / "run.yaml"
    )
    shape = Shape.of(config)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)  # biases and norms: no products
    for backward in (False, True):
        with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(backward):
            loss = model(torch.arange(tokens)[None]).logits.sum()
            if backward:
                loss.backward()
        passes = 3 if backward else 1
        square = passes * 2 * shape.attention * tokens**2
        counted_by_us = shape.flop(tokens, tokens, backward) - passes * 2 * tokens * vectors
        assert counted.get_total_flops() == counted_by_us + square
    assert shape.flop(tokens, 5, True) == shape.flop(tokens, tokens, True) - 6 * shape.head * (tokens - 5)


def measured(trainer: str, seconds: list[float], backward: bool = True) -> dict[str, Any]:
    """Steps of 3 seconds' updates and one of generation within so many seconds."""
    phases = {"generate": 1.0, "forward_backward": 2.0, "optimizer": 1.0, "processor": 0.5}
    made = [
        {
            "seconds": phases | {"step": each},
            "tokens": {"generated": 7, "computed": 20},
            "sequences": [(10, 4, True), (6, 3, backward)],
        }
        for each in seconds
    ]
    return {"trainer": trainer, "steps": made, "memory": {"resident": seconds[0] * 1e6}}


def test_the_summary_leaves_first_steps_out_and_counts_tokens_with_a_backward_pass() -> None:
    shape = Shape(100, 1000, 10)
    runs = [with_work(measured("trl", [9.0, 5.0, 7.0]), shape), with_work(measured("trl", [90.0, 6.0]), shape)]
    runs.append(with_work(measured("rlplus", [8.0], backward=False), shape))
    rows = summary(runs, peak=1e6)
    assert list(rows) == ["trl", "rlplus"]
    flop = 3 * (200 * 16 + 2000 * 7 + 20 * 136)
    assert rows["trl"] == pytest.approx(
        {"step": 6.0, "generate": 1.0, "score": 0.0, "old_logprob": 0.0, "forward_backward": 2.0, "optimizer": 1.0}
        | {
            "processor": 0.5,
            "sync": 0.0,
            "rest": 2.0,
            "trained/s": 7 / 6,
            "generated/s": 7.0,
            "FLOP/s": flop / 3,
            "MFU": flop / 3e6,
        }
        | {"resident": 9e7}
    )
    assert rows["rlplus"]["trained/s"] == pytest.approx(4 / 8)
    assert runs[2]["steps"][0]["tokens"] == {
        "generated": 7, "computed": 20, "passed": 16, "trained": 4, "forward_only": 6
    }  # fmt: skip
    lines = table(rows).splitlines()
    assert lines[1].split() == ["step,", "s", "6.000", "8.000"]
    assert lines[-1].split() == ["peak", "resident,", "MB", "90", "8"]
    assert not any(line.startswith("sync") for line in lines), "nobody has any"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainers", "trl,verl"], r"want --trainers among trl, trl\+patch, rlplus; got verl"),
        ([], r'trainers trl and trl\+patch want TRL 1.16: pip install -e "\.\[trl\]"; or --trainers rlplus'),
        (["--trainers", "rlplus", "--rounds", "0"], "want --rounds of at least 1; got 0"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(["model", "data", "out", *options])
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


def test_batches_and_data_that_do_not_fit_are_refused(here: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(SystemExit, match="want --micro-batch a divisor of the 6 sequences; got 4"):
        here("--trainers", "rlplus", "--prompts", "3", "--group", "2", "--micro-batch", "4")
    with pytest.raises(SystemExit, match=f"want 10 prompts in .*, for 2 steps; got {ROWS}"):
        here("--trainers", "rlplus", "--prompts", "5", "--group", "2", "--micro-batch", "5")


def test_the_end_of_fixed_responses_is_no_end_of_the_model(tmp_path: Path) -> None:
    make_model(tmp_path / "more")
    assert never_sampled(str(tmp_path / "more")) == VOCABULARY - 1
    tokenizer = byte_tokenizer()
    make_model(tmp_path / "equal", len(tokenizer))
    with pytest.raises(SystemExit, match=r"wants a special token in .* that ends no response; there is none"):
        never_sampled(str(tmp_path / "equal"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|spare|>"]})
    make_model(tmp_path / "spare", len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "spare")
    assert never_sampled(str(tmp_path / "spare")) == tokenizer.convert_tokens_to_ids("<|spare|>")


def test_rlplus_steps_of_grpo(here: Callable[..., dict[str, Any]]) -> None:
    """All responses have the same length and a backward pass."""
    options = ["--trainers", "rlplus", "--fixed", "--prompts", "2", "--group", "2", "--response", "8"]
    found = here(*options, "--micro-batch", "2", "--rounds", "2", "--note", "a test")
    assert [run["trainer"] for run in found["runs"]] == ["rlplus", "rlplus"]
    for run in found["runs"]:
        check_steps(run)
        for step in run["steps"]:
            tokens = step["tokens"]
            assert tokens["generated"] == tokens["trained"] == 2 * 2 * 8
            assert tokens["trained"] < tokens["passed"] <= tokens["computed"]
            assert tokens["forward_only"] == 0
            assert min(step["seconds"][phase] for phase in ("generate", "score", "sync")) > 0
            assert 0 < step["reward"] < 1e-3
        assert run["memory"]["resident"] > 1e8
    assert found["summary"]["rlplus"]["trained/s"] > 0
    assert found["note"] == "a test"
    assert found["config"]["model"]["end_tokens"] == [VOCABULARY - 1]


def test_rlplus_steps_of_sft_and_its_configuration(here: Callable[..., dict[str, Any]]) -> None:
    found = here(
        "--trainers", "rlplus", "--task", "sft", "--prompts", "4", "--micro-batch", "4", "--set", "train.grad_clip=0.5"
    )
    (run,) = found["runs"]
    check_steps(run)
    passed = [step["tokens"]["passed"] for step in run["steps"]]
    longest, shown = found["config"]["data"]["max_prompt_length"], found["config"]["rollout"]["max_response_length"]
    chats = [
        [{"role": "system", "content": ASKED}, {"role": "user", "content": f"{i} + {10**i} = "}] for i in range(ROWS)
    ]
    prompts = [len(ids) for ids in byte_tokenizer().apply_chat_template(chats, add_generation_prompt=True)["input_ids"]]
    demonstrations = [len(f"so \\boxed{{{i + 10**i}}}") + 1 for i in range(ROWS)]  # a token a byte, and the end
    assert (longest, shown) == (max(prompts), max(demonstrations))
    assert sum(passed) == sum(prompts) + sum(demonstrations)
    assert sum(step["tokens"]["trained"] for step in run["steps"]) == sum(demonstrations)
    assert found["config"]["train"]["grad_clip"] == 0.5


class Scripted(Clock):
    """A clock whose readings are seconds that pass on request."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def read(self) -> float:
        self.last = self.now
        return self.now


@pytest.fixture
def trl_profile(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's `ProfilingContext`, whose own methods would fail here."""

    class ProfilingContext:
        def __init__(self, name: str) -> None:
            self.name = f"GRPOTrainer.{name}"

        def __enter__(self) -> Any:
            raise AssertionError("TRL's own")

        def __exit__(self, *_: Any) -> None:
            raise AssertionError("TRL's own")

    for name in ("trl", "trl.extras", "trl.extras.profiling"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["trl.extras.profiling"].ProfilingContext = ProfilingContext  # type: ignore[attr-defined]
    return ProfilingContext


def test_phases_of_trl_are_those_of_its_profile(trl_profile: Any) -> None:
    """Two micro-batches, the first of which generates; logprobs without a gradient are the old policy's."""
    clock, callbacks = Scripted(), list[Any]()

    def spend(name: str, seconds: float) -> None:
        with trl_profile(name):
            clock.now += seconds

    def compute_loss(model: Any, inputs: dict[str, Any], **more: Any) -> float:
        spend("_get_per_token_logps_and_entropies", 16.0)
        return 0.5

    first = count()

    def training_step(model: Any, inputs: dict[str, Any]) -> Any:
        with trl_profile("_prepare_inputs"):
            if next(first) == 0:
                spend("sync_weights", 1.0)
                spend("transformers.generate", 2.0)
                with torch.no_grad():
                    spend("_get_per_token_logps_and_entropies", 4.0)
                spend("_calculate_rewards", 8.0)
            clock.now += 0.5
        return trainer.compute_loss(model, inputs)

    trainer = SimpleNamespace(training_step=training_step, compute_loss=compute_loss, add_callback=callbacks.append)
    inputs = {"prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]), "completion_mask": torch.tensor([[1, 0], [1, 1]])}
    with profiled(clock):
        watch(trainer, clock)
        (callback,) = callbacks
        callback.on_train_begin(None, None, None)
        clock.now += 0.25
        for _ in range(2):
            assert trainer.training_step(None, inputs) == 0.5
        clock.now += 32.0
        callback.on_optimizer_step(None, None, None)
        clock.now += 0.25
        callback.on_step_end(None, None, None)
    with pytest.raises(AssertionError, match="TRL's own"), trl_profile("_prepare_inputs"):
        pass
    (step,) = clock.steps
    assert step["seconds"].pop("processor") > 0
    assert step["seconds"] == {
        "sync": 1.0, "generate": 2.0, "old_logprob": 4.0, "score": 8.0, "inputs": 16.0, "training_step": 48.0,
        "optimizer": 32.0, "step": 80.5,
    }  # fmt: skip
    assert step["sequences"] == 2 * [(3, 1, True), (5, 2, True)]
    assert step["tokens"] == {"computed": 2 * 10}


@pytest.mark.peers
@pytest.mark.slow
def test_three_trainers_take_the_same_supervised_steps(command: Callable[..., dict[str, Any]]) -> None:
    """Losses differ by the rounding of bf16: the trainers had the same tokens in the same steps, with the same rate."""
    pytest.importorskip("trl")
    found = command("--task", "sft", "--prompts", "4", "--micro-batch", "2", "--lr", "0.01", "--checkpointing")
    runs = {run["trainer"]: run["steps"] for run in found["runs"]}
    assert list(runs) == ["trl", "trl+patch", "rlplus"]
    for run in found["runs"]:
        check_steps(run)
    for name in ("trl", "trl+patch"):
        for step, ours in zip(runs[name], runs["rlplus"], strict=True):
            assert step["loss"] == pytest.approx(ours["loss"], rel=2**-8)
            assert {**step["tokens"], "computed": 0} == {**ours["tokens"], "computed": 0}
            assert step["update_flop"] == ours["update_flop"]
    assert runs["rlplus"][1]["loss"] < runs["rlplus"][0]["loss"] * (1 - 2**-6), "the rate is large enough to show"


@pytest.mark.peers
@pytest.mark.slow
def test_three_trainers_take_steps_of_grpo(command: Callable[..., dict[str, Any]]) -> None:
    pytest.importorskip("trl")
    found = command("--fixed", "--prompts", "2", "--group", "2", "--response", "8", "--micro-batch", "2")
    assert len(found["runs"]) == 3
    for run in found["runs"]:
        check_steps(run)
        for step in run["steps"]:
            assert step["tokens"]["generated"] == step["tokens"]["trained"] == 2 * 2 * 8
            assert step["tokens"]["passed"] == found["runs"][0]["steps"][run["steps"].index(step)]["tokens"]["passed"]
            assert min(step["seconds"][phase] for phase in ("generate", "score")) > 0
            assert 0 < step["reward"] < 1e-3


def test_trls_settings_are_those_of_the_configuration(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    make_data(tmp_path / "rows.jsonl")
    settings = Settings(prompts=2, group=4, steps=2, micro_batch=2, response=8, lr=3e-5, checkpointing=True)
    places = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    steps.write_config(*places, settings, tmp_path / "run.yaml", ["train.betas=[0.8,0.95]", "train.weight_decay=0.125"])
    fields = timed_trainers.trl_settings(load_config(tmp_path / "run.yaml"), settings)
    wanted = {"learning_rate": 3e-5, "adam_beta1": 0.8, "adam_beta2": 0.95, "weight_decay": 0.125, "max_grad_norm": 1.0}
    wanted |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}
    assert {name: fields[name] for name in wanted} == wanted
