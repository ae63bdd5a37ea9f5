"""The base model of the word problems: a Qwen3 of 1.3 million parameters, trained on problems and solutions alone.

First every solution is worked and right, until the model can do the arithmetic. Then most problems have a bare answer,
as on pages that leave the working out, and the few worked ones have slips: the model can solve the problems step by
step, and seldom does.
"""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from experiments.toy.base_model import NOTE, is_there, make_model
from experiments.words.word_problems import ANSWER, FEWEST_STEPS, MOST_STEPS, Problem, draw, make_tokenizer
from rlplus.common.durable import write_text
from rlplus.train.learner.pretrained import write_model

POSITIONS = 256
WARMUP = 100  # steps


@dataclass(frozen=True)
class WordsBase:
    """The dials of a base model.

    worked_share: the share of worked solutions in the second phase; slip: the share of their steps whose result is
    redrawn. Those behind a slip may be wrong, too, as divisions of a wrong number are rounded down.
    """

    seed: int = 0
    hidden: int = 160  # width; its MLPs have three times as much
    layers: int = 4
    batch: int = 32
    lr: float = 2e-3
    clean_steps: int = 2000
    careless_steps: int = 400
    worked_share: float = 0.15
    slip: float = 0.1

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for name in ("worked_share", "slip"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"want {name} a probability; got {getattr(self, name)}")
        for name in ("hidden", "layers", "batch", "lr", "clean_steps", "careless_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"want {name} above 0; got {getattr(self, name)}")


def make_base(folder: Path, base: WordsBase, held_out: Collection[str], others: Sequence[Path] = ()) -> bool:
    """Create the model and its tokenizer in `folder` (Hugging Face format), without training on the prompts held out.

    others: folders of models with the same `held_out`, to copy if one is the same base. -> whether it was trained.
    """
    note = json.dumps(asdict(base), indent=1) + "\n"
    if is_there(folder, others, note):
        return False
    tokenizer = make_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(base.seed)
        model = make_model(tokenizer, base.hidden, base.layers, POSITIONS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train_base(model, tokenizer, base, held_out)
    finally:
        torch.set_num_threads(threads)
    write_model(model, str(folder))
    tokenizer.save_pretrained(folder)
    write_text(folder / NOTE, note)  # last: a folder without it is incomplete
    return True


def train_base(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, base: WordsBase, held_out: Collection[str]
) -> None:
    """Plain torch. The learning rate falls to zero over both phases."""
    rng, total = random.Random(f"base {base.seed}"), base.clean_steps + base.careless_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=base.lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(total):
        clean = step < base.clean_steps
        problems = [draw(rng, rng.randint(FEWEST_STEPS, MOST_STEPS), held_out) for _ in range(base.batch)]
        texts = [(p.prompt, p.worked() if clean else careless(p, base, rng)) for p in problems]
        for group in optimizer.param_groups:
            group["lr"] = base.lr * min((step + 1) / WARMUP, 1 - step / total)
        optimizer.zero_grad()
        text_loss(model, tokenizer, texts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def careless(problem: Problem, base: WordsBase, rng: random.Random) -> str:
    """A solution of the second phase."""
    return problem.worked(rng, base.slip) if rng.random() < base.worked_share else f"{ANSWER}{problem.answer}"


def text_loss(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str]]) -> Tensor:
    """Mean negative logprob of all tokens of prompts and solutions but the first, and of the end."""
    prompts, solutions = ([pair[side] for pair in texts] for side in (0, 1))
    end = [tokenizer.eos_token_id]
    pairs = zip(tokenizer(prompts).input_ids, tokenizer(solutions).input_ids, strict=True)
    rows = [torch.tensor([*prompt, *solution, *end]) for prompt, solution in pairs]
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    logits = model(labels.clamp_min(0)).logits[:, :-1]  # causal, padding last: no attention mask is needed
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
