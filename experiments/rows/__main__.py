"""python -m experiments.rows FILE [--model FOLDER]: what filters of the backward pass leave, on a real head.

Trains a language model on FILE (JSON lines of question and answer, as openai/gsm8k's train.jsonl) unless FOLDER has it,
samples groups from it, and prints Markdown tables: what `grad_filter` (rows) and filters of blocks leave, cut
cross-entropy's among them; what operands of 8 bits do to the gradients; the time that `grad_filter` saves.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

from rlplus.bench.output import lines
from rlplus.loss import linear_policy_loss

from .filtered import CCE, Samples, blocks_kept, cce_kept, draw, left, rows_kept, whole_gradient
from .language_model import HELD_OUT, Size, make, problems
from .rounded import ROUNDINGS, errors

SHARES = (0.0, 2.0**-12, 2.0**-10, 2.0**-8)
ROUNDS = 5


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def power(share: float) -> str:
    return "0" if share == 0 else f"2^{torch.tensor(share).log2().item():.0f}"


def cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def over_bare(samples: Samples, backend: str) -> list[float]:
    """CPU time of loss and gradients over three bare GEMMs, for each of SHARES; all in each round, in turn."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (samples.hidden, samples.weight))
    token_weight = torch.full((len(hidden),), 1 / len(hidden))

    def bare() -> None:
        with torch.no_grad():
            z = hidden @ weight.T
            torch.mm(z, weight)
            torch.mm(z.T, hidden)

    def ours(share: float) -> None:
        hidden.grad = weight.grad = None
        linear_policy_loss(
            hidden, weight, samples.target, old_logprob=None, advantage=samples.advantage, token_weight=token_weight,
            objective="grpo", grad_filter=share, backend=backend,
        ).loss.backward()  # fmt: skip

    steps: list[Callable[[], None]] = [bare, *(partial(ours, share) for share in SHARES)]
    times = [[cpu_seconds(step) for step in steps] for _ in range(ROUNDS + 1)][1:]
    return [median(row[i] / row[0] for row in times) for i in range(1, len(steps))]


def facts(samples: Samples, logprobs: Tensor) -> str:
    entropy = -(logprobs.exp() * logprobs).sum(1)
    sure = 1 - logprobs.gather(1, samples.target[:, None])[:, 0].exp()
    N, H = samples.hidden.shape
    shares = (f"below {bound:g} in {(sure < bound).double().mean():.0%} of the rows" for bound in (1e-2, 1e-4))
    return (
        f"{N} rows, H = {H}, V = {len(samples.weight)}; entropy {entropy.mean():.2f} nats, "
        f"median {entropy.median():.2f}; 1 - p {', '.join(shares)}"
    )


def filter_rows(samples: Samples, logprobs: Tensor) -> Iterator[tuple[str, ...]]:
    yield ("filter", "rows left", "of rows x V left", "mass dropped", "dhidden error", "dweight error")
    gradient = whole_gradient(samples, logprobs)
    frequent = torch.arange(gradient.shape[1])  # BPE numbers its tokens about in the order of frequency
    likely = (samples.hidden.mean(0) @ samples.weight.T).argsort(descending=True)

    def row(name: str, keep: Tensor) -> tuple[str, ...]:
        found = left(samples, gradient, keep)
        values = [getattr(found, field.name) for field in fields(found)]
        return (name, *(f"{x:.2f}" for x in values[:2]), f"{1 - values[2]:.1e}", *(f"{x:.1e}" for x in values[3:]))

    for share in SHARES[1:]:
        yield row(f"rows, {power(share)}", rows_kept(samples, logprobs, share)[:, None])
        half = rows_kept(samples, logprobs, share / 2)
        yield row(f"half rows, half blocks, {power(share)}", blocks_kept(gradient, half, share / 2, frequent))
    yield row(f"entries below {power(CCE)} by blocks, sorted by mean logit (CCE)", cce_kept(samples, logprobs, likely))


def rounded_rows(samples: Samples, logprobs: Tensor) -> Iterator[tuple[str, ...]]:
    yield ("operands of the two backward GEMMs", "dhidden error", "dweight error")
    for name, dtypes in ROUNDINGS.items():
        yield (name, *(f"{x:.1e}" for x in errors(samples, logprobs, dtypes)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.rows", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON lines of question and answer")
    parser.add_argument("--model", type=Path, default=Path("runs/rows"), metavar="FOLDER", help="kept between calls")
    parser.add_argument("--questions", type=int, default=6, help="groups that are sampled (default 6)")
    parser.add_argument("--length", type=int, default=160, help="tokens of a response (default 160)")
    parser.add_argument("--backend", default="auto", help="of the timed loss (default auto)")
    for name in ("vocabulary", "hidden", "layers", "epochs"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size(), name))
    options = parser.parse_args(arguments)
    if not 0 < options.questions <= HELD_OUT:
        parser.error(f"argument --questions: want 1 to {HELD_OUT}; got {options.questions}")
    asked = [question for question, _ in problems(options.file)[-HELD_OUT:]][: options.questions]
    if not (options.model / "config.json").is_file():
        size = Size(options.vocabulary, options.hidden, options.layers, epochs=options.epochs)
        make(options.model, options.file, size, seed=0, say=say)
    model = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    samples = draw(model, AutoTokenizer.from_pretrained(options.model), asked, 8, options.length, seed=1)
    logprobs = samples.logprobs()
    say(facts(samples, logprobs) + "\n")
    for table in (filter_rows, rounded_rows):
        header, *rest = table(samples, logprobs)
        say(lines(header, rest) + "\n")
    del logprobs
    ratios = over_bare(samples, options.backend)
    shares = zip(map(power, SHARES), (f"{x:.2f}" for x in ratios), strict=True)
    say(lines(("grad_filter", "CPU time over three bare GEMMs, fp32"), shares))


if __name__ == "__main__":
    main()
