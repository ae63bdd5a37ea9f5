"""The comparisons on a pretrained model: their files, the command from the data to the figure, and what it draws."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparisons import EXPERIMENTS

from experiments.real import __main__ as real
from experiments.real.compared_figure import draw, pass_at_1
from rlplus.tools.compare.config import BASE, load_comparison
from rlplus.tools.compare.launches import Runner
from rlplus.tools.compare.outcomes import Results
from rlplus.train.config import load_config
from rlplus.train.data import byte_tokenizer

PLANS = ("cpu", "gpu")
CHAT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize("plan", PLANS)
def test_the_files_are_comparisons_whose_every_run_is_a_configuration(plan: str, tmp_path: Path) -> None:
    given = real.write_plan(plan, tmp_path, "model")
    for file in (EXPERIMENTS / "real" / f"{plan}.yaml", given):
        comparison = load_comparison(file)
        (study,) = comparison.studies.values()
        assert study.methods[0] == BASE
        runner = Runner(comparison, file.parent / comparison.run, tmp_path / "runs")
        configs = [runner.config_of(runner.chain("", 0, method)[-1]) for method in comparison.methods]
        first = load_config(file.parent / comparison.run)
        assert (first.model.path == "model") == (file == given)
        assert len({config.evaluation.model_dump_json() for config in configs}) == 1
    config = configs[0]
    paths = [config.data.paths, config.evaluation.data.paths if config.evaluation.data else []]
    assert paths == [[str(tmp_path / "gsm8k/train.parquet")], [str(tmp_path / "gsm8k/test.parquet")]]


@pytest.mark.slow
def test_the_command_goes_from_the_data_to_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a random model and sums in GSM8K's form; again, it trains nothing."""
    rows = [
        {"question": f"{i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(540)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(tmp_path / "model")
    lengths = ["rollout.max_response_length=48", "data.max_prompt_length=120", "evaluation.data.max_prompt_length=120"]
    small = ["train.steps=2", "evaluation.data.limit=4", "rollout.engine=transformers", "rollout.kv_cache_memory_mb=64"]
    files = [f"--{name}={tmp_path}/rows.jsonl" for name in ("train", "test")]
    command = ["real", "cpu", str(tmp_path / "out"), "--model", str(tmp_path / "model"), *files, *lengths, *small]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", command)
        real.main()
    results = Results.load(tmp_path / "out/comparison/results.json")
    assert [one.method for one in results.outcomes] == [BASE, "SFT", "SFT+GRPO", "SFT+RL-PLUS"]
    assert (tmp_path / "out/figure.svg").read_text().count("<svg") == 1


def test_a_command_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["real", "cpu", str(tmp_path / "out"), "--train", str(tmp_path / "nowhere.jsonl")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        real.main()
    assert end.value.code
    assert not (tmp_path / "out/comparison").exists()


def test_bars_are_the_shares_of_right_samples(tmp_path: Path) -> None:
    results = Results.load(EXPERIMENTS / "compare/results/updates.json")
    outcomes = [one for one in results.outcomes if one.setting == results.outcomes[0].setting]
    draw(replace(results, outcomes=outcomes), tmp_path / "a.svg")
    draw(replace(results, outcomes=outcomes), tmp_path / "b.svg")
    assert (text := (tmp_path / "a.svg").read_text()) == (tmp_path / "b.svg").read_text()
    assert all(method.replace("&", "&amp;") in text for method in {one.method for one in outcomes})
    evaluation = next(iter(outcomes[0].results.values()))
    assert pass_at_1(evaluation) == pytest.approx(sum(evaluation.correct) / sum(evaluation.n))


def write_model(folder: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = CHAT
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
