"""Names of a Python file: the values that its syntax shows."""

import ast
from collections import defaultdict
from typing import Any

from rlplus.convert.expressions import Unknown, calculate, number

READ = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "load_dataset")
SHOWING = ("print", "len", "repr", "str")
BINDING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
ANYTHING = ("exec", "globals", "locals")  # may bind any name
STEPS = 10_000  # the most nodes of a value: names of names double them without end
DEPTH = 100
TABLES = 200  # the most dictionaries of a file, which may contain each other


def called(call: ast.AST) -> str:
    """The last name of the function that is called; "" if it has none."""
    function = getattr(call, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def ctx_of(node: ast.expr) -> ast.expr_context:
    """Whether a node is read or written."""
    return getattr(node, "ctx", ast.Load())


class Names:
    """parents: the node around each node."""

    def __init__(self, tree: ast.AST) -> None:
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._bound: dict[str, list[ast.AST]] = defaultdict(list)  # the value of each plain assignment, else a node
        self._loads: dict[str, list[ast.Name]] = defaultdict(list)
        self._attributes = [node for node in self.parents if isinstance(node, ast.Attribute) and node.attr == "args"]
        self._star = 0
        self._left = STEPS
        self._tables = TABLES
        for node in ast.walk(tree):
            self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            parent = self.parents[node]
            plain = isinstance(parent, ast.Assign | ast.AnnAssign) and parent.value is not None
            if isinstance(node.ctx, ast.Load):
                self._loads[node.id].append(node)
            else:
                self._bound[node.id].append(parent.value if plain else node)  # type: ignore[attr-defined]
        elif isinstance(node, ast.arg):
            self._bound[node.arg].append(node)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                self._bound[alias.asname or alias.name.partition(".")[0]].append(node)
                self._star = max(self._star, node.lineno * (alias.name == "*"))
        elif isinstance(node, ast.Call) and called(node) in ANYTHING:
            self._star = max(self._star, node.lineno)
        elif isinstance(node, BINDING) and node.name:
            self._bound[node.name].append(node)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self._bound[node.rest].append(node)

    def all(self, name: str) -> list[ast.expr]:
        """The values of all assignments of a name; Unknown if anything else binds it."""
        bound = self._bound.get(name, [])
        plain = [node for node in bound if isinstance(node, ast.expr) and isinstance(ctx_of(node), ast.Load)]
        if not bound or len(plain) != len(bound) or any(node.lineno < self._star for node in plain):
            raise Unknown
        return plain

    def one(self, name: str) -> ast.expr:
        """The value of a name's only assignment, which nothing changes; else Unknown."""
        values = self.all(name)
        changes = isinstance(values[0], ast.Dict | ast.List | ast.Set | ast.Call | ast.ListComp | ast.DictComp)
        if len(values) != 1 or (changes and not all(map(self._keeps, self._loads[name]))):
            raise Unknown
        return values[0]

    def _keeps(self, node: ast.Name) -> bool:
        """Whether a use of a name cannot change what it stands for."""
        parent = self.parents[node]
        if isinstance(parent, ast.Subscript):
            while isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load):
                parent = self.parents[parent]
            return not isinstance(parent, ast.Subscript | ast.Attribute)
        copied = isinstance(parent, ast.keyword) and parent.arg is None
        merged = isinstance(parent, ast.Dict) and any(
            key is None and value is node for key, value in zip(parent.keys, parent.values, strict=True)
        )
        return copied or merged or any(self.is_read_by(node, name) for name in (*READ, *SHOWING))

    def is_read_by(self, node: ast.AST, name: str) -> bool:
        """Whether a node is an argument of a call of that name."""
        parent = self.parents[node]
        call = self.parents.get(parent) if isinstance(parent, ast.keyword) else parent
        return isinstance(call, ast.Call) and call.func is not node and called(call) == name

    def uses(self, call: ast.Call) -> list[ast.expr]:
        """The uses of what a call makes: of the names it is assigned to, and of attributes called args."""
        names = [name for name, bound in self._bound.items() if call in bound]
        args = [node for node in self._attributes if isinstance(self.parents[node], ast.Attribute)]
        setters = [node for node in self._attributes if self.is_read_by(node, "setattr")]
        return [*(node for name in names for node in self._loads[name]), *args, *setters]

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
        if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and called(node) == "dict" and not node.args):
            self._tables -= 1
            return node if self._tables > 0 else None
        return None

    def _followed(self, node: ast.expr) -> ast.expr:
        """The value of a name of a name; Unknown where that has no end."""
        for _ in range(DEPTH):
            if not isinstance(node, ast.Name):
                return node
            node = self.one(node.id)
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
            return self._value(self.one(node.id), depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -number(self._value(node.operand, depth))
        if isinstance(node, ast.BinOp):
            left, right = (self._value(side, depth) for side in (node.left, node.right))
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
