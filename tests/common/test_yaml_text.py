"""YAML that is no YAML is one line, in every command that reads some."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
import yaml
from report_pages import step_line
from trainer_runs import run_config

from rlplus.common.yaml_text import parse_yaml, yaml_value
from rlplus.tools.cli import main
from rlplus.tools.watch import FollowedRun, View

TAGS = sorted(tag.rpartition(":")[2] for tag in yaml.SafeLoader.yaml_constructors if tag)
VALUES = ("", "''", "x", "'-'", "0x", "1:x", "2024-99-99", "é", "[x]", "[[x, y]]", "{x: y}", "{[x]: y}")
DEEP = 5000
NESTED = ("[" * DEEP + "]" * DEEP, "{a: " * DEEP + "}" * DEEP, "- " * DEEP)


@pytest.mark.parametrize(("tag", "value"), [*product(TAGS, VALUES)])
def test_a_tag_is_read_or_refused_with_its_place(tag: str, value: str) -> None:
    """All of PyYAML's own tags, before texts that they do not fit."""
    text = f"a: 1\nb: !!{tag} {value}"
    try:
        plain = yaml.safe_load(text)
    except Exception:
        plain = None
    if plain is None:
        with pytest.raises(ValueError, match=r"^run\.yaml:2:\d+: invalid YAML: \S"):
            parse_yaml(text, "run.yaml")
    else:
        assert str(parse_yaml(text, "run.yaml")) == str(plain)  # NaN equals nothing


@pytest.mark.parametrize("text", [*NESTED, "\n".join(f"{' ' * depth}a:" for depth in range(DEEP)), "a: &a [*a]"])
def test_what_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^run\.yaml: invalid YAML: nested too deeply$"):
        parse_yaml(text, "run.yaml")


@pytest.mark.parametrize("sign", ["\\0", "\\x00", "\\ud800", "\\uDFFF"])
@pytest.mark.parametrize("text", ['output_dir: "a{}b"', 'data: {{path: [x, "{}"]}}', '"{}": 1', '!!str "{}"'])
def test_no_text_has_what_a_name_of_a_file_cannot(text: str, sign: str) -> None:
    """Escapes of a double-quoted text can make them; unquoted and single-quoted ones are as they stand."""
    with pytest.raises(
        ValueError, match=r"^run\.yaml:1:\d+: invalid YAML: want characters that UTF-8 text can hold; got "
    ):
        parse_yaml(text.format(sign), "run.yaml")
    assert parse_yaml(f"a: '{sign}'", "run.yaml") == {"a": sign}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("yaml") / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(step_line(1)) + "\n")
    return folder


WRONG = ("output_dir: !!bool x", "train: {steps: !!int ''}", "data: !!timestamp x", f"model: {NESTED[0]}", NESTED[1])


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_every_command_says_one_line(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "config.yaml"
    path.write_text(text)
    page = str(run.parent / "page.html")
    for arguments in (
        ["train", str(path)], ["plan", str(path)], ["compare", str(path)], ["report", str(run), "-o", page],
        ["eval", str(path), "--model", str(run)],
    ):  # fmt: skip
        assert main(arguments) == 2
        error = capsys.readouterr().err.removeprefix("loading the libraries\n")
        assert re.fullmatch(rf"rlplus \w+: {path}(:\d+:\d+)?: invalid YAML: .+\n", error), arguments


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_page_that_follows_a_run_does_without_its_configuration(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    view = View([FollowedRun("run", run)])
    view.update()
    assert "before the first step" not in view.page()
    assert view.runs[0].settings == {}


@pytest.mark.parametrize("value", ["!!bool x", "!!int ''", "!!timestamp x", NESTED[0]])
def test_an_override_is_refused_in_a_line(tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    assert main(["train", str(path), f"train.steps={value}"]) == 2
    error = capsys.readouterr().err
    assert error == f"rlplus train: override {f'train.steps={value}'[:80]!r}: the value is not valid YAML\n"


@pytest.mark.parametrize(
    "value", ["a \x7f b \x85 c \u2028 d \u2029 é 😀 \"'\\\n#: ", ["x", 1, None], {"k": 1e-3}, "", True]
)
def test_a_value_is_read_back(value: object) -> None:
    assert parse_yaml(yaml_value(value), "the value") == value
