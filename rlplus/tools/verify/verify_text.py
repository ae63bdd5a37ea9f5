"""A verification on the terminal."""

from rich.console import Console
from rich.table import Table

from rlplus.tools.verify import Verification
from rlplus.tools.verify.errors_table import TOGETHER

SHOWN = 16  # gradients of parameters that are within their bounds


def show(verification: Verification, console: Console) -> None:
    """Print the table of errors, what was not compared, and the verdict.

    Beside the rows that are wrong it has the gradients that are nearest to their bounds.
    """
    compared, whole = verification.sequences
    table = Table("quantity", "error", "plain model", "bound", "", "")
    for column in table.columns[1:4]:
        column.justify = "right"
    gradients = [row for row in verification.rows if row.quantity.startswith("gradient of ")]
    hidden = [row for row in gradients if row.right and row.quantity != TOGETHER]
    near = sorted(hidden, key=lambda row: row.error / (row.bound or 1.0))
    left_out = near[:-SHOWN]
    for row in verification.rows:
        if row not in left_out:
            verdict = "" if row.right else "WRONG"
            own = "" if row.plain is None else _short(row.plain)
            table.add_row(row.quantity, _short(row.error), own, _short(row.bound), row.unit, verdict)
    console.print(table)
    if left_out:
        console.print(f"{len(left_out)} more parameters have gradients within their bounds, further from them.")
    console.print(f"The plain model's errors are what rounding to {verification.dtype} costs by itself.")
    for note in verification.notes:
        console.print(f"Not verified: {note}.")
    what = f"step {verification.step}, {compared} of the update's {whole} sequences"
    if wrong := verification.wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        console.print(f"{what}: WRONG, first the {wrong[0].quantity}{more}.")
    else:
        console.print(f"{what}: every quantity is within its bound.")


def _short(value: float) -> str:
    return f"{value:.2g}"
