"""Ways of the weights to a vLLM server: `rollout.transfer`. All of them are vLLM's weight transfer (vLLM 0.32).

`memory` is the trainer's twin of `rlplus.rollout.receiver`, for any device. `nccl` and `ipc` are vLLM's own, for GPUs;
of these only the arguments and the order of the calls are tested, they have never run.
"""

import base64
import json
import pickle
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rlplus.rollout.clock import rank
from rlplus.rollout.parcels import Memory, parcels
from rlplus.rollout.server_http import Refused, Requests, parsed

CLOSE_S = 2.0  # limit for telling the server that this run has ended, which it also sees by itself


class Control:
    """The calls of a push to a server, vLLM's VLLMWeightSyncClient. OSError where one fails.

    The server is paused from the first to the last call of a push, also for others' requests; one whose push failed
    stays paused, as it then holds a mixture of two models.
    """

    version = ""  # the next push's

    def __init__(self, http: Requests, timeout_s: float) -> None:
        self._http, self._timeout_s = http, timeout_s

    def workers(self) -> int:
        """Number of the server's GPUs."""
        return int(parsed(self._http.send("GET", "/get_world_size", timeout_s=self._timeout_s))["world_size"])

    def paused(self) -> bool:
        return bool(parsed(self._http.send("GET", "/is_paused", timeout_s=self._timeout_s))["is_paused"])

    def own_address(self) -> str:
        return self._http.own_address()

    def _post(self, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        return self._http.send("POST", path, body, timeout_s=timeout_s or self._timeout_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/pause?mode=keep")
        self._post("/start_weight_update")

    def abandon(self) -> None:
        """End an update whose trainer was killed: vLLM ends one at a call that fails, and knows no other way."""
        with suppress(Refused):
            self._post("/update_weights", {"update_info": {}})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        handles = update_info.get("ipc_handles")
        if handles is not None:  # no JSON; the server reads it with VLLM_ALLOW_INSECURE_SERIALIZATION=1 only
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {name: value for name, value in update_info.items() if name != "ipc_handles"}
            update_info["ipc_handles_pickled"] = pickled
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update")
        reset = parsed(self._post("/reset_prefix_cache?reset_external=true"))  # other caches of keys and values, too
        if reset != {"success": True}:
            raise OSError(f"it did not reset its prefix cache ({reset}); does somebody else use it?")
        self._post("/update_weight_version", {"new_version": weight_version or self.version})
        self._post("/resume")

    def shutdown(self) -> None:
        with suppress(OSError):
            self._post("/shutdown_weight_transfer_engine", timeout_s=CLOSE_S)


class MemoryPush:
    """Pushes through memory of this process, a bucket at a time. The server must run on this machine, as this user."""

    def __init__(self, control: Control, shapes: Mapping[str, torch.Size], bucket_bytes: int) -> None:
        self._control, self._bucket_bytes, self._run = control, bucket_bytes, secrets.token_hex(8)
        memory = Memory()
        said = {"run": self._run, "shapes": {name: list(shape) for name, shape in shapes.items()}}
        memory.write(json.dumps(said).encode())
        parcel = memory.seal()
        try:
            control.init_weight_transfer_engine({"run": self._run, "pid": parcel.pid, "fd": parcel.fd})
        finally:
            memory.close()

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            self._control.start_weight_update()
        except Refused:
            self._control.abandon()
            self._control.start_weight_update()
        for parcel in parcels(weights, self._bucket_bytes, self._run):
            self._control.update_weights({"parcel": asdict(parcel)})
        self._control.finish_weight_update()


class LibraryPush:
    """Pushes by vLLM's own engine `nccl` or `ipc`, which all ranks call; it gets weights in the engine's dtype."""

    def __init__(
        self, kind: str, control: Control, shapes: Mapping[str, torch.Size], dtype: str, bucket_bytes: int
    ) -> None:
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        wanted: torch.dtype = getattr(torch, dtype)

        class Source(WeightSource):
            weights: Iterable[tuple[str, Tensor]] = ()

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, wanted, tuple(shape)) for name, shape in shapes.items()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for want, (name, weight) in zip(shapes, self.weights, strict=True):
                    if name != want:  # the server takes names from `metadata`
                        raise ValueError(f"want parameters in the model's order, {want} next; got {name}")
                    yield name, weight.to(wanted)

        largest = max(shape.numel() for shape in shapes.values()) * wanted.itemsize
        buffer = max(bucket_bytes, largest)  # a buffer that is too small for a parameter is an error
        self._source = Source()
        info: Any
        if kind == "ipc":
            info = IPCTrainerInitInfo(rank=rank(), packed=True, packed_buffer_size_bytes=buffer)
        else:
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            info = NCCLTrainerInitInfo(
                rank=rank(),
                master_address=control.own_address(),
                master_port=port,
                world_size=1 + control.workers(),
                packed_buffer_size_bytes=buffer,
            )
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=control, source=self._source)

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._source.weights = weights
        self._engine.send_weights()
