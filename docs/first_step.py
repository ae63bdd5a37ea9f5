"""The step of examples/train_minimal.py, with which the manual begins."""

import ast
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parent.parent


def names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


def code() -> str:
    """The step of examples/train_minimal.py up to the gradients, as a block of Python that runs by itself."""
    source = (ROOT / "examples/train_minimal.py").read_text(encoding="utf-8")
    begin, end = "    # The demonstration is the last member", "    optimizer.zero_grad()\n    out.loss.backward()\n"
    body = dedent(source[source.index(begin) : source.index(end)]) + "out.loss.backward()"
    top = ast.parse(source).body
    own = {node.name for node in top if isinstance(node, ast.FunctionDef)}
    own |= {name for node in top if isinstance(node, ast.Assign) for name in names(node, ast.Store)}
    used = own & names(ast.parse(body), ast.Load) | {"make_policy"}
    imports = f"import torch\n\nimport rlplus\nfrom examples.train_minimal import {', '.join(sorted(used))}"
    return f'```python\n{imports}\n\nlm, problems = make_policy(), ["407", "215"]\n{body}\n```'
