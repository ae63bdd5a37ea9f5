"""The server: GET on this machine only, nothing of the file system, text that stays text."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import processes
import pytest
from watched_runs import HOSTILE, keeps, run_at, says, served

from rlplus.tools.cli import main
from rlplus.tools.watch import FollowedRun, WatchServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = run_at(tmp_path / "run", 8)
    says(folder, message=HOSTILE, state="failed")
    keeps(folder, 8)
    return folder


def ask(
    server: WatchServer, path: str = "/", method: str = "GET", token: str | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    query = urlsplit(server.url).query if token is None else token
    connection.request(method, f"{path}{'&' if '?' in path else '?'}{query}", headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def test_the_parts_of_the_page(folder: Path) -> None:
    with served(FollowedRun("run", folder)) as server:
        response, page = ask(server)
        assert (response.status, response.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
        parts = {name: json.loads(ask(server, f"/{name}.json?x=1")[1]) for name in ("now", "curves", "samples")}
    assert set(parts["now"]["versions"]) == {"curves", "samples"}
    assert parts["now"]["title"] == "40% run"
    assert "step 8 of 20 done" in parts["now"]["html"]
    assert "Training reward" in parts["curves"]["html"]
    assert 'data-moment="step 8"' in parts["samples"]["html"]
    for name in ("curves", "samples"):
        assert parts[name]["version"] == parts["now"]["versions"][name]
        assert parts[name]["html"] in page
        assert f'data-version="{parts[name]["version"]}"' in page


def test_a_part_changes_its_version_with_what_it_shows(folder: Path) -> None:
    with served(FollowedRun("run", folder)) as server:
        seen = [json.loads(ask(server, "/now.json")[1])["versions"]]
        keeps(folder, 9)
        seen.append(json.loads(ask(server, "/now.json")[1])["versions"])
        run_at(folder, 9)
        seen.append(json.loads(ask(server, "/now.json")[1])["versions"])
    assert len({each["samples"] for each in seen}) == 3
    assert [seen[0]["curves"] == each["curves"] for each in seen] == [True, True, False]


def test_what_a_run_wrote_stays_text(folder: Path) -> None:
    """Samples, a message, a label and the warnings do; no script but the page's own may run anyway."""
    with served(FollowedRun(HOSTILE, folder)) as server:
        response, page = ask(server)
        now = json.loads(ask(server, "/now.json")[1])["html"]
    assert page.count("<script") == 1
    assert "<img" not in page + now
    assert page.count("&lt;script&gt;") >= 4
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert re.fullmatch(
        r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/=]{44}'; connect-src &#39;self&#39;",
        policy,
    )
    assert "frame-ancestors 'none'" in (response.getheader("Content-Security-Policy") or "")
    for name, value in (
        ("X-Content-Type-Options", "nosniff"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cache-Control", "no-store"),
        ("Referrer-Policy", "no-referrer"),
    ):
        assert response.getheader(name) == value


def test_nothing_but_the_page_is_served(folder: Path) -> None:
    with served(FollowedRun("run", folder)) as server:
        for path in ("/config.yaml", "/../config.yaml", "/%2e%2e/etc/passwd", "//etc/passwd", "/now.json/..", "/now"):
            assert ask(server, path)[0].status == 404, path
        assert ask(server, "/favicon.ico")[0].status == 204


def test_only_who_knows_the_token_is_answered(folder: Path) -> None:
    """Other users of the machine reach the port; what they see does not depend on the path, nor is the token in it."""
    with served(FollowedRun("run", folder)) as server, served(FollowedRun("run", folder)) as other:
        own, others = (urlsplit(each.url).query for each in (server, other))
        assert re.fullmatch(r"token=[\w-]{32}", own)
        for token in ("", "token=", others, own[:-1], own + "x", own.upper(), f"{own}&token=x", "token=%ff", "x=1"):
            for path in ("/", "/now.json", "/samples.json", "/none"):
                response, text = ask(server, path, token=token)
                assert response.status == 403, (token, path)
                assert text == "want the address that `rlplus watch` printed, with its token\n"
        assert own.removeprefix("token=") not in ask(server)[1]
        assert ask(server, token=f"x=1&{own}")[0].status == 200


@pytest.mark.parametrize("name", ["progress.json", "metrics.jsonl", "config.yaml", "samples/step-000009.parquet"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, folder: Path, name: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    code = (
        "import sys; from pathlib import Path; from rlplus.tools.watch import FollowedRun, View; "
        "view = View([FollowedRun('run', Path(sys.argv[1]))]); view.update(); view.page()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], timeout=processes.PATIENCE_S)
    assert done.returncode == 0
    path.unlink()
    path.symlink_to(tmp_path / "real")
    (tmp_path / "real").write_text("")
    FollowedRun("run", folder).update()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(folder: Path, method: str) -> None:
    with served(FollowedRun("run", folder)) as server:
        response, _ = ask(server, "/", method)
    assert (response.status, response.getheader("Allow")) == (405, "GET")


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:8420", 200), ("localhost", 200), ("LOCALHOST:9000", 200), ("[::1]:80", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example", 403), ("localhost:80@evil.example", 403), ("", 403), ("evil.example:8420", 403)],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here_is_refused(folder: Path, host: str, status: int) -> None:
    """A tunnel has another port, so the port may be any."""
    with served(FollowedRun("run", folder)) as server:
        response, text = ask(server, "/samples.json", Host=host)
    assert response.status == status
    assert ("script" in text) == (status == 200)


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: x\r\n"])
def test_a_request_with_no_host_or_two_is_refused(folder: Path, hosts: bytes) -> None:
    with served(FollowedRun("run", folder)) as server, socket.socket() as connection:
        connection.connect(("127.0.0.1", server.server_port))
        connection.sendall(b"GET / HTTP/1.1\r\n" + hosts + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.0 403")


def test_it_listens_on_this_machine_alone_and_writes_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with served(FollowedRun("run", folder)) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server)[0].status == 200
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_page_that_cannot_be_made_is_said_and_made_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(FollowedRun("run", folder)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(FollowedRun, "update", lambda self: 1 / 0)
            response, text = ask(server, "/now.json")
            assert (response.status, response.getheader("Content-Type")) == (500, "text/plain; charset=utf-8")
            assert "the page could not be made: ZeroDivisionError" in text
        assert ask(server, "/now.json")[0].status == 200


def test_the_command_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, words in (
            (
                [str(folder / "none")],
                f"want the folder of a run, its output_dir; got {folder / 'none'}: no such folder",
            ),
            ([str(folder), "--port", "70000"], "want --port from 0 to 65535; got 70000"),
            (
                [str(folder), "--port", port],
                f"want --port a free one, 0 takes any; {port} is none: Address already in use",
            ),
        ):
            assert main(["watch", *arguments]) == 2
            assert f"rlplus watch: {words}" in capsys.readouterr().err
