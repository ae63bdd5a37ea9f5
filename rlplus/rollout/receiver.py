"""The engine of vLLM's weight transfer that takes our weights, registered as `rlplus`.

Only vLLM's workers import this module, by the engine arguments RECEIVER: one names `Extension`, the other the engine.
"""

import json
import os
import select
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlplus.rollout.parcels import Parcel, shared_memory
from rlplus.rollout.push import BACKEND, Expected, parameter_shapes


class Extension:
    """A base that vLLM gives its worker: its module registers the engine, it adds nothing."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Shapes of a push's parameters by name. A server's trainer has them in memory: descriptor fd of process pid."""

    shapes: dict[str, list[int]] | None = None
    run: str = ""
    pid: int = 0
    fd: int = -1


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Some of a push's parameters: of this process, or the fields of a `Parcel`."""

    weights: Iterable[tuple[str, Tensor]] | None = None
    parcel: dict[str, Any] | None = None


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads complete pushes of one trainer at a time; ValueError at what does not fit.

    Each parcel is verified before any of its parameters is loaded. After a push that failed the next whole one repairs
    the model.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._shapes: dict[str, torch.Size] = {}
        self._expected: Expected | None = None  # set while an update has not been finished
        self._run, self._pid, self._alive = "", 0, -1

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        shapes = init_info.shapes
        if shapes is None:
            shapes = self._greet(init_info)
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}

    def _greet(self, info: InitInfo) -> dict[str, list[int]]:
        """Shapes of a trainer that is another process; ValueError if it must not or cannot push to this model."""
        said = json.loads(bytes(shared_memory(info.pid, info.fd).numpy()))
        if said["run"] != info.run:
            raise ValueError(f"want run {info.run} in the memory of process {info.pid}; got {said['run']}")
        if info.pid != self._pid and self._owned():
            raise ValueError(f"want one run at a time; process {self._pid} pushes its weights here, end it first")
        config = self.model_config
        own, _ = parameter_shapes(config.hf_config_path or config.model, trust_remote_code=config.trust_remote_code)
        for name in [*said["shapes"], *own]:
            theirs, ours = said["shapes"].get(name), own.get(name)
            if theirs is None or ours is None or list(ours) != theirs:
                raise ValueError(f"want the model of the run, with {name} of shape {theirs}; it has {ours and [*ours]}")
        self.shutdown()
        self._run, self._pid, self._alive = info.run, info.pid, os.pidfd_open(info.pid)
        shapes: dict[str, list[int]] = said["shapes"]
        return shapes

    def _owned(self) -> bool:
        return self._alive >= 0 and not select.select([self._alive], [], [], 0)[0]

    def start_weight_update(self) -> None:
        if not self._shapes:
            raise RuntimeError("want init_weight_transfer_engine before start_weight_update")
        if self._expected is not None:  # that one failed, or its trainer was killed: put back what is half-way
            finalize_layerwise_reload(self.model, self.model_config)
        self._expected = Expected(self._shapes)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self._expected is not None
        weights = update_info.weights
        if weights is None:
            parcel = Parcel(**(update_info.parcel or {}))
            if parcel.run != self._run:
                raise ValueError(f"want a parcel of run {self._run}, which took this server over; got {parcel.run}'s")
            weights = list(self._expected.checked(parcel))
        else:
            weights = self._expected.checked(weights)
        with disable_mtp_completeness_check():
            self.model.load_weights(rest := iter(weights))
        if (left := next(rest, None)) is not None:
            raise RuntimeError(f"vLLM stopped loading at {left[0]}")

    def finish_weight_update(self) -> None:
        assert self._expected is not None
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

    def shutdown(self) -> None:
        """Let another process push."""
        if self._alive >= 0:
            os.close(self._alive)
        self._run, self._pid, self._alive = "", 0, -1


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
