"""vLLM's own ways to a server, nccl and ipc: arguments and order of the calls, with stand-ins for what needs a GPU."""

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_models import save, tiny_model
from servers import FINISHING, STARTING, FakeServer, connect

from rlplus.rollout import RunFailed

pytestmark = pytest.mark.vllm


def test_nccl(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broadcast runs while the server's call does, from a source that declares what it gives, in its order."""
    from vllm.distributed.weight_transfer import nccl_engine

    sent: list[tuple[str, torch.Tensor]] = []

    def broadcast(engine: Any, source: Any, meta: list[Any]) -> None:
        assert fake.updating
        assert engine.packed
        assert engine.model_update_group == "group"
        for want, (name, weight) in zip(meta, source, strict=True):
            assert (want.name, want.dtype, want.shape) == (name, weight.dtype, weight.shape)
            sent.append((name, weight.clone()))

    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_broadcast", broadcast)
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_post_send_sync", lambda *_: None, raising=False)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: "group")
    model = tiny_model(tied=False)
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"its way of taking weights is rlplus; want nccl, for rollout.transfer"):
        connect(fake.url, tmp_path, transfer="nccl")
    fake.info["weight_transfer_config"] = {"backend": "nccl"}
    engine: Any = connect(fake.url, tmp_path, transfer="nccl", push_bucket_mb=1)
    assert fake.init["master_address"] == "127.0.0.1"
    assert (fake.init["rank_offset"], fake.init["world_size"], fake.init["packed"]) == (1, 1 + 2, True)
    assert fake.init["packed_buffer_size_bytes"] == 2**20
    engine.push_weights(((name, p.double()) for name, p in model.named_parameters()), 3)
    assert fake.calls[1:] == [*STARTING, "/update_weights", *FINISHING]
    assert fake.version == "3"
    assert fake.update["names"] == [name for name, _ in model.named_parameters()]
    assert set(fake.update["dtype_names"]) == {"float32"}
    assert fake.update["shapes"] == [list(p.shape) for p in model.parameters()]
    assert all(torch.equal(weight, p) for (_, weight), p in zip(sent, model.parameters(), strict=True))
    fake.fail = "/finish_weight_update"
    with pytest.raises(RunFailed, match="version 5: POST /finish_weight_update was answered with 500"):
        engine.push_weights(model.named_parameters(), 5)
    mixture = r"holds a mixture of two models after a push that failed\. Start it again"
    with pytest.raises(RunFailed, match=mixture):
        engine.push_weights(model.named_parameters(), 6)
    engine.close()
    with pytest.raises(ValueError, match="it is paused, as after a push that failed half-way"):
        connect(fake.url, tmp_path, transfer="nccl")
    fake.fail, fake.paused, fake.updating = "", False, False  # started again
    engine = connect(fake.url, tmp_path, transfer="nccl")
    with pytest.raises(ValueError, match=r"in the model's order, model.embed_tokens.weight next; got lm_head.weight"):
        engine.push_weights(reversed(list(model.named_parameters())), 7)
    with pytest.raises(RunFailed, match=mixture):
        engine.push_weights(model.named_parameters(), 8)
    engine.close()


def test_ipc(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions of GPU memory go to the server pickled, a buffer at a time, as vLLM's own client sends them."""
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    def producer(iterator: Any, gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Iterator[Any]:
        assert gpu_uuid == "GPU-1"
        assert buffer_size_bytes == 2**20
        for name, weight in iterator:
            shape, kind = list(weight.shape), str(weight.dtype).removeprefix("torch.")
            yield PackedIpcChunk([name], [shape], [kind], [weight.nbytes], {gpu_uuid: ("handle", name)})

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", producer)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    fake.info["weight_transfer_config"] = {"backend": "ipc"}
    model = tiny_model(tied=True)
    save(model, tmp_path)
    engine = connect(fake.url, tmp_path, transfer="ipc", push_bucket_mb=1)
    assert fake.init == {"packed": True}
    engine.push_weights(model.named_parameters(), 3)
    names = [name for name, _ in model.named_parameters()]
    assert fake.calls[1:] == [*STARTING, *["/update_weights"] * len(names), *FINISHING]
    assert fake.update["names"] == names[-1:]
    assert "ipc_handles" not in fake.update or fake.update["ipc_handles"] is None
    assert pickle.loads(base64.b64decode(fake.update["ipc_handles_pickled"])) == {"GPU-1": ("handle", names[-1])}
    engine.close()
