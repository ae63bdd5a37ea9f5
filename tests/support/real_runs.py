"""Short runs and evaluations of pretrained models, and what they should find, by transformers and regexes alone."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from school_problems import write_problems
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlplus.tools.cli import main
from rlplus.train.config import Config, load_config
from rlplus.train.data.sample_store import read_kept
from rlplus.train.rollout import Request, Sampling
from rlplus.train.trainer import Run

Text = tuple[Sequence[int], Sequence[int]]  # a prompt and its response, as token ids
NEAR, FAR = 2.0, 4.0  # mean gaps of a right engine, at most, and of another model, in units of the model's own rounding
SHORT = {  # two steps of four prompts, each of which two cores take in half a minute
    "rollout.sleep": "false",
    "rollout.group_size": "4",
    "rollout.max_response_length": "48",
    "rollout.kv_cache_memory_mb": "128",
    "train.epochs": "null",
    "train.steps": "2",
    "train.prompts_per_step": "4",
    "train.tokens_per_micro_batch": "1024",
    "train.lr": "1e-4",
    "checkpoint.every": "1",
    "log.samples_every": "1",
    "log.sample_groups": "4",
    "reward.workers": "1",
}


def init(folder: Path, model: str, problems: int, *overrides: str) -> Path:
    """The configuration that `rlplus init` writes for the model and so many problems."""
    file, data = folder / "run.yaml", write_problems(folder, problems)
    command = ["init", "--model", model, "--data", str(data), "--out", str(file), "--gpus", "1", "--gpu", "80g"]
    assert main([*command, *overrides]) == 0
    return file


def overrides(output: Path, **changes: object) -> list[str]:
    """Overrides for a short run of such a file; `changes` have __ in place of the dot."""
    settings = SHORT | {key.replace("__", "."): str(value) for key, value in changes.items()}
    return [f"output_dir={output}", *(f"{key}={value}" for key, value in settings.items())]


def short_run(file: Path, output: Path, **changes: object) -> Config:
    return load_config(file, overrides(output, **changes))


def load(path: str | Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def logprobs(lm: Any, texts: Sequence[Text]) -> Tensor:
    """The logprobs of all tokens of the responses, one after the other, by a plain forward pass of each text."""
    found = []
    for prompt, response in texts:
        logits = lm(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(logits.log_softmax(-1).gather(1, torch.tensor([*response])[:, None])[:, 0].double())
    return torch.cat(found)


def sampled(run: Run, seed: int) -> tuple[list[Text], Tensor]:
    """Two responses of the run's engine to each of its first prompts, and the engine's logprobs of their tokens."""
    prompts, limit = [example.prompt for example in run.examples[:4]], run.config.rollout.max_response_length
    groups = run.engine.engine.generate([Request(prompt, 2, limit) for prompt in prompts], Sampling(1.0, seed))
    pairs = [(prompt, each) for prompt, group in zip(prompts, groups, strict=True) for each in group]
    values = [value for _, each in pairs for value in each.logprob]
    return [(prompt, each.tokens) for prompt, each in pairs], torch.tensor(values, dtype=torch.float64)


class Counted(NamedTuple):
    """The file that an evaluation wrote, and a count of its samples: right ones by problem, and statuses.

    Right is a response that ended, whose last box has the reference's number.
    """

    file: dict[str, Any]
    correct: list[int]
    statuses: dict[str, int]


def evaluate(model: str, folder: Path, problems: int, samples: int, tokens: int) -> Counted:
    """`rlplus eval` of the model on the first problems, with the rules of a training."""
    ask = "Please reason step by step, and put your final answer within \\boxed{}."
    data = {"prompt": "question", "chat": "true", "max_prompt_length": "128", "system_prompt": ask}
    command = ["eval", model, "--data", str(write_problems(folder, problems)), "--output", str(folder / "eval")]
    settings = [f"evaluation.samples={samples}", f"rollout.max_response_length={tokens}"]
    settings += ["reward.cut_off=zero", "reward.box=required", "reward.workers=1"]
    assert main([*command, *settings, *(f"evaluation.data.{key}={value}" for key, value in data.items())]) == 0
    correct, statuses = [0] * problems, Counter[str]()
    for path in (folder / "eval/samples").glob("*.parquet"):
        for sample in read_kept(path):
            boxes = re.findall(r"\\boxed\{([^{}]*)\}", sample.response)
            number = re.sub(r"[^\d.]", "", boxes[-1]) if boxes else ""
            statuses["cut_off" if sample.truncated else "ok" if boxes else "no_box"] += 1
            correct[sample.problem] += not sample.truncated and number == sample.answer
    return Counted(json.loads((folder / "eval/evaluation-problems.json").read_text()), correct, statuses)
