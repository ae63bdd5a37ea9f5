"""Kept samples in the terminal."""

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import exp, inf
from pathlib import Path

from rich.text import Text

from rlplus.common.errors import printable
from rlplus.common.terminal import Terminal
from rlplus.tools.report.shaded_samples import shortened
from rlplus.train.data import KeptSample, iter_kept, kept_steps

# Probabilities below which a token is set apart.
UNLIKELY = 0.5
SURPRISING = 0.1

logger = logging.getLogger(__name__)


def show_samples(folder: Path, most: int, terminal: Terminal, step: int | None = None, *, wrong: bool = False) -> None:
    """Print samples of up to `most` of the newest problems in a run's `samples/`, and their least likely tokens.

    The finished model's evaluation is newer than all steps. step: print the kept step nearest to it instead. wrong:
    only problems with a wrong response, and that response. Damaged files are left out with a warning. ValueError where
    there is nothing to print.
    """
    steps = kept_steps(folder)
    files = sorted(folder.glob("*.parquet"), key=lambda path: (-steps.get(path, inf), path.stem))
    if step is not None:
        nearest = min(steps.values(), key=lambda kept: abs(kept - step), default=None)
        files = [path for path in files if steps.get(path) == nearest is not None]
    left = most
    readable = False
    for path in files:
        try:
            for group in _problems(path):
                readable = True
                if shown := _chosen(group, wrong):
                    _print(group, shown, terminal)
                    left -= 1
                if not left:
                    break
        except ValueError as error:
            logger.warning("these samples are left out: %s", error)
        if not left:
            break
    if not readable:
        raise ValueError(f"want samples that can be read; got {len(files)} damaged or empty files in {folder}")
    if left == most:
        terminal.print(f"no wrong response among those in {folder}{'' if step is None else f' of step {nearest}'}")
    else:
        terminal.print(f"yellow: p < {UNLIKELY:g}, red: p < {SURPRISING:g}", style="dim")


def _problems(path: Path) -> Iterator[list[KeptSample]]:
    """The samples of each problem in a file, in the order of their first ones.

    An evaluation's lie together, and are read as far as needed; a step's file has ungraded ones at its end.
    """
    samples = iter_kept(path)
    if path.stem.count("-") == 1:
        places: dict[tuple[int, str], int] = {}
        samples = iter(sorted(samples, key=lambda one: places.setdefault(_problem(one), len(places))))
    for _, group in groupby(samples, key=_problem):
        yield list(group)


def _problem(sample: KeptSample) -> tuple[int, str]:
    return sample.problem, sample.prompt


def _chosen(group: Sequence[KeptSample], wrong: bool) -> list[KeptSample]:
    """The demonstrations, a right and a wrong response, or an ungraded one where no other is; wrong: that one only."""
    responses: dict[bool | None, KeptSample] = {}
    for one in group:
        if not one.demonstration:
            responses.setdefault(one.right, one)
    if wrong:
        return [responses[False]] if False in responses else []
    graded = [responses[right] for right in (True, False) if right in responses]
    return [one for one in group if one.demonstration] + (graded or list(responses.values()))


def _print(group: Sequence[KeptSample], shown: Sequence[KeptSample], terminal: Terminal) -> None:
    first = group[0]
    responses = [one for one in group if not one.demonstration]
    place = [] if first.step is None else [f"step {first.step}"]
    place += [first.benchmark] if first.benchmark else []
    count = f"right {sum(one.right is True for one in responses)} of {len(responses)}" if responses else ""
    if ungraded := sum(one.right is None for one in responses):
        count += f", not graded {ungraded}"
    terminal.print(", ".join(filter(None, (*place, first.row, count))), style="bold")
    terminal.print(first.prompt, style="dim")
    if first.answer:
        terminal.print(f"expected: {shortened(first.answer)}", style="bold")
    for sample in shown:
        graded = "" if sample.demonstration else f"; graded: {sample.graded}"
        terminal.print(f"{sample.facts}{graded}", style="bold")
        terminal.print(coloured(sample), "")


def coloured(sample: KeptSample) -> Text:
    """The response, unlikely tokens in colour; nothing in it commands the terminal."""
    text = Text()
    for token, logprob in zip(sample.tokens, sample.logprob, strict=True):
        p = exp(min(0.0, logprob))
        text.append(printable(token), "red" if p < SURPRISING else "yellow" if p < UNLIKELY else "")
    return text
