"""The shipped configurations run: each on its own architecture, shrunk, and on rows of its data's layout."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from public_data import GSM8K, OPENR1, write
from trainer_runs import metrics
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples import prepare_data
from rlplus.tools.cli import main
from rlplus.train.config import load_config
from rlplus.train.config.path_checks import shipped_architecture
from rlplus.train.data import byte_tokenizer
from rlplus.train.trainer import train

ROOT = Path(__file__).parents[2]
PAPER = (
    pytest.param("qwen2.5-math-7b", marks=pytest.mark.slow),
    pytest.param("qwen2.5-math-1.5b", marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b-instruct", marks=pytest.mark.slow),
    "deepseek-math-7b-instruct",
)
SMALL = (
    "model.dtype=float32",
    "model.attention=sdpa",
    "data.max_prompt_length=256",
    "data.max_demonstration_length=256",
    "reward.workers=1",
    "rollout.engine=transformers",
    "rollout.sleep=false",
    "rollout.group_size=3",
    "rollout.max_response_length=8",
    "train.tokens_per_micro_batch=1024",
    "train.prompts_per_step=2",
    "train.prompts_per_update=1",
    "train.lr=1e-2",
)


def shrunken_model(path: str, folder: Path) -> Path:
    """The architecture that is shipped for `path` with random weights, narrow, one layer deep, on bytes."""
    tokenizer = byte_tokenizer()
    values = json.loads(shipped_architecture(path).read_text())
    heads = values["num_attention_heads"] // values["num_key_value_heads"]
    values |= {
        "hidden_size": 16 * heads,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prepare_gsm8k(folder: Path, *arguments: str) -> None:
    files = [write(folder, GSM8K, f"{name}.parquet") for name in ("train", "test")]
    prepare_data.main(["gsm8k", "--train", files[0], "--test", files[1], "--validation", "1", *arguments])


@pytest.mark.parametrize("name", ["gsm8k-0.5b", "gsm8k-7b-24gb"])
def test_gsm8k_trains_on_prepared_data(name: str, tmp_path: Path) -> None:
    data, path = tmp_path / "gsm8k", ROOT / f"configs/{name}.yaml"
    if load_config(path).model.lora is not None:
        pytest.importorskip("bitsandbytes", reason="model.lora.quantization needs bitsandbytes, which is not installed")
    prepare_gsm8k(tmp_path, "--output", str(data))
    model = shrunken_model(load_config(path).model.path, tmp_path / "base")
    files = [f"data.path={data / 'train.parquet'}", f"validation.data.path={data / 'validation.parquet'}"]
    changes = [*files, f"model.path={model}", f"output_dir={tmp_path / 'run'}", "train.epochs=2", "validation.every=2"]
    changes.append(f"model.dtype={load_config(path).model.dtype}")  # its own: bfloat16
    if load_config(path).rollout.kv_cache_memory_mb:
        changes.append("rollout.kv_cache_memory_mb=16")
    assert main(["train", str(path), *SMALL, *changes]) == 0
    steps = metrics(tmp_path / "run")
    assert [row["reward/external"] for row in steps] == [1.0, 1.0]
    assert "validation/reward" in steps[1]
    assert f"| base model | {model} |" in (tmp_path / "run/model/README.md").read_text()


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models_train_on_prepared_data(name: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    rows = write(tmp_path, OPENR1, "openr1.parquet")
    prepare_data.main(["openr1-math", "--train", rows, "--validation", "1", "--output", str(data)])
    shipped = load_config(ROOT / "configs" / f"{name}.yaml")
    model = shrunken_model(shipped.model.path, tmp_path / "base")
    changes = [f"model.path={model}", f"data.path={data / 'train.parquet'}", f"output_dir={tmp_path / 'run'}"]
    length = ["train.epochs=null", "train.steps=2"]
    train(load_config(ROOT / "configs" / f"{name}.yaml", [*SMALL, *changes, *length]))
    steps = metrics(tmp_path / "run")
    assert [row["reward/external"] for row in steps] == [1.0, 1.0]
    exported = AutoConfig.from_pretrained(tmp_path / "run/model")
    original = json.loads(shipped_architecture(shipped.model.path).read_text())
    llama = name.startswith("llama")
    assert exported.rope_parameters["rope_theta"] == (original["rope_theta"] if llama else 40000)
    assert exported.rope_parameters["rope_type"] == ("llama3" if llama else "default")
    assert exported.max_position_embeddings == (original["max_position_embeddings"] if llama else 16384)
    prompt = AutoTokenizer.from_pretrained(tmp_path / "run/model").apply_chat_template(
        OPENR1[0]["prompt"], add_generation_prompt=True, tokenize=False
    )
    assert re.search(r"Think\.[^?]*0\+1\?[^?]*<think>\n$", prompt)


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's bash blocks, as lists of words."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    words = []
    for block in blocks:
        lines = ""
        for line in block.splitlines(keepends=True):
            lines += line
            if lines.count("'") % 2 == 0:
                words.append(shlex.split(lines))
                lines = ""
    return words


@pytest.mark.slow
def test_the_walk_through_from_data_to_a_served_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands in its order, with the model and the lengths of the run shrunk; all but installing and serving."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    shipped = load_config("configs/gsm8k-0.5b.yaml")
    model = str(shrunken_model(shipped.model.path, tmp_path / "base"))
    small = [*SMALL, f"model.path={model}", "train.epochs=1", "validation.every=1", "evaluation.samples=4"]
    rest = []
    for words in commands(ROOT / "examples/gsm8k.md"):
        program, *arguments = [model if word == shipped.model.path else word for word in words]
        if program == "python":
            assert arguments == ["examples/prepare_data.py", "gsm8k"]
            prepare_gsm8k(tmp_path)
        elif program == "rlplus":
            configured = any(word.endswith(".yaml") for word in arguments[1:2])
            assert main([*arguments, *(small if configured else [])]) == 0, words
        else:
            rest.append(words)
    assert Path("report.html").is_file()
    assert all(list(Path(f"runs/gsm8k-0.5b{name}").glob("evaluation-*.json")) for name in ("", "-grpo"))
    assert [words[:2] for words in rest] == [["pip", "install"], ["vllm", "serve"], ["curl", rest[2][1]]]
    assert (Path(rest[1][2]) / "config.json").is_file()
    limit = int(rest[1][rest[1].index("--max-model-len") + 1])
    assert limit == shipped.max_generation_length
    system, user = json.loads(rest[2][-1])["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert system["content"] == shipped.data.system_prompt
