"""Fused models whose head is split over two ranks by tensor parallelism, and under FSDP2, which splits it otherwise.

    torchrun --nproc_per_node 2 tests/support/split_lms.py FOLDER

FOLDER has the models, written by `save_models`. Writes FOLDER/RANK.pt: the results of all cases.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from causal_lms import make
from fused_heads import IDS, ON, TARGETS, TEMPERATURE, gradients, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig

from rlplus import Objective
from rlplus.integrations.transformers import fuse_head
from rlplus.loss.backends import sharded

MODELS = {  # family and changes; transformers wants equal parts
    "plan": ("Qwen2", {"vocab_size": 54, "num_key_value_heads": 2}),
    "bias": ("Phi", {}),
    "softcap": ("Gemma2", {"final_logit_softcapping": 1.5, "tie_word_embeddings": False}),
}
MEASURES = ("is_top1", "mean_logits", "log_sum_sq_probs")
POLICY = {"objective": Objective("clip", "mis"), "advantage": torch.tensor([1.5, -0.5])}


def from_plan(folder: Path) -> Any:
    """With the class's own plan, `tp_plan="auto"`: all layers and the head."""
    like = make(*MODELS["plan"])
    return type(like).from_pretrained(
        folder / "plan", dtype=torch.float64, distributed_config=DistributedConfig(tp_plan="auto")
    )


def of_torch(name: str, mesh: Any, **style: Any) -> Any:
    model = make(*MODELS[name])
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**style)})
    return model


def under_fsdp(model: Any, mesh: Any, apart: bool) -> Any:
    for module in (*model.model.layers, *([model.lm_head] if apart else []), model):
        fully_shard(module, mesh=mesh)
    return model


def results(model: Any, rows: slice) -> dict[str, Any]:
    """Outputs for the sequences `rows`, all parameters' gradients, and the parts of the head that met."""
    met: list[list[int]] = []
    meet = sharded.meet

    def recorded(*args: Any) -> Any:
        met.append((shards := meet(*args)).lengths)
        return shards

    sharded.meet = recorded
    fuse_head(model, temperature=TEMPERATURE)
    inputs = {"input_ids": IDS[rows], "targets": TARGETS[rows]}
    out = model(**inputs)
    whole = [torch.zeros(IDS.shape, dtype=out.logprob.dtype) for _ in range(2)]
    for every, own in zip(whole, (out.logprob, out.entropy), strict=True):
        every[rows] = own
    loss_of(*whole).backward()
    found = {"logprob": out.logprob.detach(), "entropy": out.entropy.detach(), "grads": gradients(model)}
    weight = {"token_weight": ON[rows].double(), "advantage": POLICY["advantage"][rows]}
    out = model(**inputs, policy=POLICY | weight | {"old_logprob": found["logprob"] + 0.1})
    out.loss.backward()
    found |= {"loss": out.loss.detach(), "policy_grads": gradients(model)}
    model._fusion.measures = MEASURES
    with torch.no_grad():
        found["measured"] = model(**inputs).measured
    sharded.meet = meet
    return found | {"met": met}


def save_models(folder: Path) -> None:
    make(*MODELS["plan"]).save_pretrained(folder / "plan")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    all_rows, own_row = slice(None), slice(rank, rank + 1)
    cases: dict[str, tuple[Callable[[], Any], slice]] = {
        "plan": (lambda: from_plan(folder), all_rows),
        "bias": (lambda: of_torch("bias", line, output_layouts=Replicate()), all_rows),
        "softcap": (lambda: of_torch("softcap", line, use_local_output=False), all_rows),
        "softcap under FSDP": (
            lambda: under_fsdp(of_torch("softcap", grid["tp"], output_layouts=Replicate()), grid["dp"], True),
            all_rows,
        ),
        "FSDP alone": (lambda: under_fsdp(make(*MODELS["softcap"]), line, False), own_row),
        "FSDP alone, head apart": (lambda: under_fsdp(make(*MODELS["softcap"]), line, True), own_row),
    }
    torch.save({name: results(model(), rows) for name, (model, rows) in cases.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
