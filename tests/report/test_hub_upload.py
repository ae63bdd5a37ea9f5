"""`rlplus push`: what it uploads, to a stand-in for the hub, and when it refuses."""

import json
import os
import re
import shutil
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
import yaml
from counted_evaluations import evaluation
from hub_stub import Hub, running_hub
from safetensors.torch import load_file, save_file
from trainer_runs import run_config

from rlplus import __version__
from rlplus.tools.cli import main
from rlplus.tools.report import hidden_keys
from rlplus.train.evaluation.asked import model_identity
from rlplus.train.evaluation.results import save_results
from rlplus.train.trainer import train

TOKEN = "hf_only_the_hub_may_see_this"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(run_config(tmp_path_factory.mktemp("push"), train={"steps": 1}))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def run(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the results of an evaluation of its model, and a token."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    result = evaluation([2, 8, 0, 6], name="test", grader="exact_match", model=model_identity(finished / "model"))
    save_results(finished, {"test": result})
    return finished


def test_model_card_and_results_arrive_in_one_commit(run: Path, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """Each file as it is, the card with the results, a new repository private; the token goes to the hub only."""
    assert main(["push", str(run), "owner/name"]) == 0
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("name", "owner")
    assert created.get("visibility", created.get("private")) in (
        "private",
        True,
    )  # the key is another in older libraries
    model = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    beside = ("config.yaml", "metrics.jsonl", "run.json", "evaluation-test.json")
    expected = model | {name: (run / name).read_bytes() for name in beside}
    card = hub.files.pop("README.md").decode()
    assert hub.files == {name: content for name, content in expected.items() if name != "README.md"}
    assert card.startswith(model["README.md"].decode())
    assert f"Trained with rlplus {__version__}." in card
    assert "| test, pass@1 | 50.0 | " in card  # 16 of 32
    said = "".join(capfd.readouterr())
    assert f"in {hub.url}/owner/name" in said.replace("\n", "")
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in said


def test_a_dry_run_uploads_nothing(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "owner/name", "--dry-run"]) == 0
    assert hub.asked == []
    said = capsys.readouterr().out
    assert "Nothing was uploaded to owner/name" in said
    assert "model.safetensors" in said
    assert "## Results" in said


def test_a_hub_that_refuses_is_one_message_without_the_token(
    run: Path, hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.status = 401
    assert main(["push", str(run), "owner/name", "--public"]) == 2
    assert hub.files == {}
    out, error = capfd.readouterr()
    assert "rlplus push: " in error
    assert "401" in error
    assert "Traceback" not in error
    assert TOKEN not in out + error


def pushed(folder: Path, hub: Hub, *options: str) -> dict[str, bytes]:
    """The files in the hub after the command, which ends well."""
    assert main(["push", str(folder), "owner/name", *options]) == 0
    return hub.files


def test_only_a_models_files_are_taken_from_its_folder(
    run: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are said; every file that an export wrote is among the former."""
    exported = {path.name for path in (run / "model").iterdir()}
    copy = shutil.copytree(run, tmp_path / "copy")
    for name in (".env", "notes.txt", ".netrc", "id_rsa", "model.safetensors.bak", ".config.json"):
        (copy / "model" / name).write_text("SECRET=1")
    (copy / "model/.git").mkdir()
    assert exported <= pushed(copy, hub).keys()
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"not uploaded, as no files of a model: .config.json, .env, .git, .netrc, id_rsa, model.safetensors.bak, "
        f"notes.txt in {copy}"
    ) in said


@pytest.mark.parametrize("name", ["model/config.json", "model/extra.py", "run.json", "evaluation-x.json", "fifo"])
def test_a_link_is_refused(run: Path, tmp_path: Path, name: str, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """It may lead to any file of the user's; a pipe would be waited for."""
    copy = shutil.copytree(run, tmp_path / "copy")
    path = copy / ("model/tokenizer_config.json" if name == "fifo" else name)
    there = tmp_path / "elsewhere"
    there.write_bytes(path.read_bytes() if path.exists() else (copy / "evaluation-test.json").read_bytes())
    path.unlink(missing_ok=True)
    if name == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(there)
    assert main(["push", str(copy), "owner/name"]) == 2
    assert hub.asked == []
    assert f"{path} is a link, or no file" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("public", [False, True])
def test_a_repository_that_all_can_read_wants_the_option(
    run: Path, public: bool, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """`create_repo` leaves one that is there as it is."""
    hub.public = True
    assert main(["push", str(run), "owner/name", *(["--public"] if public else [])]) == (0 if public else 2)
    assert bool(hub.files) == public
    if not public:
        assert "it is public: want --public to upload there" in capsys.readouterr().err.replace("\n", " ")


KEYS = {
    "hf": "hf_" + "AbCdEfGh" * 4,
    "sk": "sk-proj-" + "0123456789abcdef" * 2,
    "github": "ghp_" + "0123456789abcdef" * 2 + "0123",
    "aws": "AKIA" + "ABCDEFGH01234567",
    "url": "me:pass@w/rd",
    "api_key": "plain words, 'quoted'",
    "wandb_api_key": "0123456789" * 4,
    "password": "'x'x'x'",
    "token": 'tokenizer-like "\\',
}


def test_what_looks_like_a_key_is_not_uploaded(
    run: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in the configuration nor in the texts that repeat it; other values stay as they are."""
    copy = shutil.copytree(run, tmp_path / "copy")
    config = yaml.safe_load((run / "config.yaml").read_text())
    named = {name: KEYS[name] for name in ("api_key", "wandb_api_key", "password", "token")}
    arguments = named | {"pad_token": "<pad>", "url": f"https://{KEYS['url']}@host/x", "of": "$HF_TOKEN"}
    arguments |= {"headers": [KEYS["hf"], {"authorization": KEYS["sk"]}], "secret_key": KEYS["aws"]}
    (copy / "config.yaml").write_text(yaml.safe_dump(config | {"further": arguments}))
    (copy / "run.json").write_text(json.dumps({"command": KEYS["github"], "again": KEYS["wandb_api_key"]}))
    for options in ([], ["--dry-run"]):
        pushed(copy, hub, *options)
        said = capsys.readouterr().out
        assert "9 values that look like keys are replaced by (hidden)" in " ".join(said.split())
        assert not any(key in said for key in KEYS.values())
    files = pushed(copy, hub)
    uploaded = yaml.safe_load(files["config.yaml"])
    further = uploaded.pop("further")
    assert uploaded == config
    assert further == {
        **dict.fromkeys(named, "(hidden)"), "pad_token": "<pad>", "url": "https://(hidden)@host/x", "of": "$HF_TOKEN",
        "headers": ["(hidden)", {"authorization": "(hidden)"}], "secret_key": "(hidden)",
    }  # fmt: skip
    assert json.loads(files["run.json"]) == {"command": "(hidden)", "again": "(hidden)"}


def test_a_key_that_cannot_be_hidden_is_refused(
    run: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    with (copy / "config.yaml").open("a") as file:
        file.write('further: {password: "escaped \\x41"}\n')
    assert main(["push", str(copy), "owner/name"]) == 2
    assert hub.asked == []
    assert "it has one in a form that could not be hidden: remove it" in capsys.readouterr().err.replace("\n", " ")


def test_no_setting_of_rlplus_is_taken_for_a_key() -> None:
    settings = json.loads((Path(__file__).parents[2] / "configs/schema.json").read_text())["$defs"]
    found = [name for part in settings.values() for name in part.get("properties", {})]
    assert len(found) > 150
    assert [name for name in found if hidden_keys.is_name(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "API-KEY", "apikey", "openaiApiKey", "OPENAI_API_KEY", "wandb.api_key", "AWSSecretAccessKey"),
        *("HUGGING_FACE_HUB_TOKEN", "github_token", "githubToken", "HFToken", "hf-token", "token", "accesstoken"),
        *("password", "DB_PASSWORD", "dbPassword", "clientSecret", "credentials", "Authorization", "key", "passphrase"),
        *("aws_secret_access_key", "privateKey", "ssh_key"),
    ],
)
def test_a_name_of_a_key(name: str) -> None:
    assert hidden_keys.is_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("pad_token", "eosToken", "additional_special_token", "image_token", "max_tokens", "tokens", "token_weight"),
        *(
            "key_prefix",
            "keyword",
            "prompt_key",
            "keys",
            "secretary",
            "tokenizer",
            "monkey",
            "bos_token_id",
            "eot_token",
        ),
    ],
)
def test_no_name_of_a_key(name: str) -> None:
    assert not hidden_keys.is_name(name)


SECRETS = ["abc123def", "x1y2z3-w4", "123456789"]


@pytest.mark.parametrize("written", ["config.yaml", "run.json", "evaluation-test.json", "README.md"])
def test_values_in_pairs_addresses_and_numbers(written: str) -> None:
    """The result is still YAML or JSON of the same form."""
    config = {
        "env": [f"WANDB_API_KEY={SECRETS[0]}", f"--hub-token='{SECRETS[1]}'", "PATH=/usr/bin", "HF_TOKEN=$HF_TOKEN"],
        "account_key": int(SECRETS[2]),
        "origin": f"https://host/x?access_token={SECRETS[0]}&page=123456",
        "sort": "sorted(rows, key=lambda: 5), token=whatever",
        "seeds": [7, 1234567890],
        "clone": ["https://tok3n@host/x", "ssh://git@host/x"],
        "prompt": "git the host",
    }
    text = json.dumps(config) if ".json" in written else yaml.safe_dump(config, width=1000)
    found, count = hidden_keys.without_keys({written: text}, config)
    assert count == 5
    assert yaml.safe_load(found[written]) == config | {
        "env": ["WANDB_API_KEY=(hidden)", "--hub-token='(hidden)'", "PATH=/usr/bin", "HF_TOKEN=$HF_TOKEN"],
        "account_key": "(hidden)",
        "origin": "https://host/x?access_token=(hidden)&page=123456",
        "clone": ["https://(hidden)@host/x", "ssh://(hidden)@host/x"],
    }
    assert not [*hidden_keys.named_keys(yaml.safe_load(found[written]))]


@pytest.mark.parametrize("place", ["refused", "cut", "https://hub.invalid", "offline"])
def test_a_hub_out_of_reach_is_one_line(
    place: str, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens; what listens hangs up in the middle of an answer; there is no such host; the user said so."""
    with socketserver.TCPServer(("127.0.0.1", 0), HangsUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cut, refused = (f"http://127.0.0.1:{port}" for port in (server.server_address[1], processes.free_port()))
        url = {"cut": cut, "refused": refused}.get(place, "https://hub.invalid")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", place == "offline")
        assert main(["push", str(run), "owner/name"]) == 2
        server.shutdown()
    out, error = capfd.readouterr()
    assert error.startswith(f"rlplus push: owner/name could not be uploaded to {url}: ")
    assert error.count("\n") == 1, error
    assert TOKEN not in out + error


class HangsUp(socketserver.BaseRequestHandler):
    """A server that ends every connection behind the start of its answer."""

    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no weights", "want a finished run, with the weights in its model/; .* has none"),
        ("resumed", "want a finished run, with the weights in its model/; .* has none"),
        ("another model", "the results of test in .* are another model's: run `rlplus eval` again"),
        ("another step's model", "want the model that the run wrote; .*model has another"),
        ("no run", "want the folder of a run, with config.yaml and metrics.jsonl"),
        ("name", "want the repository as OWNER/NAME; got 'owner//name'"),
    ],
)
def test_what_is_no_finished_run_is_refused(
    run: Path, tmp_path: Path, fault: str, message: str, hub: Hub,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    if fault == "no weights":
        (copy / "model/model.safetensors").unlink()
    if fault == "resumed":  # and not finished again: the model is an earlier step's
        (copy / "checkpoints/exported").unlink()
    if fault == "another model":
        (copy / "model/config.json").write_text(json.dumps({"model_type": "qwen2"}))
    if fault == "another step's model":
        weights = {name: weight + 1 for name, weight in load_file(copy / "model/model.safetensors").items()}
        save_file(weights, copy / "model/model.safetensors", {"format": "pt"})
        (copy / "evaluation-test.json").unlink()
    if fault == "no run":
        (copy / "config.yaml").unlink()
    assert main(["push", str(copy), "owner//name" if fault == "name" else "owner/name"]) == 2
    assert hub.asked == []
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=" ".join)
@pytest.mark.parametrize("repository", ["notaname", "a/b/c", "/name", "owner/", "an owner/name"])
def test_the_repository_is_looked_at_first(
    repository: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(tmp_path / "no run"), repository, *options]) == 2
    assert f"want the repository as OWNER/NAME; got {repository!r}" in capsys.readouterr().err
