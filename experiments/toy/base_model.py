"""The base model of the demo: a tiny Qwen3 that answers short problems and hardly ever uses a scratchpad.

It is trained in two phases. First it learns the scratchpad on hard problems, from correct examples, until it masters
it. Then a mixture of sloppy data makes scratchpads rare and careless, teaches direct answers to easy problems, and only
guesses as direct answers to hard ones: the skill exists, but sampling seldom shows it. In both it can also learn to
repeat a response that stands before its problem, right or wrong, as a teacher that is shown one has to.
"""

import json
import random
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from operator import add
from pathlib import Path
from statistics import fmean

import torch
from pydantic import ConfigDict
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from experiments.toy.task import ANSWER, EASY, Problem, Task, blur, make_tokenizer, scratchpad
from rlplus.common.durable import write_text
from rlplus.common.textfiles import read_text
from rlplus.train.learner.pretrained import write_model
from rlplus.train.rollout import RunFailed

NOTE = "base.json"  # marks the folder of a finished base model
MOST_READ = 7  # numbers of a problem that fits the positions with a response before and behind it
WINDOW = 8  # batches of hard problems over which the loss of phase 1 is averaged


@dataclass(frozen=True)
class ToyBase:
    """The dials of a base model. Shares and slips are probabilities; a slip redraws one digit."""

    task: Task = field(default_factory=Task)
    hidden: int = 64  # width; its MLPs have three times as much
    batch: int = 64
    lr: float = 3e-3
    learnt_loss: float = 0.06  # nats per token: phase 1 is done
    max_clean_steps: int = 1000
    sloppy_steps: int = 450
    first_share: float = 0.7  # share of scratchpads at the start of phase 2 ...
    scratchpad_share: float = 0.15  # ... falling to this share, the base's own, over the first `falling` of phase 2
    falling: float = 0.6
    scratchpad_slip: float = 0.15
    answer_slip: float = 0.05
    reads: bool = False  # whether it also learns to repeat a response that stands before its problem

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for name in ("first_share", "scratchpad_share", "scratchpad_slip", "answer_slip"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"want {name} a probability; got {getattr(self, name)}")
        for name in ("hidden", "batch", "lr", "max_clean_steps", "sloppy_steps", "falling"):
            if not getattr(self, name) > 0:
                raise ValueError(f"want {name} above 0; got {getattr(self, name)}")
        if self.reads and self.task.hard > MOST_READ:
            raise ValueError(f"want at most {MOST_READ} numbers with reads; got {self.task.hard}")


def make_base(
    folder: Path,
    base: ToyBase,
    seed: int,
    held_out: Collection[Problem],
    console: Console,
    others: Sequence[Path] = (),
) -> bool:
    """Create the model and its tokenizer in `folder` (Hugging Face format), without training on `held_out` problems.

    others: folders of models with the same `held_out`, to copy if one is the same base. Returns False if `folder` or
    one of them already has it. Raises RunFailed if the skill was not learned within `max_clean_steps`.
    """
    note = json.dumps({"seed": seed} | asdict(base), indent=1) + "\n"
    if is_there(folder, others, note):
        return False
    tokenizer = make_tokenizer(base.task)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model(tokenizer, base.hidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one is not faster at this size, and much slower on busy cores
    try:
        train_base(model, tokenizer, base, seed, held_out, console)
    finally:
        torch.set_num_threads(threads)
    shutil.rmtree(folder, ignore_errors=True)
    write_model(model, str(folder))
    tokenizer.save_pretrained(folder)
    write_text(folder / NOTE, note)  # last: a folder without it is incomplete
    return True


def is_there(folder: Path, others: Sequence[Path], note: str) -> bool:
    """Whether the folder has the model of this note, if need be by a copy of another folder."""
    for made in (folder, *others):
        if (made / NOTE).is_file() and read_text(made / NOTE) == note:
            if made != folder:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(made, folder, ignore=shutil.ignore_patterns(NOTE))
                write_text(folder / NOTE, note)
            return True
    return False


def make_model(
    tokenizer: PreTrainedTokenizerBase, hidden: int = 64, layers: int = 2, positions: int = 128
) -> Qwen3ForCausalLM:
    """Random weights, 140,000 at width 64.

    Qwen3, because vLLM on CPUs needs heads of width 32, and Qwen2's are hidden / heads.
    """
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=positions,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # short texts: no slow waves needed
            tie_word_embeddings=True,
            initializer_range=0.12,  # the usual 0.02 learns nothing in this time
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def train_base(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    base: ToyBase,
    seed: int,
    held_out: Collection[Problem],
    console: Console,
) -> None:
    """Supervised training in plain torch; a batch has problems of one kind."""
    rng, reader, task = random.Random(seed), random.Random(f"reads {seed}"), base.task
    hard = [kind for kind in task.kinds if kind[1] > EASY]
    optimizer = torch.optim.AdamW(model.parameters(), lr=base.lr, betas=(0.9, 0.98), weight_decay=0.01)
    columns = (TextColumn("[bold]base model[/] {task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())

    def step(problems: list[Problem], responses: list[str], share_of_lr: float) -> float:
        prompts = [problem.prompt for problem in problems]
        loss = total = response_loss(model, tokenizer, prompts, responses)
        if base.reads:
            shown = [_to_be_read(problem, reader) for problem in problems]
            total = loss + response_loss(model, tokenizer, [*map(add, shown, prompts)], shown)
        for group in optimizer.param_groups:
            group["lr"] = base.lr * share_of_lr
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("learns the scratchpad", total=None)
        losses: list[float] = []
        while len(losses) < WINDOW or fmean(losses[-WINDOW:]) > base.learnt_loss:
            if len(losses) == base.max_clean_steps:
                raise RunFailed(
                    f"the base model of seed {seed} did not learn the scratchpad in {len(losses)} steps "
                    f"(loss {fmean(losses[-WINDOW:]):.3f}, want {base.learnt_loss}): take another seed"
                )
            kind = hard[len(losses) % len(hard)]
            problems = [task.draw(rng, kind, held_out) for _ in range(base.batch)]
            losses.append(step(problems, [p.demonstration for p in problems], min(1.0, (len(losses) + 1) / 50)))
        clean = f"the scratchpad learnt in {len(losses)} steps"
        progress.reset(bar, description="becomes careless", total=base.sloppy_steps)
        for done in range(base.sloppy_steps):
            kind = task.kinds[done % len(task.kinds)]
            problems = [task.draw(rng, kind, held_out) for _ in range(base.batch)]
            left = max(0.0, 1 - done / (base.falling * base.sloppy_steps))
            share = base.scratchpad_share + left * (base.first_share - base.scratchpad_share)
            responses = [_sloppy(problem, share, base, rng) for problem in problems]
            step(problems, responses, max(0.05, 1 - done / base.sloppy_steps))
            progress.advance(bar)
    console.print(f"base model: {clean}, then {base.sloppy_steps} careless ones")


def _sloppy(problem: Problem, share: float, base: ToyBase, rng: random.Random) -> str:
    """The response that phase 2 teaches; `share` of them are scratchpads."""
    if rng.random() < share:
        return scratchpad(problem.running_sums(rng, base.scratchpad_slip))
    return ANSWER + blur(problem.answer, rng, 1.0 if problem.hard else base.answer_slip)


def _to_be_read(problem: Problem, rng: random.Random) -> str:
    """A response, half of whose digits are drawn anew, so that it cannot be had from the problem."""
    sums = [blur(each, rng, 0.5) for each in problem.running_sums()]
    return scratchpad(sums) if rng.random() < 0.5 else ANSWER + sums[-1]


def response_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], responses: Sequence[str]
) -> Tensor:
    """Mean negative logprob of the tokens of the responses, end tokens included."""
    rows = []
    for prompt, response in zip(tokenizer(list(prompts)).input_ids, tokenizer(list(responses)).input_ids, strict=True):
        rows.append((len(prompt), torch.tensor([*prompt, *response, tokenizer.eos_token_id])))
    rows.sort(key=lambda row: len(row[1]))
    total, count = torch.zeros(()), 0
    short = sum(len(row) == len(rows[0][1]) for _, row in rows)
    for part in filter(None, (rows[:short], rows[short:])):  # rows of one length each: scratchpads, direct answers
        input_ids = torch.nn.utils.rnn.pad_sequence([row for _, row in part], batch_first=True)
        labels = input_ids.clone()
        for label, (start, row) in zip(labels, part, strict=True):
            label[:start] = label[len(row) :] = -100
        logits = model(input_ids).logits[:, :-1].flatten(0, 1)  # causal, padding last: no attention mask is needed
        target = labels[:, 1:].flatten()
        total = total + torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
        count += int((target != -100).sum())
    return total / count
