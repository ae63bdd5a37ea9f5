"""A module imports only from the layers on its left."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import pytest

import rlplus.loss
from rlplus.train.algorithm.options import RECIPES

PACKAGE = Path(__file__).parents[2] / "rlplus"
ORDER = "sandbox < common < kernels < loss.objective < loss.head < loss.guard < loss.backends < loss.operations < loss"
ORDER += " < train.algorithm < train.config < train.data < train.reward < train.rollout < train.checkpoint"
ORDER += " < train.learner < train.recipe < train.evaluation < train.trainer < tools.convert < tools.verify"
ORDER += " < tools.report < tools.watch < tools.plan < tools.init < tools.compare < tools.cli < __main__"
LAYERS = ORDER.split(" < ")
FLOORS = ("loss", "train", "tools")  # folders of layers
LINKS = (PACKAGE / "kernels", PACKAGE / "bench")  # rglob does not follow links
MODULES = sorted(path for folder in (PACKAGE, *LINKS) for path in folder.rglob("*.py"))
ALLOWED = {name: LAYERS[:i] for i, name in enumerate(LAYERS)}
ALLOWED["__init__"] = ["common", "loss"]  # importing rlplus stays cheap
ALLOWED["bench"] = ["common", "kernels", *(name for name in LAYERS if name.startswith("loss"))]  # runs without `train`
ALLOWED["integrations"] = ["common", *(name for name in LAYERS if name.startswith("loss"))]  # and nothing imports it
ALLOWED["train"] = ALLOWED["tools"] = []
for layer in ("tools.cli", "train.config", "train.rollout", "train.trainer"):
    ALLOWED[layer].append("__version__")


def layer_of(name: str) -> str:
    """The layer of a dotted name: `train.config` for `train.config.sections`, `loss` for `loss.selfcheck`."""
    floor, _, rest = name.partition(".")
    below = f"{floor}.{rest.partition('.')[0]}"
    return below if floor in FLOORS and below in LAYERS else floor


def imported_layers(path: Path, text: str) -> Iterator[str]:
    """Names of the layers of rlplus that the module at ``path`` imports, at its top or inside a function."""
    return map(layer_of, imported_names(path, text))


def imported_names(path: Path, text: str) -> Iterator[str]:
    """The imported names themselves, without rlplus: `common.durable.write_text`."""
    package = ["rlplus", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "rlplus":
                yield rest or "__init__"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_the_left(path: Path) -> None:
    layer = layer_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    assert layer in ALLOWED, f"{layer} has no place in the order of layers: {' < '.join(LAYERS)}"
    wrong = set(imported_layers(path, path.read_text())) - {layer, *ALLOWED[layer]}
    assert not wrong, f"{layer} imports {sorted(wrong)}; it may import {ALLOWED[layer]}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "loss").rglob("*.py")), ids=lambda path: path.name)
def test_the_loss_imports_from_the_module_that_defines_a_name(path: Path) -> None:
    """From the package's own face, which imports them all, each module would depend on each."""
    face = {f"loss.{name}" for name in rlplus.loss.__all__}
    assert not face & set(imported_names(path, path.read_text()))


@pytest.mark.parametrize("layer", ["loss", "bench"])
def test_where_only_torch_and_triton_are_common_is_four_modules(layer: str) -> None:
    """Others of `common` import pydantic or rich."""
    modules = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] == layer]
    names = {name for path in modules for name in imported_names(path, path.read_text()) if name.startswith("common")}
    assert {name.split(".")[1] if "." in name else name for name in names} <= {"durable", "errors", "lazy", "textfiles"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_experiments(path: Path) -> None:
    assert "experiments" not in imported_packages(path.read_text())


def imported_packages(text: str) -> set[str]:
    """First parts of the names that a module imports, at its top or inside a function."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_the_name_of_a_file_says_which_it_is() -> None:
    """Also in a traceback, a search or an editor's tab."""
    outside = ("docs", "examples", "experiments", "hub", "packages", "tests")
    files = [*MODULES, *(path for folder in outside for path in (PACKAGE.parent / folder).rglob("*.py"))]
    twice = {name for name, n in Counter(path.name for path in files).items() if n > 1}
    assert twice == {"__init__.py", "__main__.py", "conftest.py"}


TESTS = sorted((PACKAGE.parent / "tests").rglob("test_*.py"))


def test_a_test_imports_no_other_test_and_its_name_says_which_it_is() -> None:
    """mutants.toml names a test without its folder; what tests share is in tests/support."""
    text = {path.stem: path.read_text() for path in TESTS}
    assert len(text) == len(TESTS) > 100
    shared = {name for own in text.values() for name in imported_packages(own) if name in text}
    assert shared == set()
    assert all(path.parent.parent.name == "tests" for path in TESTS)


COLLECTIVES = ["all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "scatter"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_collectives_go_through_agree(path: Path) -> None:
    """`agree` names a rank that is gone, and what every rank was doing. The loss, which is below it, has a file."""
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    used = [node.attr for node in attributes if ast.unparse(node.value) in ("dist", "torch.distributed")]
    direct = [name for name in used if name.startswith(tuple(COLLECTIVES))]
    assert not direct or path.name in ("agree.py", "sharded.py"), (
        f"{path.name} calls {direct}: want functions of rlplus.common.agree"
    )


def test_one_class_knows_what_its_kinds_of_demonstrations_mean() -> None:
    """Elsewhere a new kind would be forgotten: `Algorithm` has properties for all comparisons."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            named = any(isinstance(side, ast.Attribute) and side.attr == "demonstrations" for side in compared)
            constant = any(isinstance(side, ast.Constant | ast.Tuple) for side in compared)
            assert path.name == "presets.py" or not (named and constant), f"{path}:{node.lineno}"


ALGORITHM_ROOMS = ("train.algorithm", "train.recipe")


def subclasses(trees: Iterable[ast.AST], *bases: str) -> set[str]:
    """Names of the classes below `bases`, which are not among them."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    while more := {c.name for c in classes if {ast.unparse(b) for b in c.bases} & {*bases, *found}} - found:
        found |= more
    return found


def told_apart(text: str, kinds: Set[str], names: Set[str]) -> list[str]:
    """Uses of the classes `kinds`, as isinstance needs one, and comparisons of a recipe's name with one of `names`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2] in kinds:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if any(ast.unparse(side).endswith("recipe.name") for side in sides):
            constants = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
            found += [f"{node.lineno}: {ast.unparse(node)}"] * bool(constants & names)
    return found


def test_outside_its_rooms_nothing_asks_which_recipe_it_is() -> None:
    """A recipe says by its class variables and methods what the rest must know: a new one changes nothing there."""
    rooms = {path: layer_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts)) for path in MODULES}
    trees = [ast.parse(path.read_text()) for path in MODULES if rooms[path] in ALGORITHM_ROOMS]
    kinds = subclasses(trees, "Recipe", "RecipeOptions")
    assert {"Plain", "SelfDistill", "GateRecipe", "SelfDistillRecipe"} < kinds  # the last is below a subclass
    assert not {"Recipe", "RecipeOptions"} & kinds
    for path in MODULES:
        if rooms[path] not in ALGORITHM_ROOMS:
            assert told_apart(path.read_text(), kinds, {*RECIPES}) == [], path
    asks = "isinstance(options, Gate)", "type(x) is algorithm.Gate", "config.algorithm.recipe.name in ('gate', 'x')"
    assert [len(told_apart(ask, {"Gate"}, {"gate"})) for ask in asks] == [1, 1, 1]
    assert told_apart("isinstance(options, RecipeOptions), recipe.name == other", {"Gate"}, {"gate"}) == []


KERNELS = sorted((PACKAGE / "kernels").glob("*.py"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_import_torch_triton_and_each_other_only(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [f"{'.' * node.level}{node.module or ''}" for node in nodes if isinstance(node, ast.ImportFrom)]
    others = {name for name in names if not name.startswith("rlplus.kernels.")}
    assert {name.partition(".")[0] for name in others} <= {"torch", "triton", "typing"}


def test_every_form_of_import_is_seen() -> None:
    text = "import rlplus, rlplus.cli\nfrom rlplus import recipe\nfrom ..plan import x\ndef f(): from .. import report"
    assert list(imported_layers(PACKAGE / "reward" / "x.py", text)) == ["__init__", "cli", "recipe", "plan", "report"]
    assert imported_packages(f"import torch.nn\n{text}\ndef g(): from experiments.toy import SET") == {
        "torch", "rlplus", "experiments"
    }  # fmt: skip
