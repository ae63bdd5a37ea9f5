"""The engine of vLLM's weight transfer that takes our weights, registered as `rlplus`.

Only vLLM's workers import this module, by the engine arguments RECEIVER: one names `Extension`, the other the engine.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlplus import __version__
from rlplus.train.rollout.adapter_receiver import AdapterReceiver
from rlplus.train.rollout.parcels import Parcel, shared_memory
from rlplus.train.rollout.push import BACKEND, Expected, parameter_shapes
from rlplus.train.rollout.vllm_options import Adapters
from rlplus.train.rollout.worker_answers import Trainer

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]


class Extension:
    """A base that vLLM gives its worker. Its module registers the engine; its methods, for `collective_rpc`, take
    adapters: vLLM drops those it has at the end of a transfer of weights."""

    get_model: Callable[[], nn.Module]  # the worker's
    _receiver: AdapterReceiver

    def expect_adapters(self, adapters: Adapters) -> None:
        self._receiver = AdapterReceiver(self.get_model(), adapters)

    def load_adapters(self, number: int, weights: Weights | None = None, parcel: dict[str, Any] | None = None) -> None:
        """weights: of this process; parcel: the fields of a `Parcel`."""
        self._receiver.load(number, Parcel(**(parcel or {})) if weights is None else weights)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Shapes of a push's parameters by name. A server's trainer has them in memory: descriptor fd of process pid."""

    shapes: dict[str, torch.Size] | None = None
    run: str = ""
    pid: int = 0
    fd: int = -1


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Some of a push's parameters: of this process, or the fields of a `Parcel`."""

    weights: Weights | None = None
    parcel: dict[str, Any] | None = None


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads complete pushes of one trainer at a time; ValueError at what does not fit.

    Each parcel is verified before any of its parameters is loaded. After a push that failed the next whole one repairs
    the model. To a trainer that is another process it says what failed, and raises nothing: see `worker_answers`.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._shapes: dict[str, torch.Size] = {}
        self._expected: Expected | None = None  # set while an update has not been finished
        self._trainer: Trainer | None = None
        self._raises = self._open = False  # open: between start and finish, as vLLM's worker sees it

    @contextmanager
    def _answered(self, call: str) -> Iterator[None]:
        failure = ""
        try:
            yield
        except Exception as error:
            if self._raises:
                raise
            logger.exception("%s failed", call)
            failure = str(error)
        if self._trainer is not None:
            self._trainer.tell(call, failure)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.shapes is not None:
            self._take_over_here(init_info.shapes)
            return
        try:
            said = self._said(init_info)
            trainer = Trainer(init_info.run, init_info.pid, said["answers"])
        except (ValueError, LookupError):
            logger.exception("a trainer cannot be answered")
            if self.parallel_config.rank == self.parallel_config.world_size - 1:  # the last answer that vLLM reads
                raise
            return
        try:
            self._check(trainer, said)
        except Exception as error:
            logger.exception("process %d must not push here", trainer.pid)
            trainer.tell("init_weight_transfer_engine", str(error), open=self._open)
            trainer.close()
        else:
            self._forget()
            self._trainer = trainer
            self._raises = False
            self._shapes = {name: torch.Size(shape) for name, shape in said["shapes"].items()}
            trainer.tell("init_weight_transfer_engine", open=self._open)

    def _take_over_here(self, shapes: dict[str, torch.Size]) -> None:
        """By an engine of this process. JSON has no torch.Size: a request to a server does not pass for one."""
        if not shapes or not all(isinstance(shape, torch.Size) for shape in shapes.values()):
            raise ValueError(
                "want run, pid and fd of a trainer; shapes alone are for an engine in the trainer's process"
            )
        self._forget()
        self._shapes = shapes
        self._raises = True

    @staticmethod
    def _said(info: InitInfo) -> dict[str, Any]:
        """The greeting of a trainer that is another process; ValueError if it is not meant for this server."""
        said: dict[str, Any] = json.loads(bytes(shared_memory(info.pid, info.fd).numpy()))
        if said["rlplus"] != __version__:
            raise ValueError(f"want rlplus {said['rlplus']}, the trainer's, beside vLLM; got {__version__}")
        if said["run"] != info.run:
            raise ValueError(f"want run {info.run} in the memory of process {info.pid}; got {said['run']}")
        return said

    def _check(self, trainer: Trainer, said: dict[str, Any]) -> None:
        """ValueError if a trainer that is another process must not or cannot push to this model."""
        owner = self._trainer
        if owner is not None and owner.pid != trainer.pid and owner.alive():
            raise ValueError(f"want one run at a time; process {owner.pid} pushes its weights here, end it first")
        config = self.model_config
        own, _ = parameter_shapes(config.hf_config_path or config.model, trust_remote_code=config.trust_remote_code)
        for name in [*said["shapes"], *own]:
            theirs = said["shapes"].get(name)
            ours = own.get(name)
            if theirs is None or ours is None or list(ours) != theirs:
                raise ValueError(f"want the model of the run, with {name} of shape {theirs}; it has {ours and [*ours]}")

    def start_weight_update(self) -> None:
        with self._answered("start_weight_update"):
            if not self._shapes:
                raise RuntimeError("want init_weight_transfer_engine before start_weight_update")
            if self._expected is not None:  # that one failed, or its trainer was killed: put back what is half-way
                finalize_layerwise_reload(self.model, self.model_config)
            self._expected = Expected(self._shapes)
            initialize_layerwise_reload(self.model)
        self._open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with self._answered("update_weights"):
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._expected is None:
            raise RuntimeError("want start_weight_update before update_weights")
        weights = update_info.weights
        if weights is None:
            parcel = Parcel(**(update_info.parcel or {}))
            run = self._trainer.run if self._trainer is not None else ""  # an engine's own parcels have no name
            if parcel.run != run:
                raise ValueError(f"want a parcel of {run!r}, the run that pushes here; got one of {parcel.run!r}")
            weights = list(self._expected.checked(parcel))
        else:
            weights = self._expected.checked(weights)
        with disable_mtp_completeness_check():
            self.model.load_weights(rest := iter(weights))
        if (left := next(rest, None)) is not None:
            raise RuntimeError(f"vLLM stopped loading at {left[0]}")

    def finish_weight_update(self) -> None:
        self._open = False
        with self._answered("finish_weight_update"):
            if self._expected is None:
                raise RuntimeError("want start_weight_update before finish_weight_update")
            self._expected.finish()
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu" and "lm_head.weight" not in self._shapes:
                self._repack_tied_head()
            self._expected = None

    def _repack_tied_head(self) -> None:
        """Renew the packed copy of a tied head's weight, with which it multiplies on the CPU; a reload does not.

        The head is `lm_head`, or in classes without one (Gemma 2, Cohere) the embeddings themselves.
        """
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def _forget(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None

    def shutdown(self) -> None:
        """Let another process push, unless the one that does is alive: vLLM does not tell who asks for this."""
        if self._trainer is not None and self._trainer.alive():
            logger.warning("process %d pushes its weights here until it ends: not shut down", self._trainer.pid)
        else:
            self._forget()


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
