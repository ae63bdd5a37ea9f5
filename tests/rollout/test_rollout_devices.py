"""Settings of the rollout engine that exclude each other, and how its GPUs are shared out."""

from typing import Any

import pytest
import torch

import rlplus.train.rollout
from rlplus.train.config import RolloutConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "server"}, "mode server and server_url belong together; got server, None"),
        ({"server_url": "http://x"}, "belong together; got colocated, http://x"),
        (
            {"mode": "server", "server_url": "http://x", "engine": "transformers"},
            "one of vLLM or SGLang: want engine",
        ),
        ({"mode": "server", "server_url": "http://x", "tensor_parallel_size": 2}, "own --tensor-parallel-size"),
        ({"mode": "process", "sleep": True}, "sleep is for vLLM in mode colocated; got engine auto in mode process"),
        ({"engine": "transformers", "sleep": True}, "sleep is for vLLM in mode colocated; got engine transformers"),
        ({"engine": "transformers", "tensor_parallel_size": 2}, "tensor_parallel_size 2 needs vLLM"),
        ({"server_url": "localhost:8000"}, "pattern"),
        ({"temperature": 0.001}, "greater than or equal to 0.01"),
    ],
)
def test_settings_that_exclude_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(max_response_length=8, **changes)


@pytest.mark.parametrize(
    ("mode", "size", "world", "local", "gpus", "message"),
    [
        ("colocated", 2, 4, 4, 4, None),
        ("colocated", 3, 4, 4, 4, "to divide the 4 ranks, and the 4 of each machine; got 3"),
        ("colocated", 4, 4, 2, 2, "to divide the 4 ranks, and the 2 of each machine; got 4"),
        ("process", 1, 4, 4, 8, None),
        ("process", 1, 4, 4, 7, "takes 8 GPUs; there are 7"),
        ("process", 2, 4, 2, 6, None),
        ("process", 2, 4, 2, 4, "tensor_parallel_size 2 and 2 ranks on this machine takes 6 GPUs; there are 4"),
    ],
)
def test_tensor_parallel_size_fits_ranks_and_gpus(
    monkeypatch: pytest.MonkeyPatch, mode: Any, size: int, world: int, local: int, gpus: int, message: str | None
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = RolloutConfig(engine="vllm", mode=mode, tensor_parallel_size=size, max_response_length=8)
    if message is None:
        rlplus.train.rollout._check_devices(config)
        return
    with pytest.raises(ValueError, match=message):
        rlplus.train.rollout._check_devices(config)


def test_an_engine_process_sees_only_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlplus.train.rollout.process_engine import _environment

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    seen = []
    for local in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        environment = _environment(2)
        assert not {"LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & environment.keys()
        seen.append(environment["CUDA_VISIBLE_DEVICES"])
    assert seen == ["2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2")
    assert _environment(2)["CUDA_VISIBLE_DEVICES"] == "3,2"
