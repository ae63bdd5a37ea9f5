"""Names of a Python file: the values that its syntax shows."""

import ast
import operator
import sys
from collections import defaultdict
from typing import Any

READ = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "load_dataset")
SHOWING = ("print", "len", "repr", "str")
NAMING = {"setattr", "__setattr__", "delattr", "__delattr__"}  # the last argument but one may name what they set
ANYTHING = {"exec", "eval", "globals", "locals", "vars", "builtins", "__builtins__"}  # may set any name
IMPORTING = {"__import__", "import_module"}  # and so may what they import
ANYTHING_OF = {"__dict__", "__globals__", "f_globals", "f_locals", *IMPORTING}  # attributes that may
STEPS = 10_000  # the most nodes of a value: names of names double them without end
DEPTH = 100

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


def called(call: ast.AST) -> str:
    """The last name of the function that is called; "" if it has none."""
    function = getattr(call, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def ctx_of(node: ast.expr) -> ast.expr_context:
    """Whether a node is read or written."""
    return getattr(node, "ctx", ast.Load())


class Names:
    """parents: the node around each node. stored: attributes that are set, and where; "" for any, and any name."""

    def __init__(self, tree: ast.AST) -> None:
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.stored: dict[str, ast.expr | ast.alias] = {}
        self._bound: dict[str, list[ast.AST]] = defaultdict(list)  # the value of each plain assignment, else a node
        self._loads: dict[str, list[ast.expr]] = defaultdict(list)
        self._star = 0
        self._left = STEPS
        for node in ast.walk(tree):
            self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        parent = self.parents.get(node)
        if isinstance(node, ast.Name):
            plain = isinstance(parent, ast.Assign | ast.AnnAssign) and parent.value is not None
            if isinstance(node.ctx, ast.Load):
                self._loads[node.id].append(node)
                self._look(node, node.id, ANYTHING | IMPORTING)
            else:
                self._bound[node.id].append(parent.value if plain else node)  # type: ignore[union-attr]
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Load):
                self._loads[f".{node.attr}"].append(node)
                self._look(node, node.attr, ANYTHING_OF)
            elif not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                self._store(node.attr, node)
        elif isinstance(node, ast.alias):
            self._bound[node.asname or node.name.partition(".")[0]].append(parent or node)
            if node.name in ANYTHING | IMPORTING:
                self._store("", node)
            if node.name == "*":
                once = isinstance(self.parents.get(parent or node), ast.Module)
                self._star = max(self._star, node.lineno if once else sys.maxsize)
        elif not isinstance(node, ast.keyword):  # functions, classes, arguments, exceptions and patterns
            for field in ("name", "arg", "rest"):
                if isinstance(name := getattr(node, field, None), str):
                    self._bound[name].append(node)

    def _store(self, name: str, node: ast.expr | ast.alias) -> None:
        """Take an attribute for set, and a name, as the attribute may be a module's."""
        self.stored[name] = node
        self._bound[name].append(node)

    def _look(self, node: ast.expr, name: str, anything: set[str]) -> None:
        """Take what a use of one of Python's own names may set for set."""
        call = self.parents[node]
        if name in NAMING:
            arguments = call.args if isinstance(call, ast.Call) and call.func is node else []
            named = arguments[-2] if len(arguments) > 1 else node
            self._store(str(named.value) if isinstance(named, ast.Constant) else "", node)
        elif name in anything:
            self._store("", node)

    def all(self, name: str) -> list[ast.expr]:
        """The values of all assignments of a name; Unknown if anything else binds it."""
        bound = self._bound.get(name, [])
        plain = [node for node in bound if isinstance(node, ast.expr) and isinstance(ctx_of(node), ast.Load)]
        doubtful = "" in self.stored or any(node.lineno < self._star for node in plain)
        if not bound or len(plain) != len(bound) or doubtful:
            raise Unknown
        return plain

    def one(self, name: str) -> ast.expr:
        """The value of a name's only assignment; else Unknown."""
        values = self.all(name)
        if len(values) != 1:
            raise Unknown
        return values[0]

    def container(self, name: str) -> ast.expr:
        """The value of a name that is assigned once, alone, and used once, so that nothing else may change it."""
        value = self.one(name)
        if not self._is_alone(value) or len(self._loads[name]) != 1:
            raise Unknown
        return value

    def _is_alone(self, value: ast.expr) -> bool:
        """Whether a value is assigned to one name."""
        parent = self.parents[value]
        targets = getattr(parent, "targets", None) or [getattr(parent, "target", None)]
        return isinstance(parent, ast.Assign | ast.AnnAssign) and len(targets) == 1 and isinstance(targets[0], ast.Name)

    def reads_data(self, name: str) -> bool:
        """Whether no use of a name of data changes them in place: methods whose results are used make new data."""
        for node in self._loads[name]:
            last = node
            parent = self.parents[node]
            while isinstance(parent, ast.Attribute | ast.Subscript | ast.Call) and last in (
                getattr(parent, "value", None),
                getattr(parent, "func", None),
            ):
                if not isinstance(ctx_of(parent), ast.Load):
                    return False
                last = parent
                parent = self.parents[parent]
            used = not isinstance(parent, ast.Expr) if last is not node else False
            if not used and not any(self.is_read_by(node, reader) for reader in (*READ, *SHOWING)):
                return False
        return True

    def calls(self, call: ast.AST, name: str) -> bool:
        """Whether a node is a call of an imported function of that name, or of the builtin one."""
        if called(call) != name:
            return False
        bound = self._bound.get(name, [])
        if name in READ:
            return all(isinstance(node, ast.ImportFrom | ast.Import) for node in bound)
        return not bound and isinstance(getattr(call, "func", None), ast.Name)

    def is_read_by(self, node: ast.AST, name: str) -> bool:
        """Whether a node is an argument of a call of that name."""
        parent = self.parents[node]
        call = self.parents.get(parent) if isinstance(parent, ast.keyword) else parent
        return isinstance(call, ast.Call) and call.func is not node and self.calls(call, name)

    def uses(self, call: ast.Call) -> list[ast.expr] | None:
        """The uses of what a call makes; None where it may be used elsewhere, too."""
        parent = self.parents[call]
        if not self.calls(call, called(call)) or self.stored.keys() & {"", "args"}:
            return None
        if isinstance(parent, ast.Expr) or self.is_read_by(call, "GRPOTrainer"):
            return self._loads[".args"]
        if self._is_alone(call):
            name = next(name for name, bound in self._bound.items() if call in bound)
            return self._loads[name] + self._loads[".args"] if self._bound[name] == [call] else None
        return None

    def made_by(self, node: ast.expr, calls: list[ast.Call]) -> bool:
        """Whether a node is the only one of the calls, or a name that is only assigned to it."""
        if isinstance(node, ast.Name):
            bound = self._bound.get(node.id, [])
            return len(calls) == 1 and bound == calls
        return calls == [node]

    def table(self, node: ast.expr) -> ast.Call | ast.Dict | None:
        """The dictionary, or call of dict, that a node stands for; None if it is none."""
        try:
            node = self._followed(node)
        except Unknown:
            return None
        if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and self.calls(node, "dict") and not node.args):
            return node
        return None

    def _followed(self, node: ast.expr) -> ast.expr:
        """The value of a name of a name; Unknown where that has no end."""
        for _ in range(DEPTH):
            if not isinstance(node, ast.Name):
                return node
            node = self.container(node.id)
        raise Unknown

    def returned(self, call: ast.Call) -> ast.expr:
        """The value of the only return of the only function of that name; else Unknown."""
        bound = self._bound.get(getattr(call.func, "id", ""), [])
        function = bound[0] if len(bound) == 1 and isinstance(bound[0], ast.FunctionDef) else ast.Module([], [])
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        if len(returns) != 1:
            raise Unknown
        return returns[0]

    def functions(self, node: ast.expr) -> list[str]:
        """Names of functions or models in a list of rewards; the names of TRL's own functions begin with trl."""
        if isinstance(node, ast.Name) and any(isinstance(by, ast.expr) for by in self._bound.get(node.id, ())):
            node = self._followed(node)
        found = []
        for part in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.append(part.value)
            elif isinstance(part, ast.Name):
                bound = self._bound.get(part.id, [])
                if any(isinstance(by, ast.expr | ast.arg) for by in bound):
                    raise Unknown
                own = not all(isinstance(by, ast.ImportFrom) and str(by.module).startswith("trl") for by in bound)
                found.append(part.id if own else f"trl.{part.id}")
            elif isinstance(part, ast.Attribute):
                found.append(f"trl.{part.attr}" if ast.unparse(part).startswith(("trl.", "rewards.")) else part.attr)
            else:
                raise Unknown
        return found

    def value(self, node: ast.expr) -> Any:
        """The value of constants, their names, containers and arithmetic; Unknown for others."""
        self._left = STEPS
        return self._value(node, 0)

    def _value(self, node: ast.expr, depth: int) -> Any:
        self._left -= 1
        if depth > DEPTH or self._left < 0:
            raise Unknown
        depth += 1
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bool | int | float | None):
            return node.value if isinstance(node.value, str | bool | None) else number(node.value)
        if isinstance(node, ast.Name):
            value = self._value(self.one(node.id), depth)
            if isinstance(value, list | dict):
                self.container(node.id)
            return value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -number(self._value(node.operand, depth))
        if isinstance(node, ast.BinOp):
            left = self._value(node.left, depth)
            right = self._value(node.right, depth)
            texts = isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str)
            return left + right if texts else calculate(node.op, left, right)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self._value(part, depth)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return self._value(node.value, depth)
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(part, depth) for part in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(key, depth) for key in node.keys if key]
            return dict(zip(keys, (self._value(part, depth) for part in node.values), strict=True))
        if isinstance(node, ast.Subscript):
            return self._item(self._value(node.value, depth), self._value(node.slice, depth))
        raise Unknown

    def _item(self, container: Any, key: Any) -> Any:
        try:
            return container[key]
        except (LookupError, TypeError) as error:
            raise Unknown from error
