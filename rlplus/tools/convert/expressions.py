"""Arithmetic of constants that a script contains."""

import ast
import operator
from typing import Any

OPERATIONS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
LIMIT = 2**63  # larger numbers are no settings, and larger powers take time


class Unknown(ValueError):
    """A value that only running the script would tell."""


def number(value: Any) -> Any:
    """The value, if it is a number whose size is moderate; Unknown for others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LIMIT:
        raise Unknown
    return value


def calculate(operation: ast.operator, left: Any, right: Any) -> Any:
    """The result; Unknown for operands that are no numbers, other operations, and results that do not exist."""
    if type(operation) not in OPERATIONS or (isinstance(operation, ast.Pow) and abs(number(right)) > 64):
        raise Unknown
    try:
        return number(OPERATIONS[type(operation)](number(left), number(right)))
    except ArithmeticError as error:
        raise Unknown from error
