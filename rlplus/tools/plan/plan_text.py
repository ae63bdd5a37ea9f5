"""Plans of memory and data on the terminal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

from rlplus.tools.plan import MOMENTS, Plan, show_bytes
from rlplus.tools.plan.speed import ASSUMPTIONS
from rlplus.tools.report.foreign_demonstrations import found_at

if TYPE_CHECKING:
    from rlplus.tools.plan.data_report import DataPlan, Rendered

LABELS = {
    "generate": "generate",
    "head": "end of forward",
    "backward": "backward",
    "optimizer": "optimizer",
}

LONGEST_TEXT = 3000  # characters of a text that is shown whole


def show(plan: Plan, console: Console, *, data_refused: bool = False) -> None:
    """Print the tables of memory and time, and if the run does not fit, the problems and remedies."""
    console.print(*_lines(plan, data_refused), sep="\n")


def _lines(plan: Plan, data_refused: bool) -> Iterator[RenderableType]:
    rows, length = plan.micro_batch
    size = f"{plan.parameters / 1e9:.3g} billion" if plan.parameters >= 1e9 else f"{plan.parameters:,}"
    engines = plan.cluster.gpus - plan.ranks
    gpus = f"{plan.cluster.name} ({plan.ranks} train, {engines} generate)" if engines else plan.cluster.name
    yield f"{gpus}, {size} parameters, micro-batches of {rows} x {length} tokens"
    if plan.note:
        yield plan.note
    if not plan.cluster.cpu and plan.cluster.gpu.flops is None:
        yield f"The speed of a {plan.cluster.gpu.name} is not known: no time is estimated."
    if plan.mode == "server":
        yield "Not counted: the GPUs of the server, which generates."
    yield _memory_table(plan)
    if engine := plan.memory.engine:
        parts = ", ".join(f"{name} {show_bytes(part)}" for name, part in engine.items())
        total = show_bytes(sum(engine.values()))
        capacity = show_bytes(plan.memory.capacity)
        yield f"A GPU that generates: {total} of {capacity} ({parts})"
    if plan.memory.host:
        yield f"and {show_bytes(plan.memory.host)} of each node's memory"
    disk = show_bytes(plan.checkpoints * plan.checkpoint)
    yield f"A checkpoint takes {show_bytes(plan.checkpoint)} of the disk; up to {plan.checkpoints} at a time, {disk}."
    if plan.sequences:
        yield f"The cache holds {plan.sequences} sequences of full length at a time."
    if plan.seconds:
        yield _time_table(plan)
        if plan.mode == "server":
            yield "Not in it: generation."
        elif plan.overlap:
            yield "Generation goes on beside the training (train.overlap)."
        yield f"Assumed: {', '.join(ASSUMPTIONS)}."
    if plan.fits:
        yield "It would fit, but a run would refuse its data: see above." if data_refused else "It fits."
        return
    yield from ("It does not fit:", *(f"  {problem}" for problem in plan.memory.problems))
    if not plan.remedies:
        yield "No switches make it fit, not even all together and on more GPUs."
        return
    yield "It would fit with:"
    for remedy in plan.remedies:
        gpus = f"{remedy.gpus} GPUs and " if remedy.gpus != plan.cluster.gpus else ""
        host = f", {show_bytes(remedy.host)} of each node's memory" if remedy.host else ""
        seconds = f", {remedy.seconds:.0f} s a step" if remedy.seconds else ""
        yield f"  {gpus}{' '.join(remedy.overrides)}   ({show_bytes(remedy.peak)}{host}{seconds})"


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    table = Table("memory of a GPU", *(LABELS[m] for m in MOMENTS))
    for column in table.columns[1:]:
        column.justify = "right"
    names = dict.fromkeys(name for moment in MOMENTS for name in memory.parts[moment])
    for name in names:
        sizes = (memory.parts[moment].get(name) for moment in MOMENTS)
        table.add_row(name, *("" if size is None else show_bytes(size) for size in sizes))
    table.add_section()
    table.add_row(f"together, of {show_bytes(memory.capacity)}", *(show_bytes(memory.total(m)) for m in MOMENTS))
    return table


def _time_table(plan: Plan) -> Table:
    table = Table("time of a step", "seconds")
    table.columns[1].justify = "right"
    for phase, seconds in plan.seconds.items():
        if phase == "total":
            table.add_section()
        table.add_row(phase, f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}")
    if plan.steps is not None:
        table.add_row(f"{plan.steps} steps, hours", f"{plan.steps * plan.seconds['total'] / 3600:.1f}")
    return table


def show_data(plan: "DataPlan", console: Console) -> None:
    """The counts and lengths of the data, some prompts as the model will see them, and what a run would refuse."""
    console.print(*_data_lines(plan), sep="\n")


def _data_lines(plan: "DataPlan") -> Iterator[RenderableType]:
    yield from plan.summaries
    columns = ("count", "smallest", "median", "95 %", "largest", "limit")
    table = Table("lengths in tokens", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, lengths in plan.lengths.items():
        values = (lengths.count, lengths.smallest, lengths.median, lengths.p95, lengths.largest, lengths.limit)
        table.add_row(name, *(f"{value:,}" for value in values))
    yield table
    if (shown := plan.likelihood) is not None:
        counts = f"{shown.demonstrations} of {shown.of} demonstrations, {shown.tokens:,} tokens"
        means = f"mean logprob {shown.logprob:.2f} nats a token, mean probability {shown.p:.2f}"
        yield f"The model's {means} ({counts}). {found_at(shown.p)}"
    for rendered in plan.rendered:
        yield from _rendered_lines(rendered)
    if plan.refusals:
        yield from ("A run would refuse these data:", *(f"  {refusal}" for refusal in plan.refusals))
    else:
        yield f"A run would draw from {plan.prompts:,} prompts."


def _rendered_lines(rendered: "Rendered") -> Iterator[str]:
    yield f"Row {rendered.row + 1}, prompt of {rendered.prompt_tokens} tokens, answer {rendered.answer!r}:"
    yield _indented(rendered.prompt)
    if rendered.demonstration is None:
        yield "No demonstration."
        return
    verdict = rendered.verdict
    if verdict is None:
        graded = "which this preset does not use"
    elif isinstance(verdict, str):
        graded = f"dropped by the run's own reward: {'wrong' if verdict == 'ok' else verdict}"
    else:
        graded = f"reward {verdict:g}"
    yield f"Its demonstration of {rendered.demonstration_tokens} tokens, {graded}:"
    yield _indented(rendered.demonstration)


def _indented(text: str) -> str:
    if (left_out := len(text) - LONGEST_TEXT) > 0:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n[{left_out:,} characters are left out here; --json has them]\n{text[-half:]}"
    return "".join(f"  {line}" for line in text.splitlines(keepends=True))
