"""Rollouts with vLLM inside this process: the trainer's, with weights passed in memory, or a separate one."""

import gc
import logging
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import activity, agree
from rlplus.common.errors import hint
from rlplus.common.kept_sets import KeptSets
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.parcels import Parcel
from rlplus.train.rollout.protocol import (
    DEFAULT_CACHE_MB,
    Completion,
    Request,
    Sampling,
    check_requests,
    check_responses,
    whole_model,
)
from rlplus.train.rollout.push import RECEIVER, Clock, parameter_shapes, watched
from rlplus.train.rollout.vllm_options import (
    EXPERTS,
    MASKS,
    Adapters,
    check_arguments,
    check_sampling,
    lora_request,
    no_adapters,
    no_experts,
    no_masks,
)

REPLAY = "sampling distribution replay"  # the words of vLLM's messages about the tokens it kept
CPU_BATCHED_TOKENS = 4096  # vLLM's own default there, of which a whole prompt must not be more


def import_vllm() -> Any:
    """The module vllm, set up for use inside this process; ImportError or OSError if it is missing or broken."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: weights need no copy between two
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # it speaks while it is imported, before it reads its setting
    with _no_future_warnings():
        import vllm
        from vllm import LLM  # noqa: F401  # `import vllm` is lazy and passes on a broken installation
    return vllm


class VLLMEngine:
    """vLLM with one engine per rank, on the rank's GPU or on the CPU; or one engine on tensor_parallel_size GPUs.

    Under torch.distributed these are the GPUs of as many neighbouring ranks, which then share all they ask for; else
    this process's own first ones.
    A process can have several one after the other, but not two at a time: vLLM's groups are global. An exception out of
    `push_weights` leaves the engine unusable: close it and make a new one.
    """

    name = "vllm"

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int,
        end_ids: Sequence[int],
        seed: int,
        trust_remote_code: bool = False,
        config_path: str | None = None,
        adapters: Adapters | None = None,
        **_: Any,  # other engines' arguments
    ) -> None:
        self._vllm = import_vllm()
        self._cpu = _on_cpu()
        self._check_options(config.vllm)
        self._adapters = adapters
        self._pushes = 0
        self._lora = None
        self._config = config
        check_arguments(config, self._vllm)
        if config.sleep and self._cpu:
            raise ValueError("rollout.sleep gives GPU memory back: vLLM has it on CUDA only, and this is its CPU build")
        self._asleep = False
        self.clock = Clock("the generation", "rollout.progress_timeout_s", config.progress_timeout_s)
        self._shared = dist.is_initialized() and config.tensor_parallel_size > 1  # neighbouring ranks share it
        self._ends = end_ids
        self._max_model_len = max_model_len
        self._failure: str | None = None
        self._foreign_group = dist.is_initialized()
        with _process_state_kept(), whole_model(), _no_future_warnings():
            path = config_path or model_path
            self._shapes, self._vocabulary = parameter_shapes(path, trust_remote_code=trust_remote_code)
            settings: dict[str, Any] = {
                "model": model_path,
                "hf_config_path": config_path,
                "skip_tokenizer_init": True,
                "trust_remote_code": trust_remote_code,
                "dtype": dtype,
                "hf_overrides": {"head_dtype": config.head_dtype},
                "max_model_len": max_model_len,
                "seed": seed,
                "enforce_eager": config.enforce_eager or self._cpu,
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",  # nothing of the model's own sampling settings
                "use_tqdm_on_load": False,
                "tensor_parallel_size": config.tensor_parallel_size,
                "enable_sleep_mode": config.sleep,
                # More than one rank: take rank and device from the launcher, else all engines would use the first GPU.
                "distributed_executor_backend": "external_launcher" if _world_size() > 1 else None,
                **self._sizes(max_model_len),
                **RECEIVER,
            }
            self._llm: Any = self._start(settings | config.vllm)
        self._watch_tokens(self._llm.llm_engine.engine_core)
        self._llm.init_weight_transfer_engine({"init_info": {"shapes": self._shapes}})

    def _sizes(self, max_model_len: int) -> dict[str, Any]:
        """Settings for the memory and for the tokens of a batch."""
        cache_mb = self._config.kv_cache_memory_mb or (DEFAULT_CACHE_MB if self._cpu else None)
        return {
            # vLLM fails on the CPU on a seeded request whose prompt it takes in two parts.
            "enable_chunked_prefill": not self._cpu,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_model_len) if self._cpu else None,
            "gpu_memory_utilization": self._config.gpu_memory_utilization,
            "kv_cache_memory_bytes": cache_mb * 2**20 if cache_mb else None,
        }

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        if self._failure:
            raise RuntimeError(self._failure)
        check_requests(requests, sampling, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        check_sampling(sampling, self._config.top_k, self._config.routing_replay)
        params = self._sampling_params(requests, sampling)
        asked = [({"prompt_token_ids": list(r.prompt)}, p) for r, p in zip(requests, params, strict=True) if r.n]
        outputs = iter(self._run_together(asked) if self._shared else self._run(asked))
        groups = [[_completion(s, sampling.experts) for s in next(outputs).outputs] if r.n else [] for r in requests]
        if not sampling.temperature:
            groups = [group * r.n for group, r in zip(groups, requests, strict=True)]
        return check_responses(
            groups, requests, sampling, vocabulary=self._vocabulary, ends=self._ends, engine=self.name
        )

    def _check_options(self, options: dict[str, Any]) -> None:
        """ValueError for a further engine argument that vLLM does not have, or that it must not have on the CPU."""
        names = [field.name for field in fields(self._vllm.EngineArgs)] if options else []
        for name in options:
            if name not in names:
                wanted = f"vLLM {self._vllm.__version__} has no such argument{hint(name, names)}"
                raise ValueError(f"rollout.vllm.{name}: {wanted}")
            if self._cpu and name in ("enable_chunked_prefill", "max_num_batched_tokens"):
                raise ValueError(
                    f"rollout.vllm.{name}: leave it out, on the CPU vLLM fails on a seeded prompt in two parts"
                )

    def _start(self, settings: dict[str, Any]) -> Any:
        """vLLM's engine, which returns tokens it kept and experts it chose if asked to, and expects the adapters."""
        if self._config.top_k:
            settings[MASKS] = True
        if self._config.routing_replay:
            settings[EXPERTS] = True
        if self._adapters is not None:
            self._shapes = self._adapters.shapes
            settings |= self._adapters.engine_arguments(settings["dtype"], cpu=self._cpu)
        try:
            llm = self._vllm.LLM(**settings)
            if self._adapters is not None:
                llm.collective_rpc("expect_adapters", args=(self._adapters,))
            return llm
        except ValueError as error:
            if self._config.top_k and REPLAY in str(error):
                raise ValueError(no_masks(self._config.top_k, str(error))) from error
            if self._config.routing_replay and "AuxOutput" in str(error):
                raise ValueError(no_experts(str(error))) from error
            if self._adapters is not None and "LoRA" in str(error):
                raise ValueError(no_adapters(str(error))) from error
            raise

    def _watch_tokens(self, core: Any) -> None:
        """Tell the clock of new tokens, and count them: `LLM.generate` shows finished responses only, minutes apart."""
        get_output = core.get_output

        def watched_output() -> Any:
            step = get_output()
            if step.outputs:
                ended = sum(output.finish_reason is not None for output in step.outputs)
                activity.rollouts.add(ended, sum(len(output.new_token_ids) for output in step.outputs))
                self.clock.at("the next token")
            return step

        core.get_output = watched_output

    def _run_together(self, requests: list[Any]) -> list[Any]:
        """Ranks that share an engine run all requests, in the same order, and keep the answers to their own."""
        everybody = agree.gathered(requests, self._config.tensor_parallel_size)
        outputs = self._run([request for part in everybody for request in part])
        mine = dist.get_rank() % self._config.tensor_parallel_size
        start = sum(map(len, everybody[:mine]))
        return outputs[start : start + len(requests)]

    def _sampling_params(self, requests: Sequence[Request], sampling: Sampling) -> list[Any]:
        """vLLM's parameters of each request."""
        return [
            self._vllm.SamplingParams(
                n=max(request.n, 1) if sampling.temperature else 1,  # it refuses n > 1 in greedy decoding
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=request.max_tokens,
                seed=seed,
                logprobs=0,  # the sampled token's only
                flat_logprobs=True,
                ignore_eos=True,  # the stop tokens are the caller's, whatever else the model's config calls eos
                stop_token_ids=[*self._ends, *sampling.stop],
                detokenize=False,
            )
            for request, seed in zip(requests, prompt_seeds(requests, sampling.seed), strict=True)
        ]

    def _run(self, requests: list[Any]) -> list[Any]:
        if not requests:
            return []
        prompts, params = zip(*requests, strict=True)
        activity.rollouts.begin(sum(each.n for each in params))
        # vLLM compiles one small function of its sampler on the CPU, which takes longer than everything it could save.
        compiler = torch.compiler.set_stance("force_eager") if self._cpu else nullcontext()
        with _process_state_kept(), compiler, self.clock.running("the first token"):
            try:
                return self._llm.generate(list(prompts), list(params), use_tqdm=False, lora_request=self._lora)
            except BaseException:
                # Requests left behind would hang the next call.
                engine = self._llm.llm_engine
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
                raise

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._failure and not self._asleep:
            raise RuntimeError(self._failure)
        self._failure = f"the push of version {version} failed half-way: close this engine and make a new one"
        asleep = self._asleep
        self._asleep = False
        if asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # return memory that the trainer has freed to the device first
            self._llm.wake_up(["weights"])  # the cache stays away while weights are gathered and loaded
        self._load(weights, version)
        if asleep:
            self._llm.wake_up(["kv_cache"])
        if not self._llm.reset_prefix_cache(reset_connector=True):  # other caches of keys and values, too
            raise RuntimeError("vLLM did not reset its prefix cache: keys and values of the old weights would be used")
        self._llm.update_weight_version(str(version))
        if (tag := self._llm.get_weight_version()) != str(version):
            raise RuntimeError(f"want the weights of version {version} in vLLM; it has {tag}")
        self._failure = None

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with _process_state_kept(), self._update(weights, version) as update:
            if self._adapters is not None:
                self._load_adapters(update)
                return
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": update})
            self._llm.finish_weight_update()

    def _load_adapters(self, update: dict[str, Any]) -> None:
        """Each push is an adapter with a name of its own, by which vLLM tells keys and values of several apart."""
        self._pushes += 1
        self._llm.collective_rpc("load_adapters", kwargs={"number": self._pushes} | update)
        self._lora = lora_request(self._pushes)

    @contextmanager
    def _update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[dict[str, Any]]:
        """The fields that `Receiver` takes. vLLM's workers may be other processes, which read parcels themselves."""
        if isinstance(weights, Parcel):
            yield {"parcel": asdict(weights)}
            return
        with watched(weights, self._shapes, version=version, timeout_s=self._config.push_timeout_s) as checked:
            yield {"weights": checked}

    def sleep(self) -> None:
        if self._config.sleep and not self._asleep and self._failure is None:
            self._failure = "the engine is asleep: push weights before generating"
            # Weights and cache are dropped, as a push brings new ones; but for base weights, which it does not bring.
            self._llm.sleep(level=2 if self._adapters is None else 1)
            self._asleep = True

    def close(self) -> None:
        if self._llm is None:
            return
        self._failure = "the engine is closed"
        llm = self._llm
        self._llm = None
        with _default_group_kept() if self._foreign_group else nullcontext():
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def prompt_seeds(requests: Sequence[Request], seed: int) -> list[int]:
    """One seed per request. vLLM seeds the j-th response to a prompt with seed + j, so prompts' seeds differ by n."""
    # Hashed: calls with consecutive seeds would share most of theirs. 32 bits: the CPU generator reads no more.
    first = random.Random(str(seed)).getrandbits(32)
    return [first + before for before in accumulate((r.n for r in requests), initial=0)][: len(requests)]


def _completion(sample: Any, with_experts: bool) -> Completion:
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"want responses that end with stop or length; vLLM ended one with {sample.finish_reason}")
    mask = getattr(sample, "sampling_mask", None)
    kept = None if mask is None else KeptSets.of(mask.token_ids)
    tokens = list(sample.token_ids)
    logprob = list(sample.logprobs.logprobs)
    experts = getattr(sample, "routed_experts", None) if with_experts else None
    if experts is not None:
        experts = experts.astype(np.int16)  # every number of vLLM's uint8 may be an expert's: none is left
    return Completion(tokens, logprob, sample.finish_reason == "length", kept=kept, experts=experts)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def _no_future_warnings() -> Iterator[None]:
    """Suppress FutureWarnings about vLLM's use of torch, which a user of this package cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """Put back what vLLM changes in its process.

    It seeds every random generator, on the CPU replaces torch.set_num_threads by nothing, and rewrites two variables
    that child processes inherit: the launcher's LOCAL_WORLD_SIZE and LD_PRELOAD.
    """
    environment = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    set_num_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _default_group_kept() -> Iterator[None]:
    """vLLM's shutdown destroys torch.distributed's default group with its own, also where the trainer made it."""
    destroy = dist.destroy_process_group

    def destroy_subgroup(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_subgroup
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
