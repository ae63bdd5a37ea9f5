"""The terminal: data, names and messages appear as text, never as markup or as commands to it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from rlplus.common.errors import printable

WIDE = 1000  # columns of a table in a file, at most


class Terminal(Console):
    """A rich console that prints strings as they are: no markup, no highlighting, no wrapping, no escapes.

    If the output is no terminal, tables are as wide as they need to be. If the reader is gone, as after Ctrl-C on
    `rlplus train … 2>&1 | tee log`, output is dropped; rich would exit.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)
        if not self.is_terminal:
            self.width = WIDE

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        stream = sys.stderr if self.stderr else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the last flush must not fail either


def duration(seconds: float) -> str:
    """The time in words: 45 s, 12 min, 3 h 20 min, 6 d 3 h."""
    minutes = round(seconds / 60)
    hours = round(seconds / 3600)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


@contextmanager
def counter(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show (done, total), the arguments of the yielded function, on stderr: a bar, or lines if that is no terminal.

    quiet: show nothing.
    """
    console = Terminal(stderr=True)
    console.quiet = quiet
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if not console.is_terminal:
                console.print(f"{title} {done} of {total}")

        yield show
