"""Kept samples in the terminal."""

import logging
from math import exp, inf
from pathlib import Path

from rich.text import Text

from rlplus.data import KeptSample, kept_steps, read_kept
from rlplus.errors import printable
from rlplus.terminal import Terminal

UNLIKELY, SURPRISING = 0.5, 0.1  # probabilities below which a token is set apart

logger = logging.getLogger(__name__)


def show_samples(folder: Path, most: int, terminal: Terminal, step: int | None = None) -> None:
    """Print the newest samples in a run's `samples/`, so many at most, and the tokens that were unlikely.

    Those of the finished model's evaluation are newer than all steps. step: print those of the kept step nearest to it
    instead. Damaged files are left out with a warning. ValueError where there is nothing to print.
    """
    steps = kept_steps(folder)
    files = sorted(folder.glob("*.parquet"), key=lambda path: (-steps.get(path, inf), path.stem))
    if step is not None:
        nearest = min(steps.values(), key=lambda kept: abs(kept - step), default=None)
        files = [path for path in files if steps.get(path) == nearest is not None]
    if not files:
        raise ValueError(f"want a run that kept samples, as log.samples_every says; {folder} has none")
    left = most
    for path in files:
        try:
            samples = read_kept(path, left)
        except ValueError as error:
            logger.warning("these samples are left out: %s", error)
            continue
        for sample in samples:
            terminal.print(f"{sample.heading}", style="bold")
            terminal.print(sample.prompt, style="dim")
            terminal.print(coloured(sample), "")
            left -= 1
        if not left:
            break
    if left == most:
        raise ValueError(f"want samples that can be read; got {len(files)} damaged or empty files in {folder}")
    terminal.print(f"yellow: p < {UNLIKELY:g}, red: p < {SURPRISING:g}", style="dim")


def coloured(sample: KeptSample) -> Text:
    """The response, unlikely tokens in colour; nothing in it commands the terminal."""
    text = Text()
    for token, logprob in zip(sample.tokens, sample.logprob, strict=True):
        p = exp(min(0.0, logprob))
        text.append(printable(token), "red" if p < SURPRISING else "yellow" if p < UNLIKELY else "")
    return text
