"""vLLM's own ways to a server, nccl and ipc: arguments and order of the calls, with stand-ins for what needs a GPU."""

import base64
import pickle
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from rollout_models import save, tiny_model
from servers import FINISHING, INIT, SHUTDOWN, STARTING, FakeServer, connect

from rlplus.train.rollout import RunFailed

pytestmark = pytest.mark.vllm


@pytest.fixture
def nccl(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine with a broadcast that only reads."""
    from vllm.distributed.weight_transfer import nccl_engine

    trainer = nccl_engine.NCCLTrainerWeightTransferEngine
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: SimpleNamespace(destroy=pytest.fail))
    monkeypatch.setattr(trainer, "_broadcast", lambda _, source, meta: list(source))
    fake.info["weight_transfer_config"] = {"backend": "nccl"}


def test_nccl(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broadcast runs while the server's call does, from a source that declares what it gives, in its order."""
    from vllm.distributed.weight_transfer import nccl_engine

    sent: list[tuple[str, torch.Tensor]] = []
    ended: list[str] = []
    group = SimpleNamespace(destroy=lambda: ended.append("group"))

    def broadcast(engine: Any, source: Any, meta: list[Any]) -> None:
        assert fake.updating
        assert engine.packed
        assert engine.model_update_group is group
        for want, (name, weight) in zip(meta, source, strict=True):
            assert (want.name, want.dtype, want.shape) == (name, weight.dtype, weight.shape)
            sent.append((name, weight.clone()))

    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_broadcast", broadcast)
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_post_send_sync", lambda *_: None, raising=False)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group)
    model = tiny_model(tied=False)
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"its way of taking weights is rlplus; want nccl, for rollout.transfer"):
        connect(fake.url, tmp_path, transfer="nccl")
    fake.info["weight_transfer_config"] = {"backend": "nccl"}
    engine: Any = connect(fake.url, tmp_path, transfer="nccl", push_bucket_mb=1)
    assert fake.init["master_address"] == "127.0.0.1"
    assert (fake.init["rank_offset"], fake.init["world_size"], fake.init["packed"]) == (1, 1 + 2, True)
    assert fake.init["packed_buffer_size_bytes"] == 2**20
    engine.push_weights(model.named_parameters(), 3)
    assert fake.calls[1:] == [*STARTING, "/update_weights", *FINISHING]
    assert fake.version == "3"
    assert fake.update["names"] == [name for name, _ in model.named_parameters()]
    assert set(fake.update["dtype_names"]) == {"float32"}
    assert fake.update["shapes"] == [list(p.shape) for p in model.parameters()]
    assert all(torch.equal(weight, p) for (_, weight), p in zip(sent, model.parameters(), strict=True))
    engine.close()
    assert fake.calls[-1] == SHUTDOWN
    assert ended == ["group"]


def test_nccl_after_a_push_that_failed(fake: FakeServer, tmp_path: Path, nccl: Any, caplog: Any) -> None:
    """Neither side repairs anything, and none is asked to end: they may wait for each other."""
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine: Any = connect(fake.url, tmp_path, transfer="nccl")
    fake.fail = "/finish_weight_update"
    with pytest.raises(RunFailed, match="version 5: POST /finish_weight_update was answered with 500"):
        engine.push_weights(model.named_parameters(), 5)
    assert "the server does not take the weights: POST /finish_weight_update" in caplog.text, "NCCL may wait on"
    mixture = r"holds a mixture of two models after a push that failed\. Start it again"
    with pytest.raises(RunFailed, match=mixture):
        engine.push_weights(model.named_parameters(), 6)
    engine.close()
    assert SHUTDOWN not in fake.calls
    with pytest.raises(ValueError, match="it is paused, as after a push that failed half-way"):
        connect(fake.url, tmp_path, transfer="nccl")


@pytest.mark.parametrize("spoil", ["order", "dtype"])
def test_vllms_engines_send_what_was_declared(fake: FakeServer, tmp_path: Path, nccl: Any, spoil: str) -> None:
    """Nothing is cast: the server takes names and dtypes from a list of them, which comes before the weights."""
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine: Any = connect(fake.url, tmp_path, transfer="nccl")
    weights = list(model.named_parameters())
    wrong = weights[::-1] if spoil == "order" else [(name, p.bfloat16()) for name, p in weights]
    got = "lm_head.weight in torch.float32" if spoil == "order" else "model.embed_tokens.weight in torch.bfloat16"
    with pytest.raises(ValueError, match=rf"model.dtype, model.embed_tokens.weight in torch.float32 next; got {got}"):
        engine.push_weights(wrong, 7)
    with pytest.raises(RunFailed, match="holds a mixture of two models"):
        engine.push_weights(weights, 8)
    engine.close()


def test_a_server_that_does_not_join(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own wait for its workers, at a real address, here of 20 s, ends with other words; a refusal ends it."""
    from vllm.distributed import utils as distributed

    fake.info["weight_transfer_config"] = {"backend": "nccl"}
    save(tiny_model(tied=False), tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    create = distributed.create_tcp_store
    limit = {"timeout": timedelta(seconds=20)}
    monkeypatch.setattr(distributed, "create_tcp_store", lambda *where, **how: create(*where, **how | limit))
    join = r"want its 2 workers to join this process by nccl at 127.0.0.1:\d+ within 1 s \(half of rollout"
    with pytest.raises(ValueError, match=rf"{join}.push_timeout_s\); got: they have not, .* Does its machine reach"):
        connect(fake.url, tmp_path, transfer="nccl", push_timeout_s=2.0)
    fake.fail = INIT
    with pytest.raises(ValueError, match=r"started with: .*nccl.*; POST /init_weight.* was answered with 500"):
        connect(fake.url, tmp_path, transfer="nccl", push_timeout_s=120.0)
    fake.fail, fake.odd = "", {"/version": {"version": "0.31.2"}}
    with pytest.raises(ValueError, match=r"trainer's vLLM 0.32.\d at both ends, for .*transfer nccl; it has 0.31.2"):
        connect(fake.url, tmp_path, transfer="nccl")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"rollout.transfer nccl needs vLLM beside the trainer, too: pip install"):
        connect(fake.url, tmp_path, transfer="nccl")


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


RANK = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from rollout_models import tiny_model
from servers import connect
from rlplus.train.rollout import RunFailed
from vllm.distributed.weight_transfer import ipc_engine
from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

def producer(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):
    for name, weight in iterator:
        yield PackedIpcChunk([name], [list(weight.shape)], ["float32"], [weight.nbytes], {gpu_uuid: ("handle", name)})

dist.init_process_group("gloo")
ipc_engine.packed_ipc_producer = producer
torch.accelerator.current_device_index = lambda: 0
torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=f"GPU-{dist.get_rank()}")
torch.cuda.ipc_collect = torch.cuda.synchronize = lambda: None
engine = connect(sys.argv[1], Path(sys.argv[2]), transfer="ipc", push_timeout_s=60.0)
for version in range(3, 6):
    try:
        engine.push_weights(tiny_model(tied=False).named_parameters(), version)
        print(f"version {version} is there")
    except RunFailed as error:
        print(error)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_ipc_stay_together_when_the_server_refuses(fake: FakeServer, tmp_path: Path) -> None:
    """They meet after every bucket, in vLLM's code, and at the end of a push, in ours."""
    save(tiny_model(tied=False), tmp_path)
    fake.info["weight_transfer_config"] = {"backend": "ipc"}
    answer, updates = fake.answer, []

    def refuse_the_second_push(path: str, body: Any) -> Any:
        if path == "/update_weights":
            handles = pickle.loads(base64.b64decode(body["update_info"]["ipc_handles_pickled"]))
            assert sorted(handles) == ["GPU-0", "GPU-1"]
            updates.append(path)
        return None if len(updates) == len(names) + 3 and path == "/update_weights" else answer(path, body)

    names = [name for name, _ in tiny_model(tied=False).named_parameters()]
    fake.answer = refuse_the_second_push  # type: ignore[method-assign]
    said = processes.ranks([sys.executable, "-c", RANK, fake.url, str(tmp_path)], 2)
    assert said[0] == said[1]
    lines = said[0].splitlines()
    assert lines[0] == "version 3 is there"
    assert "did not take the weights of version 4: POST /update_weights was answered with 500" in lines[1]
    assert "holds a mixture of two models after a push that failed. Start it again" in lines[2]
    assert len(updates) == len(names) + 3, "nothing more is asked of a server that refused"
