"""`rlplus env`: the contents of a bug report."""

import json
from types import SimpleNamespace

import pytest
import torch

import rlplus
from rlplus.loss.backends import selection
from rlplus.loss.guard import verdicts
from rlplus.loss.guard.verdicts import Verdict
from rlplus.tools.cli import bug_report, main


def test_it_needs_neither_a_gpu_nor_a_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPLUS_CACHE", "/verdicts")
    assert main(["env"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["rlplus"] == rlplus.__version__
    assert set(found["versions"]) >= {"cuda", "triton", "driver", "kernels", "python", "system", "transformers"}
    assert found["variables"]["RLPLUS_CACHE"] == "/verdicts" == found["verdicts"]
    assert found["devices"]["cpu"]["bfloat16"].startswith(("cpp: ", "torch: "))
    assert torch.cuda.is_available() or list(found["devices"]) == ["cpu"]


def test_each_cuda_device_has_its_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA Test", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(selection, "_on_cuda", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("properties", properties), ("name", "NVIDIA Test"), ("capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, f"get_device_{name}", lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def verdict_on(device: torch.device, dtype: torch.dtype) -> Verdict:
        if device.index:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Verdict("passed", "") if dtype == torch.bfloat16 else Verdict("refused", "loss is not finite")

    monkeypatch.setattr(verdicts, "verdict_on", verdict_on)
    first, second = (bug_report.environment()["devices"][f"cuda:{index}"] for index in range(2))
    assert first["bfloat16"] == "triton: its self-check passed on NVIDIA Test for bfloat16"
    assert first["float32"].startswith("torch: the self-check of backend 'triton' on NVIDIA Test for float32: loss is")
    assert (first["name"], first["compute capability"], first["memory"]) == ("NVIDIA Test", "9.0", "80.0 GiB")
    assert second["bfloat16"] == "CUDA out of memory"


def test_a_backend_that_does_not_fit_is_said_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUS_BACKEND", "torhc")
    assert "got 'torhc'" in bug_report.environment()["devices"]["cpu"]["float32"]


def test_a_plan_needs_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "train"):
        with pytest.raises(SystemExit):
            main([command])
        assert "the following arguments are required: config\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--env"], "plan has no --env: see rlplus env\n"),
        (["report", "runs/first", "--show=3", "--wrong"], "report has no --show: see rlplus samples --help\n"),
    ],
)
def test_commands_that_were_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
