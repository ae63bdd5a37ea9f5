r"""Whether an expression is a plain value, with no arithmetic left to do."""

from itertools import chain
from typing import Any

from sympy import Add, Integer, MatrixBase, Mul, Pow, Rational, UnevaluatedExpr, preorder_traversal

_PERCENT = UnevaluatedExpr(Rational(1, 100))  # Math-Verify's value for %


def is_plain(expression: Any) -> bool:
    r"""False where a part could be computed: `3+4`, `2 \cdot 5`, `2^{10}`, `5!`; also in a larger one, `x+3+4`.

    Numbers as they are written are plain: -5, 0.5, 2/4, 30 %, 3 \times 10^8; so are roots and constants, 3+2\sqrt{2}.
    """
    parts = expression.flat() if isinstance(expression, MatrixBase) else [expression]
    return not any(map(_computable, chain.from_iterable(map(_inner, parts))))


def _inner(expression: Any) -> list[Any]:
    """All parts that are not inside a written number."""
    walk = preorder_traversal(expression)
    found = []
    for node in walk:
        if _is_written_number(node):
            walk.skip()
        else:
            found.append(node)
    return found


def _is_written_number(node: Any) -> bool:
    if node == _PERCENT or getattr(node, "is_Number", False):
        return True
    if isinstance(node, Pow):  # a denominator's, or in scientific notation
        return isinstance(node.base, Integer) and (node.exp == -1 or (node.base == 10 and node.exp.is_Integer))
    if isinstance(node, Mul):  # a sign, a fraction, a percentage, scientific notation
        sign = [arg for arg in node.args if arg == -1]
        powers = [arg for arg in node.args if isinstance(arg, Pow) or arg == _PERCENT]
        rest = len(node.args) - len(sign) - len(powers)
        return all(map(_is_written_number, node.args)) and len(sign) <= 1 and len(powers) <= 1 and rest <= 1
    return False


def _computable(node: Any) -> bool:
    """Whether one number could replace the node, which is no written number, or two of its terms or factors."""
    numbers = [arg for arg in getattr(node, "args", ()) if _is_written_number(arg)]
    if isinstance(node, Add) and len(numbers) > 1:
        return True
    if isinstance(node, Mul):  # 3 pi / 4 is not: a sign, a numerator and a denominator
        powers = sum(isinstance(number, Pow) for number in numbers)
        if powers > 1 or sum(number != -1 for number in numbers) - powers > 1:
            return True
    if not getattr(node, "is_number", False) or not node.args:
        return False
    value = node.doit()
    return bool(value.is_Number) or bool(value.is_rational)
