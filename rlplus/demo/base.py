"""The base model of the demo: a tiny Qwen3 that answers short problems and hardly ever uses a scratchpad.

It is trained in two phases. First it learns the scratchpad on hard problems, from correct examples, until it masters
it. Then a mixture of sloppy data makes scratchpads rare and careless, teaches direct answers to easy problems, and only
guesses as direct answers to hard ones: the skill exists, but sampling seldom shows it.
"""

import json
import random
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from pydantic import ConfigDict
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from rlplus.common.durable import write_text
from rlplus.demo.task import ANSWER, EASY, Problem, Task, blur, make_tokenizer, scratchpad
from rlplus.learner.pretrained import write_model
from rlplus.rollout import RunFailed

NOTE = "recipe.json"  # in a finished base model's folder
WINDOW = 8  # batches of hard problems over which the loss of phase 1 is averaged


@dataclass(frozen=True)
class Recipe:
    """The recipe of a base model. Shares and slips are probabilities; a slip redraws one digit."""

    seed: int
    task: Task = field(default_factory=Task)
    hidden: int = 64  # width; its MLPs have three times as much
    batch: int = 64
    lr: float = 3e-3
    learnt_loss: float = 0.06  # nats a token: phase 1 is done
    max_clean_steps: int = 1000
    sloppy_steps: int = 450
    first_share: float = 0.7  # of scratchpads, at the start of phase 2 ...
    scratchpad_share: float = 0.15  # ... falling to this share, the base's own, over the first `falling` of phase 2
    falling: float = 0.6
    scratchpad_slip: float = 0.15
    answer_slip: float = 0.05

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for name in ("first_share", "scratchpad_share", "scratchpad_slip", "answer_slip"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"want {name} a probability; got {getattr(self, name)}")
        for name in ("hidden", "batch", "lr", "max_clean_steps", "sloppy_steps", "falling"):
            if not getattr(self, name) > 0:
                raise ValueError(f"want {name} above 0; got {getattr(self, name)}")


def make_base(folder: Path, recipe: Recipe, held_out: Collection[Problem], console: Console) -> bool:
    """Create the model and its tokenizer in `folder` (Hugging Face format), without training on `held_out` problems.

    Returns False if `folder` already has the base of this recipe, which is then kept. Raises RunFailed if the skill was
    not learned within `max_clean_steps`.
    """
    if is_made(folder, recipe):
        return False
    tokenizer = make_tokenizer(recipe.task)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = make_model(tokenizer, recipe.hidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one is not faster at this size, and much slower on busy cores
    try:
        train_base(model, tokenizer, recipe, held_out, console)
    finally:
        torch.set_num_threads(threads)
    shutil.rmtree(folder, ignore_errors=True)
    write_model(model, str(folder))
    tokenizer.save_pretrained(folder)
    write_text(folder / NOTE, _describe(recipe))  # last: a folder without it is incomplete
    return True


def is_made(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder has the finished base model of this recipe."""
    note = folder / NOTE
    return note.is_file() and note.read_text(encoding="utf-8") == _describe(recipe)


def _describe(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe), indent=1) + "\n"


def make_model(tokenizer: PreTrainedTokenizerBase, hidden: int = 64) -> Qwen3ForCausalLM:
    """Random weights, 140,000 at width 64.

    Qwen3, because vLLM on CPUs needs heads of width 32, and Qwen2's are hidden / heads.
    """
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=128,
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
    recipe: Recipe,
    held_out: Collection[Problem],
    console: Console,
) -> None:
    """Supervised training in plain torch; a batch has problems of one kind."""
    rng, task = random.Random(recipe.seed), recipe.task
    hard = [kind for kind in task.kinds if kind[1] > EASY]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    columns = (TextColumn("[bold]base model[/] {task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())

    def step(problems: list[Problem], responses: list[str], share_of_lr: float) -> float:
        loss = response_loss(model, tokenizer, problems, responses)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * share_of_lr
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("learns the scratchpad", total=None)
        losses: list[float] = []
        while len(losses) < WINDOW or fmean(losses[-WINDOW:]) > recipe.learnt_loss:
            if len(losses) == recipe.max_clean_steps:
                raise RunFailed(
                    f"the base model of seed {recipe.seed} did not learn the scratchpad in {len(losses)} steps "
                    f"(loss {fmean(losses[-WINDOW:]):.3f}, want {recipe.learnt_loss}): take another seed"
                )
            kind = hard[len(losses) % len(hard)]
            problems = [task.draw(rng, kind, held_out) for _ in range(recipe.batch)]
            losses.append(step(problems, [p.demonstration for p in problems], min(1.0, (len(losses) + 1) / 50)))
        clean = f"the scratchpad learnt in {len(losses)} steps"
        progress.reset(bar, description="becomes careless", total=recipe.sloppy_steps)
        for done in range(recipe.sloppy_steps):
            kind = task.kinds[done % len(task.kinds)]
            problems = [task.draw(rng, kind, held_out) for _ in range(recipe.batch)]
            left = max(0.0, 1 - done / (recipe.falling * recipe.sloppy_steps))
            share = recipe.scratchpad_share + left * (recipe.first_share - recipe.scratchpad_share)
            responses = [_sloppy(problem, share, recipe, rng) for problem in problems]
            step(problems, responses, max(0.05, 1 - done / recipe.sloppy_steps))
            progress.advance(bar)
    console.print(f"base model: {clean}, then {recipe.sloppy_steps} careless ones")


def _sloppy(problem: Problem, share: float, recipe: Recipe, rng: random.Random) -> str:
    """The response that phase 2 teaches; `share` of them are scratchpads."""
    if rng.random() < share:
        return scratchpad(problem.running_sums(rng, recipe.scratchpad_slip))
    return ANSWER + blur(problem.answer, rng, 1.0 if problem.hard else recipe.answer_slip)


def response_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], responses: Sequence[str]
) -> Tensor:
    """Mean negative logprob of the tokens of the responses, end tokens included."""
    prompts = tokenizer([problem.prompt for problem in problems]).input_ids
    rows = []
    for prompt, response in zip(prompts, tokenizer(list(responses)).input_ids, strict=True):
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
