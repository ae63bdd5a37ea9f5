"""A verification on the terminal."""

from rich.console import Console
from rich.table import Table

from rlplus.verify import Verification


def show(verification: Verification, console: Console) -> None:
    """Print the table of errors, what was not compared, and the verdict."""
    compared, whole = verification.sequences
    table = Table("quantity", "error", "bound", "", "")
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in verification.rows:
        verdict = "" if row.right else "WRONG"
        table.add_row(row.quantity, _short(row.error), _short(row.bound), row.unit, verdict)
    console.print(table)
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
