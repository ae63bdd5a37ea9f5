"""How likely a base model of the toy task finds demonstrations in each form.

`python -m experiments.toy.familiarity FOLDER` measures it. The folder keeps the base models, a minute or two each on
one core; familiarity.json beside this file receives the numbers, which docs/which-method.md shows.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from experiments.toy import prepare
from experiments.toy.base_model import ToyBase
from experiments.toy.task import Demonstrator, Task
from rlplus.common.durable import write_text

FAMILIARITY = Path(__file__).parent / "familiarity.json"
SHARES = (0.05, 0.15)  # how often the base model uses its scratchpad
SEEDS = (0, 1)
PROBLEMS = 512
FORMS = {
    "own form, exact": Demonstrator(),
    "own form, a fifth of the digits random": Demonstrator(noise=0.2),
    "without the first number, exact": Demonstrator(copies=False),
    "without the first number, a fifth of the digits random": Demonstrator(copies=False, noise=0.2),
    "from the last number, exact": Demonstrator(order="backward"),
}


@torch.no_grad()
def logprobs(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> list[float]:
    """The logprob of each token of a response, and of the end behind it."""
    before, after = tokenizer.encode(prompt), [*tokenizer.encode(response), tokenizer.eos_token_id]
    logits = lm(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None])[:, 0].tolist()


def measured(folder: Path, share: float, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """For each form the mean logprob and the mean probability of a token under one base model."""
    base = ToyBase(scratchpad_share=share, task=Task(transfer=True))
    for form, demonstrator in FORMS.items():
        place = folder / form / f"{share}-{seed}"
        prepare(place, seed, base, demonstrator, PROBLEMS)
        lm: Any = AutoModelForCausalLM.from_pretrained(place / "model")
        tokenizer = AutoTokenizer.from_pretrained(place / "model")
        rows = [json.loads(line) for line in (place / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        found = [value for row in rows for value in logprobs(lm, tokenizer, row["prompt"], row["demonstration"])]
        yield form, {"logprob": fmean(found), "p": torch.tensor(found).exp().mean().item()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all forms, and write the numbers."""
    parser = argparse.ArgumentParser(description="Score demonstrations of each form with base models.")
    parser.add_argument("folder", type=Path, help="for the base models and their data")
    args = parser.parse_args(argv)
    rows = [
        {"form": form, "share": share, "seed": seed} | numbers
        for share in SHARES
        for seed in SEEDS
        for form, numbers in measured(args.folder, share, seed)
    ]
    write_text(FAMILIARITY, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
