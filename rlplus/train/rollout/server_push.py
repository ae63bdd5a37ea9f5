"""Ways of the weights to a vLLM server: `rollout.transfer`. All of them are vLLM's weight transfer (vLLM 0.32).

`memory`, here, is the trainer's twin of `rlplus.train.rollout.receiver`, for any device; `library_push` has vLLM's own.
"""

import base64
import json
import pickle
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rlplus import __version__
from rlplus.train.rollout.answer_fields import Field, parsed
from rlplus.train.rollout.parcels import Memory, parcels
from rlplus.train.rollout.server_http import Requests
from rlplus.train.rollout.worker_answers import Answers

TIMEOUT = "half of rollout.push_timeout_s"
CLOSE_S = 2.0  # limit for telling the server that this run has ended, which is no reason to wait


class Control:
    """The calls of a push to a server, vLLM's VLLMWeightSyncClient. OSError where one fails.

    The server is paused from the first call of a push to `resume`, also for others' requests, which then go on with the
    new weights; one whose push failed stays paused, as it then holds a mixture of two models.
    """

    def __init__(self, http: Requests, timeout_s: float) -> None:
        self._http = http
        self.timeout_s = timeout_s

    def workers(self) -> int:
        """Number of the server's GPUs."""
        return self._get("/get_world_size")["world_size"].a(int)

    def paused(self) -> bool:
        return self._get("/is_paused")["is_paused"].a(bool)

    def library_version(self) -> str:
        return self._get("/version")["version"].a(str)

    def own_address(self) -> str:
        return self._http.own_address()

    def _get(self, path: str) -> Field:
        return self._http.ask("GET", path, timeout_s=self.timeout_s, setting=TIMEOUT)

    def _post(self, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        setting = "" if timeout_s else TIMEOUT
        return self._http.send("POST", path, body, timeout_s=timeout_s or self.timeout_s, setting=setting)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def pause(self) -> None:
        """Keep requests that are under way, without their keys and values, until `resume`."""
        self._post("/pause?mode=keep")

    def start_weight_update(self) -> None:
        self.pause()
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        handles = update_info.get("ipc_handles")
        if handles is not None:  # no JSON; the server reads it with VLLM_ALLOW_INSECURE_SERIALIZATION=1 only
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {name: value for name, value in update_info.items() if name != "ipc_handles"}
            update_info["ipc_handles_pickled"] = pickled
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version is `resume`'s."""
        self._post("/finish_weight_update")

    def resume(self, version: int) -> None:
        """Let the server generate again, without keys and values of older weights."""
        path = "/reset_prefix_cache?reset_external=true"  # other caches of keys and values, too
        reset = parsed(self._post(path), f"POST {path}")
        if reset.value != {"success": True}:
            raise OSError(
                f"{reset.request}: it did not reset its prefix cache ({reset.value!r:.200}); does it still send keys "
                "and values elsewhere?"
            )
        self._post("/update_weight_version", {"new_version": str(version)})
        self._post("/resume")

    def abandon(self) -> None:
        """End an update whose trainer does not go on."""
        self.pause()
        self._post("/finish_weight_update")

    def shutdown(self) -> None:
        """End the transfer of vLLM's own engines, of which the server has one, whoever began it."""
        self._post("/shutdown_weight_transfer_engine", timeout_s=CLOSE_S)


class MemoryPush:
    """Pushes through memory of this process, a bucket at a time. The server must run on this machine, as this user."""

    def __init__(self, control: Control, shapes: Mapping[str, torch.Size], bucket_bytes: int) -> None:
        self._control = control
        self._bucket_bytes = bucket_bytes
        self._shapes = {name: list(shape) for name, shape in shapes.items()}
        self._workers = control.workers()
        self._answers: Answers | None = self._greeted()

    def _greeted(self) -> Answers:
        """Introduce this process to the server, under a new name; OSError if it is refused."""
        self._run = secrets.token_hex(8)
        answers = Answers(self._workers)
        memory = Memory()
        try:
            said = {"run": self._run, "rlplus": __version__, "answers": answers.fd, "shapes": self._shapes}
            memory.write(json.dumps(said).encode())
            parcel = memory.seal()
            self._control.init_weight_transfer_engine({"run": self._run, "pid": parcel.pid, "fd": parcel.fd})
            opened = [each.get("open") for each in answers.check("init_weight_transfer_engine")]
            if not all(isinstance(one, bool) for one in opened):
                raise OSError(f"init_weight_transfer_engine: want true or false as open of each worker; got {opened}")
            if any(opened):
                self._control.abandon()  # a push of before, which failed or whose trainer was killed
                answers.take("finish_weight_update")  # that parameters are missing
        except BaseException:
            answers.close()
            raise
        finally:
            memory.close()
        return answers

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        answers = self._answers = self._answers or self._greeted()
        try:
            self._control.start_weight_update()
            answers.check("start_weight_update")
            for parcel in parcels(weights, self._bucket_bytes, self._run):
                self._control.update_weights({"parcel": asdict(parcel)})
                answers.check("update_weights")
            self._control.finish_weight_update()
            answers.check("finish_weight_update")
            self._control.resume(version)
        except BaseException:
            self.close()  # late answers reach no reader: the next push greets the server again
            raise

    def close(self) -> None:
        """Let another run push, as the workers see by the pipe."""
        if self._answers is not None:
            self._answers.close()
        self._answers = None
