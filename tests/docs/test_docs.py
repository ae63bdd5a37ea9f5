"""The manual: derived parts are in step, links lead somewhere, code runs, commands and keys exist."""

import ast
import importlib.util
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import processes
import pytest
import torch
import yaml
from manual import DECISIONS, MANUAL, PAGES, ROOT, Block, all_blocks, blocks, module_from, prose
from markdown.extensions.toc import slugify
from run_files import MINIMAL, write_minimal
from torch.distributed.run import get_args_parser

import rlplus
from bench.__main__ import parse as parse_bench
from bench.submit import parse as parse_submit
from rlplus.loss.objective.surrogates import INTERNAL
from rlplus.tools.cli import parse
from rlplus.tools.cli.evaluate import evaluated
from rlplus.tools.compare.config import Setting, load_comparison
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import load_stages
from rlplus.train.config.json_schema import json_schema
from rlplus.train.data import Sample
from rlplus.train.recipe import Batch

# in the site
COMPARISONS = {f"compare/{path.stem}.html" for path in (ROOT / "experiments/compare/results").glob("*.json")}
SCHEMA = json_schema()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "rlplus").rglob("*.py")))


# ---- derived parts, links


def test_the_derived_parts_are_those_of_the_code() -> None:
    for path, text in module_from(ROOT / "docs/generate.py").pages():
        assert path.read_text() == text, f"{path.name}: want `make docs`"


def test_every_file_of_results_counts_for_the_presets_it_measured() -> None:
    results = set(ROOT.glob("experiments/*/results/*.json")) - set(ROOT.glob("experiments/real/results/*-*.json"))
    uses = module_from(ROOT / "docs/preset_uses.py")
    assert {path for pattern in uses.PAGES for path in ROOT.glob(pattern)} == results
    assert ("pretrained", "pretrained.md#what-has-run") in uses.measured()["rlplus"]
    assert not uses.measured()["hpt"]
    assert uses.used("ppo") == ["RL-PLUS paper: ORZ", "`rlplus convert` of verl"]


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="want a page with one <!-- begin keys -->"):
        module_from(ROOT / "docs/generate.py").with_part("nothing", "keys", "part")


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {slugify(title.replace("`", ""), "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        assert page.exists() or name in COMPARISONS, target
        assert not anchor or anchor in anchors(page), target


# ---- Python


def check_readme(page: ModuleType) -> None:
    whole = (page.hidden @ page.weight.T).log_softmax(-1)
    torch.testing.assert_close(page.logprob, whole.gather(-1, page.tokens[:, None]).squeeze(-1))
    torch.testing.assert_close(page.entropy, -(whole.exp() * whole).sum(-1))
    assert page.hidden.grad.any()
    assert page.weight.grad.any()


def check_pytorch(page: ModuleType) -> None:
    logits = page.model(input_ids=page.tokens).logits[:, 2:-1]
    want = logits.log_softmax(-1).gather(-1, page.target[..., None]).squeeze(-1)
    for got in (page.out.logprob, page.logprob):
        torch.testing.assert_close(got, want)
    assert page.model.lm_head.weight.grad.any()


def check_index(page: ModuleType) -> None:
    assert page.external.sum() == 2 * page.response.shape[-1], "one demonstration for each of two prompts"
    assert all(parameter.grad.any() for parameter in page.lm.parameters())


def check_extending(page: ModuleType) -> None:
    """The surrogate against autograd of the tests' formula; the recipe on a group of five."""
    objective = ALGORITHMS["spo"].objective
    logprob = torch.linspace(-3, -0.1, 20, dtype=torch.float64, requires_grad=True)
    old, advantage = logprob.detach() + 0.3, torch.linspace(-1, 1, 20, dtype=torch.float64)
    token = SimpleNamespace(A=advantage, r=(logprob - old).exp(), o=objective)
    want = page.entry["spo"](token)
    constants = SimpleNamespace(advantage=advantage, old_logprob=old)
    loss, slope, _, _ = page._spo(logprob.detach(), constants, objective)
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(want.sum(), logprob)[0])
    samples = [Sample([1], [2], 0, i == 4, False, None, reward) for i, reward in enumerate((0.0, 0.5, 1.0, 0.2, 1.0))]
    recipe = object.__new__(page.Extremes)
    recipe.options = page.Extremes.Options(name="pods.py:Extremes", pairs=1)
    kept = recipe.collect(lambda: Batch([], samples, 0.0)).samples
    assert sorted((s.reward, s.demonstration) for s in kept) == [(0.0, False), (1.0, False), (1.0, True)]


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "README.md": check_readme, "index.md": check_index, "pytorch.md": check_pytorch, "extending.md": check_extending,
}  # fmt: skip
NEEDS = {"trl.md": "trl"}  # a package that other ones here exclude


def check_imports(page: ast.Module) -> None:
    """Names that a page which cannot run here imports from rlplus are defined there."""
    for node in ast.walk(page):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rlplus"):
            source = ast.parse((ROOT / f"{str(node.module).replace('.', '/')}.py").read_text())
            defined = {item.name for item in source.body if isinstance(item, ast.FunctionDef | ast.ClassDef)}
            assert {name.name for name in node.names} <= defined


WITH_PYTHON = [path for path in MANUAL if any(block.language == "python" for block in blocks(path))]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda path: path.name)
def test_python_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one module, whose lines are where they are on the page."""
    lines = [""] * len(path.read_text().splitlines())
    for block in blocks(path):
        if block.language == "python":
            code = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    if path.name in NEEDS and importlib.util.find_spec(NEEDS[path.name]) is None:
        check_imports(ast.parse("\n".join(lines)))
        return
    copy = tmp_path / f"page_{path.stem.lower()}.py"
    copy.write_text("\n".join(lines) + "\n")
    for table in (INTERNAL, ALGORITHMS):  # a page's entries end with the test
        for name in ("spo", "mine"):
            monkeypatch.setitem(table, name, None)
            del table[name]
    page = module_from(copy)
    CHECKS.get(path.name, lambda page: None)(page)


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_code_runs_outside_of_the_checkout(name: str, tmp_path: Path) -> None:
    """In a process that finds nothing else of it than an editable installation does; it prints something."""
    first = next(block for block in blocks(ROOT / name) if block.language == "python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = processes.run([sys.executable, "-c", first.text], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tensor([")


def test_the_first_screen_is_short_and_begins_with_the_demo_and_the_tests() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "bash")
    assert [*commands(first)][:2] == [["make", "demo"], ["make", "test"]]


# ---- commands


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without assignments in front of it."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and (words[0] == "export" or re.match(r"\w+=", words[0])):
            words = words[1:]
        if words:
            yield words


def check_rlplus(words: Sequence[str], folder: Path) -> None:
    """The arguments are the command's, and its configuration is valid with the overrides."""
    args = parse(words)
    if getattr(args, "config", None) is None:
        return
    path, overrides = Path(args.config), args.overrides
    if args.command == "compare":
        if path.parts[0] == "runs" or "=" in args.config:  # runs that exist
            return
        named = [text.split(",") if text else [] for text in (args.presets, args.settings)]
        load_comparison(write_minimal(folder) if path.name == "run.yaml" else ROOT / path, named[0], settings=named[1])
        return
    if args.command == "plan" and path.parent.name == "compare":
        load_comparison(ROOT / path)
        return
    if args.command == "eval":
        args.config = str(write_minimal(folder)) if path.name == "run.yaml" else args.config
        path, overrides = evaluated(args)
    if path.name == "run.yaml":
        path = write_minimal(folder)
        if any(word.startswith("data.behavior_logprob") for word in overrides):
            overrides = [*overrides, "algorithm.preset=rlplus"]
    load_stages(path if path.is_absolute() else ROOT / path, overrides)


def check_torchrun(words: Sequence[str], folder: Path) -> None:
    args = get_args_parser().parse_args(words)
    assert args.module
    assert args.training_script == "rlplus"
    check_rlplus(args.training_script_args, folder)


def check_deepspeed(words: list[str], folder: Path) -> None:
    at = words.index("--module")
    (place,) = importlib.util.find_spec("deepspeed").submodule_search_locations
    check_options(words[: at + 1], Path(place, "launcher/runner.py"))
    assert words[at + 1] == "rlplus"
    check_rlplus(words[at + 2 :], folder)


def check_options(words: Sequence[str], source: Path) -> None:
    """Every option is in the source of the program."""
    options = set(re.findall(r"(?<![-\w])--[a-z][-\w]*", source.read_text()))
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


def check_pip(words: Sequence[str], folder: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(\w+)\]", " ".join(words))) <= set(extras)


def check_python(words: Sequence[str], folder: Path) -> None:
    if words[:2] == ["-m", "bench"]:
        check_bench(list(words[2:]), folder)
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1].partition(".")[0]) is not None, words[1]
    else:
        assert (ROOT / words[0]).exists(), words[0]
        if words[0] != "setup.py":
            check_options(words, ROOT / words[0])


def check_bench(words: list[str], folder: Path) -> None:
    is_submit = words[0] == "submit"
    (parse_submit if is_submit else parse_bench)(words[is_submit:])


def check_make(words: Sequence[str], folder: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in words if "=" not in word), words


def check_pytest(words: Sequence[str], folder: Path) -> None:
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def check_vllm(words: Sequence[str], folder: Path) -> None:
    """A server for rollouts, or one of a teacher, whose options are vLLM's alone: unchecked where that is missing."""
    if "--tokens-only" in words:
        check_options(words, ROOT / "rlplus/train/rollout/server_engine.py")
    elif spec := importlib.util.find_spec("vllm"):
        (place,) = spec.submodule_search_locations
        check_options(words, Path(place, "engine/arg_utils.py"))


def check_sglang(words: Sequence[str], folder: Path) -> None:
    check_options(words, ROOT / "rlplus/train/rollout/sglang_engine.py")


def nothing(words: Sequence[str], folder: Path) -> None:
    """A program of the system."""


PROGRAMS: dict[str, Callable[[list[str], Path], None]] = {
    "rlplus": check_rlplus, "torchrun": check_torchrun, "deepspeed": check_deepspeed, "pip": check_pip,
    "python": check_python, "python3": check_python, "rlplus-bench": check_bench, "make": check_make,
    "pytest": check_pytest, "vllm": check_vllm, "sglang": check_sglang, "source": nothing,
}  # fmt: skip


@pytest.mark.parametrize("path", [p for p in PAGES if all_blocks("bash", [p])], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist_with_their_options(path: Path, tmp_path: Path) -> None:
    for block in all_blocks("bash", [path]):
        for words in commands(block):
            if "/" in words[0]:
                assert (ROOT / words[0]).exists(), f"{block}: {words[0]}"
                continue
            assert words[0] in PROGRAMS, f"{block}: {words[0]}"
            try:
                PROGRAMS[words[0]](words[1:], tmp_path)
            except SystemExit as error:
                raise AssertionError(f"{block}: {shlex.join(words)}") from error


# ---- configurations, and names in the text


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    """The minimal configuration with a fragment of one; a complete one as it is."""
    if "output_dir" in changes:
        return changes
    return MINIMAL | {key: value if key == "reward" else MINIMAL.get(key, {}) | value for key, value in changes.items()}


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_configurations_are_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if names := re.findall(r"(\w+\.py):", block.text):  # files of the page, whose first line is their name
        monkeypatch.chdir(tmp_path)
        for name in names:
            (text,) = (each.text for each in blocks(block.path) if each.text.startswith(f"# {name}\n"))
            Path(name).write_text(text)
    for i, fragment in enumerate(yaml.safe_load_all(block.text)):
        path = tmp_path / f"{i}.yaml"
        if "settings" in fragment and "run" not in fragment:  # a part of a comparison
            assert [Setting.model_validate(setting) for setting in fragment["settings"].values()]
            continue
        path.write_text(yaml.safe_dump(fragment if "run" in fragment else merged(fragment)))
        (load_comparison if "run" in fragment else load_stages)(path)


def is_key(name: str) -> bool:
    """Whether a dotted name is a key of a configuration."""
    node = SCHEMA
    for part in name.split("."):
        choices = [node, *node.get("anyOf", ())]
        choices = [SCHEMA["$defs"][c["$ref"].rpartition("/")[2]] if "$ref" in c else c for c in choices]
        if part.isdigit() or any(c.get("type") == "object" and not c.get("properties") for c in choices):
            return True  # an item of a list, or anything
        found = [c["properties"][part] for c in choices if part in c.get("properties", {})]
        if not found:
            return False
        node = found[0]
    return True


SECTION = "model|data|reward|rollout|algorithm|train|checkpoint|log|validation|evaluation|stages"
METRIC = "actor|batch|reward|mismatch|time|critic|process|distill|sft|gate|prefix|replay|response_length|validation"
FOLDER = "rlplus|docs|tests|configs|kernels|bench|csrc|examples|experiments"


@pytest.mark.parametrize("path", [*MANUAL, *DECISIONS], ids=lambda path: path.name)
def test_names_in_the_text_exist(path: Path) -> None:
    """Keys, metrics, files and public names between backquotes."""
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(path)):
        for word in span.split():
            if key := re.match(rf"((?:{SECTION})(?:\.\w+)+)(?:[=:].*)?$", word):
                assert is_key(key[1]), key[1]
            elif re.fullmatch(rf"(?:{METRIC})/\w+", word):
                assert word in SOURCE or f'"{word.rpartition("/")[2]}"' in SOURCE, word
            elif re.fullmatch(rf"(?:{FOLDER})/[\w./+-]*", word):
                assert (ROOT / word).exists(), word
            elif name := re.match(r"rlplus\.(\w+)", word):
                assert hasattr(rlplus, name[1]) or (ROOT / "rlplus" / name[1]).exists(), word


# Messages of other packages: the file there, and the message as it stands in it.
THEIRS = {
    "ParallelLMHead: Failed to load weights": (
        "vllm/model_executor/model_loader/reload/layerwise.py",
        '"%s: Failed to load weights", layer.__class__.__name__',
    )
}


@pytest.mark.vllm
def test_quoted_messages_of_others_are_theirs() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    for message, (file, text) in THEIRS.items():
        assert f"`{message}`" in page
        package, _, inside = file.partition("/")
        (place,) = importlib.util.find_spec(package).submodule_search_locations
        assert text in (Path(place) / inside).read_text(), message


def test_quoted_messages_are_those_of_the_code() -> None:
    """Messages in the page on troubleshooting, without the numbers and names in them."""
    text = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # literals that continue on the next line
    spans = {*re.findall(r"`([^`]+)`", " ".join(prose(ROOT / "docs/troubleshooting.md").split()))} - {*THEIRS}
    messages = [span for span in spans if len(span.split()) > 3 and not span.startswith(("rlplus ", "pip "))]
    assert len(messages) >= 6
    for part in (part.strip() for message in messages for part in re.split(r"…|\d+|'\w+'|; ", message)):
        assert len(part) < 12 or part in text or re.sub(r" policy ", " {model} ", part) in text, part


def test_an_unknown_key_is_noticed() -> None:
    assert is_key("train.lr")
    assert is_key("stages.2.train.lr")
    assert is_key("algorithm.objective.kl_coef")
    assert not is_key("train.lrr")
    assert not is_key("algorithm.objective.kl")
