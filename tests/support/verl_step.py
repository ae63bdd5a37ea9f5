"""One update step of verl's own TrainingWorker on the CPU: `python verl_step.py MODEL LOSS_MODE FUSED OUTPUT`.

FUSED is "yes" or "no": `use_fused_kernels`. OUTPUT gets gradients, trained weights and the loss, by `torch.save`.
verl has platforms for accelerators only: a platform of the CPU is registered, as verl's plug-ins register theirs.
"""

import contextlib
import os
import sys
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA

PROMPTS, RESPONSES = [3, 1, 2, 4], [4, 6, 2, 5]
NO_BOUND = {"clip_ratio": 1e9, "clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}


class NoMemory:
    """torch.cuda's functions on memory, for a device that has none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: {"mem_get_info": (0, 0), "get_device_name": "CPU"}.get(name, 0)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    device_name = vendor_name = "cpu"
    device_module = NoMemory()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch() -> TensorDict:
    """A batch as verl's trainer sends it to the actor's update."""
    from verl.utils import tensordict_utils

    g = torch.Generator().manual_seed(3)
    sizes = list(zip(PROMPTS, RESPONSES, strict=True))
    ids = [torch.randint(50, (p + r,), generator=g) for p, r in sizes]
    rows = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
        "prompts": [row[:p] for row, p in zip(ids, PROMPTS, strict=True)],
        "responses": [row[p:] for row, p in zip(ids, PROMPTS, strict=True)],
        "response_mask": [torch.ones(r) for r in RESPONSES],
        "loss_mask": [(torch.arange(p + r) >= p).float() for p, r in sizes],
        "old_log_probs": [-4 + 0.3 * torch.randn(r, generator=g) for r in RESPONSES],
        "advantages": [torch.randn(1, generator=g).repeat(r) for r in RESPONSES],
    }
    data = TensorDict({name: jagged(value) for name, value in rows.items()}, batch_size=len(sizes))
    options = {"temperature": 0.7, "global_batch_size": 4, "mini_batch_size": 4, "calculate_entropy": True}
    tensordict_utils.assign_non_tensor(data, pad_mode="no_padding", distillation_use_topk=False, **options)
    return data


def make_worker(model: str, fused: bool) -> Any:
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config
    from verl.workers.engine_workers import TrainingWorker

    settings = config.TrainingWorkerConfig(
        model_type="language_model",
        model_config=config.HFModelConfig(
            path=model, load_tokenizer=False, use_remove_padding=False, use_fused_kernels=fused,
            fused_kernel_options={"impl_backend": "torch"}, enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=config.FSDPEngineConfig(
            strategy="fsdp2", mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            use_dynamic_bsz=False, micro_batch_size_per_gpu=2, use_torch_compile=False,
        ),
        optimizer_config=config.FSDPOptimizerConfig(
            optimizer="SGD", lr=0.1, weight_decay=0.0, override_optimizer_config={}, total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    monkey_patch.is_trl_available = lambda: False  # verl 0.9.1 wants a class that TRL 1.16 has no longer
    worker = TrainingWorker(settings)
    worker.reset()
    return worker


def main(model: str, mode: str, fused: str, output: str) -> None:
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    worker = make_worker(model, fused == "yes")
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils import losses

    actor = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, entropy_coeff=0.01, policy_loss=PolicyLossConfig(mode),
        **NO_BOUND,
    )  # fmt: skip
    worker.set_loss_fn(partial(losses.ppo_loss, actor))
    found: dict[str, Any] = {}
    step = worker.engine.optimizer_step

    def keep_gradients() -> Any:
        parameters = worker.engine.module.named_parameters()
        found["gradients"] = {name: p.grad.full_tensor().clone() for name, p in parameters}
        return step()

    worker.engine.optimizer_step = keep_gradients
    done = tensordict_utils.get(worker.train_mini_batch(batch()), "metrics")
    found["loss"] = done["loss"][0]
    found["weights"] = {name: p.full_tensor().detach() for name, p in worker.engine.module.named_parameters()}
    torch.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
