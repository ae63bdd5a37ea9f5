"""vLLM's own ways of weights to a server, `nccl` and `ipc` (vLLM 0.32), for GPUs.

Arguments, order of the calls, limits and failures are tested with stand-ins for what needs a GPU; they have never run.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from rlplus.common.errors import install_command
from rlplus.train.rollout.push import rank
from rlplus.train.rollout.server_http import RESTART, Refused
from rlplus.train.rollout.server_push import TIMEOUT, Control

logger = logging.getLogger(__name__)


class LibraryPush:
    """Pushes by vLLM's engine `nccl` or `ipc`, which all ranks make and call; weights have model.dtype, as declared.

    OSError where the server does not take part. A push that fails leaves server and engine unusable.
    """

    def __init__(
        self, kind: str, control: Control, shapes: Mapping[str, torch.Size], dtype: str, bucket_bytes: int
    ) -> None:
        _check_versions(kind, control)
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        wanted: torch.dtype = getattr(torch, dtype)
        largest = max(shape.numel() for shape in shapes.values()) * wanted.itemsize
        buffer = max(bucket_bytes, largest)  # a buffer that is too small for a parameter is an error
        self._control = control
        self._source = _source(shapes, wanted)
        self._whole = True
        self._client = _Client(control, holds=kind == "ipc")
        info: Any
        if kind == "ipc":
            info = IPCTrainerInitInfo(rank=rank(), packed=True, packed_buffer_size_bytes=buffer)
            self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self._source)
            return
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        workers = control.workers()
        address = control.own_address()
        info = NCCLTrainerInitInfo(
            rank=rank(),
            master_address=address,
            master_port=port,
            world_size=1 + workers,
            packed_buffer_size_bytes=buffer,
        )
        self._engine = self._client.joined(
            lambda: WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self._source),
            f"its {workers} workers to join this process by nccl at {address}:{port}",
        )

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._source.weights = weights
        self._whole = False
        self._engine.send_weights()
        self._client.check()
        if rank() == 0:
            self._control.resume(version)
        self._whole = True

    def close(self) -> None:
        """End both sides of the transfer. After a push that failed neither can be: they may wait for each other."""
        if not self._whole:
            return
        if rank() == 0:
            try:
                self._control.shutdown()
            except OSError as error:
                logger.warning("the server was not told that this run pushes no more: %s", error)
        self._engine.shutdown()


def _check_versions(kind: str, control: Control) -> None:
    """OSError where the trainer has no vLLM, or another than the server: the two talk in vLLM's own terms."""
    try:
        import vllm
    except ImportError as error:
        raise OSError(
            f"rollout.transfer {kind} needs vLLM beside the trainer, too: {install_command('vllm')}"
        ) from error
    ours = vllm.__version__
    theirs = control.library_version()
    if ours.partition("+")[0] != theirs.partition("+")[0]:  # the rest names a build
        raise OSError(f"want the trainer's vLLM {ours} at both ends, for rollout.transfer {kind}; it has {theirs}")


def _source(shapes: Mapping[str, torch.Size], wanted: torch.dtype) -> Any:
    """A WeightSource of whatever its `weights` are at the time. ValueError at one that is not as declared."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):
        weights: Iterable[tuple[str, Tensor]] = ()

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, wanted, tuple(shape)) for name, shape in shapes.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for want, (name, weight) in zip(shapes, self.weights, strict=True):
                if (name, weight.dtype) != (want, wanted):  # the server takes both from `metadata`
                    raise ValueError(
                        f"want parameters in the model's order and in model.dtype, {want} in {wanted} next; got {name} "
                        f"in {weight.dtype}"
                    )
                yield name, weight

    return Source()


class _Client:
    """The server's end for vLLM's engine: `Control`, but for its failures.

    Ranks in `ipc` wait for each other after every bucket. So with `holds` a failure is held until `check`, when all
    ranks are through, and the server is asked nothing more. With `nccl` a failure of the server leaves the broadcast
    waiting for it: it is logged at once, as the push's clock, which ends the wait, does not know of it.
    """

    def __init__(self, control: Control, *, holds: bool) -> None:
        self._control = control
        self._holds = holds
        self._failure: Exception | None = None
        self._joined: SimpleQueue[Any] = SimpleQueue()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self._control.init_weight_transfer_engine(init_info)
        except Exception as error:
            self._joined.put(error)
            raise

    def start_weight_update(self) -> None:
        self._call(self._control.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call(self._control.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._control.finish_weight_update, weight_version)

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._failure is not None:
            return
        try:
            call(*arguments)
        except Exception as error:
            logger.error("the server does not take the weights: %s", error)
            if not self._holds:
                raise
            self._failure = error

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def joined(self, join: Callable[[], Any], want: str) -> Any:
        """The engine, which `join` makes; OSError at the server's refusal, or when the control's limit has passed.

        `join` has no limit that we could set and cannot be interrupted: a thread of it is left behind then.
        """
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def body() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # each thread has its own
                self._joined.put(join())
            except Exception as error:
                self._joined.put(error)

        threading.Thread(target=body, daemon=True).start()
        limit_s = self._control.timeout_s
        try:
            outcome = self._joined.get(timeout=limit_s)
        except Empty:
            outcome = TimeoutError("they have not, and POST /init_weight_transfer_engine was not answered")
        if isinstance(outcome, Refused):
            raise outcome
        if isinstance(outcome, Exception):
            raise OSError(
                f"want {want} within {limit_s:g} s ({TIMEOUT}); got: {outcome}. Does its machine "
                f"reach that address and port (a firewall; NCCL_SOCKET_IFNAME)? {RESTART}"
            ) from outcome
        return outcome
