"""Passwords in addresses: a message shows the address without them, whoever refuses it and wherever it is written."""

import json
from pathlib import Path

import pytest
from trainer_runs import run_config

from rlplus.common.errors import RunFailed, without_passwords
from rlplus.tools.cli import guarded, main
from rlplus.train.config import load_config
from rlplus.train.rollout.server_http import TEACHER, VLLM, Kind, split
from rlplus.train.trainer.reporter import Reporter

SECRET = "s3cr3t@'/x"
ADDRESS = f"http://me:{SECRET}@host:8000"
LONG = f"ftp://{'me' * 60}:{SECRET}@host"  # longer than what of a value is shown


@pytest.mark.parametrize("address", [ADDRESS, "https://me@host", "postgres://me:word@host/data"])
def test_what_stands_before_the_host_is_hidden(address: str) -> None:
    scheme, _, rest = address.partition("://")
    shown = f"{scheme}://***@{rest.rpartition('@')[2]}"
    assert without_passwords(f"got {address}, no {address}") == f"got {shown}, no {shown}"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("me:s3cr3t@host:8000", "host:8000"),
        ("me.too+x:s3:cr3t@host.org/v1", "host.org/v1"),
        ("me:s3@cr3t@10.0.0.1", "10.0.0.1"),
        ("me:s3/cr3t@host:8000", "host:8000"),
        ("me:s3cr3t@[::1]:80", "[::1]:80"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "got {}.", "rollout.server_url={}", "['{}', 1]", 'url: "{}"', "({}, x)"])
def test_an_address_without_a_scheme_has_none(address: str, host: str, around: str) -> None:
    assert without_passwords(around.format(address)) == around.format(f"***@{host}")


def test_other_text_stays() -> None:
    for text in (
        *("http://host:8000/v1, mail me@host", "a@b", "http://host", "x: //", "error: me@host.org", "me@host:8000"),
        *("git@github.com:org/repo.git", "mailto:me@host.org", "python:3.11@sha256:0123", "reg:5000/image@sha256:01"),
        *("val:pass@8", "pass@1: 0.5", '{"a":"me@host"}', "/data/a:b/c@d", "model@ab12, step:5", "at 12:30 @ noon"),
        *("File x.py:12: in f@g", "a::b@c", "key: value@host", "hf://datasets/o/r@rev/x", "file:///a/b@c"),
    ):
        assert without_passwords(text) == text


@pytest.mark.parametrize(
    "override",
    [
        f"rollout.server_url={ADDRESS}",  # mode is not server
        f"rollout.server_url={LONG}",
        f"rollout.server_url.x={ADDRESS}",
        f"rollout.vllm=[{ADDRESS}",
        f"rollout.vllm=[{LONG}",
        f"rollout.mode={ADDRESS}",
        f"rollout.mode={LONG}",
        f"rollout.srever_url={ADDRESS}",
        f"algorithm.recipe.teacher_url={LONG}",
        f"data.path={ADDRESS}",
        f"model.path={ADDRESS}",
        f"={ADDRESS}",
    ],
)
def test_no_refusal_has_it(override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    assert main(["train", str(path), override]) == 2
    assert "s3cr3t" not in capsys.readouterr().err


def test_nor_an_error_of_the_configuration_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    with pytest.raises(ValueError, match=r"got colocated, http://\*\*\*@host:8000") as refused:
        load_config(path, [f"rollout.server_url={ADDRESS}"])
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("kind", [VLLM, TEACHER])
def test_a_server_has_its_key_from_the_environment(kind: Kind) -> None:
    match = rf"want {kind.url} such .*; got http://\*\*\*@host:8000\. The server's key is read from {kind.secret}$"
    with pytest.raises(ValueError, match=match):
        split(ADDRESS, kind)


def test_an_end_that_a_run_writes_down_and_says_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        with Reporter(tmp_path, "rlplus"):
            raise RunFailed(f"no answer of {ADDRESS}")

    assert guarded("rlplus train", fails) == 2
    assert capsys.readouterr().err == "rlplus train: no answer of http://***@host:8000\n"
    assert json.loads((tmp_path / "progress.json").read_text())["message"] == "no answer of http://***@host:8000"
