"""Folders that `rlplus report` cannot read are named at once, with the way on."""

from pathlib import Path

from answers import answered_without_torch


def test_folders_are_checked_without_torch(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("runs/b/metrics.jsonl", "runs/a/evaluation-amc.json", "runs/b/config.yaml", "runs/c/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("runs/a", "killed"):
        (tmp_path / name / "samples").mkdir(parents=True)
        (tmp_path / name / "samples/evaluation-amc-0-000000.parquet").touch()
    runs, below = str(tmp_path / "runs"), [str(tmp_path / "runs" / name) for name in "abc"]
    cases = [
        (["report", "nowhere"], 2, f"got nowhere: no such folder (current directory: {Path.cwd()})"),
        (["samples", "nowhere"], 2, "got nowhere: no such folder"),
        (["report", f"{tmp_path}/file"], 2, "it is a file"),
        (["report", f"{tmp_path}/empty"], 2, "no evaluation-BENCHMARK.json; nor is there one below it"),
        (["report", runs], 2, f"no metrics.jsonl and no evaluation-BENCHMARK.json; below it are {', '.join(below)}\n"),
        (["samples", runs], 2, f"below it are {', '.join(below)}\n"),
        (["report", below[2]], 2, f"{below[2]} has no metrics.jsonl, which the first step writes"),
        (["report", f"{tmp_path}/killed"], 2, "has samples only: run the same `rlplus eval` again"),
        (["samples", below[0], "--step", "4"], 2, "has only an evaluation's, which is printed without --step"),
        (["report", "a.json", below[1]], 2, "want one file to report on a comparison; got a.json"),
        (["samples", below[1]], 2, "has none (log.samples_every says how often: 0 is never)"),
    ]
    answered_without_torch(cases)
