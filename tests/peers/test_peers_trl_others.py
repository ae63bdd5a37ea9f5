"""TRL's other trainers, heads that are trained beside LoRA, and images, patched and as TRL computes them.

They need an environment of their own: `make test-peers`.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlplus import Objective, policy_loss
from rlplus.train.data import byte_tokenizer

pytest.importorskip("trl")

import trl_runs
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.trainer import utils
from trl_runs import check_same

from rlplus.integrations.trl import RLPlusGRPOTrainer, add_fused_lm_head, patch

pytestmark = pytest.mark.peers
TEXTS = [("2+2=", "4"), ("one, two,", "three"), ("abc", "def"), ("?", "!")] * 4
SFT = {"prompt": [p for p, _ in TEXTS], "completion": [c for _, c in TEXTS]}
KTO = SFT | {"label": [i % 3 != 0 for i in range(16)]}
DPO = {"prompt": SFT["prompt"], "chosen": SFT["completion"], "rejected": ["no", "maybe", "five", "12"] * 4}
TRAINERS: list[tuple[Any, Any, dict[str, Any], dict[str, Any]]] = [
    (SFTTrainer, SFTConfig, SFT, {}),
    (SFTTrainer, SFTConfig, SFT, {"loss_type": "dft", "packing": False}),
    (DPOTrainer, DPOConfig, DPO, {}),
    (DPOTrainer, DPOConfig, DPO, {"use_weighting": True}),
    (KTOTrainer, KTOConfig, KTO, {}),
]


def make_trainer(folder: Path, kind: Any, config: Any, data: dict[str, Any], changes: dict[str, Any]) -> Any:
    trl_runs.tiny_model().save_pretrained(folder / "model")
    settings: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.05,
        "optim": "sgd", "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "report_to": [],
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(
        model=str(folder / "model"),
        args=config(str(folder), **(settings | changes)),
        train_dataset=Dataset.from_dict(data),
        processing_class=byte_tokenizer(),
    )


@pytest.mark.parametrize(
    ("kind", "config", "data", "changes"),
    TRAINERS,
    ids=[f"{kind.__name__}{'-'.join(map(str, ['', *changes]))}" for kind, *_, changes in TRAINERS],
)
def test_other_trainers_train_as_trls_do(
    kind: Any, config: Any, data: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    want = trl_runs.curves(make_trainer(tmp_path, kind, config, data, changes))
    with patch():
        trainer = make_trainer(tmp_path, kind, config, data, changes)
    assert trainer.model._fusion
    assert len(want[0][0]) > 3
    check_same(trl_runs.curves(trainer), want)


def test_measures_are_those_of_trl() -> None:
    """With a softcap, a scale and a temperature."""
    from causal_lms import make

    ids = torch.tensor([[5, 9, 12, 30, 31, 22, 8], [3, 44, 17, 2, 50, 6, 1]])
    labels = ids.clone()
    labels[:, :3], labels[0, 5] = -100, -100
    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    for family, changes in ("Gemma2", {"final_logit_softcapping": 1.5}), ("Cohere", {"logit_scale": 2.5}):
        outputs = []
        for add in (utils.add_fused_lm_head, add_fused_lm_head):
            model = make(family, changes).float()
            add(model, temperature=0.7, outputs=names)
            labels[1, 4] = model(input_ids=ids).logits[1, 3].argmax()  # one that is the likeliest
            outputs.append(dict(model(input_ids=ids, labels=labels, fused_lm_head=True)))
        assert outputs[0]["is_top1"][1, 3]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
        assert not outputs[1]["mean_logits"].requires_grad


def async_loss(model: Any) -> tuple[Tensor, dict[str, Any]]:
    """AsyncGRPOTrainer's loss of one packed row of two sequences; its trainer needs a vLLM server."""
    from trl.experimental.async_grpo import async_grpo_trainer

    assert async_grpo_trainer.add_fused_lm_head is add_fused_lm_head or not hasattr(model, "_fusion")
    ids, n = torch.arange(5, 15)[None], 10
    shifted = ids.roll(-1, 1)
    shifted[0, [0, 4, 5, 9]] = -100
    on = (shifted[0] != -100).nonzero()[:, 0]
    inputs = {
        "attention_mask": torch.ones_like(ids), "input_ids": ids, "shift_labels": shifted,
        "position_ids": torch.arange(5).repeat(2)[None], "token_index": on[None],
        "old_log_probs": torch.linspace(-5.5, -3.0, len(on))[None],
        "advantages": torch.tensor([[1.0, -1.0]] * 3).view(1, 6),
        "segment_id": torch.tensor([[0, 0, 0, 1, 1, 1]]), "tree_max_seqlens": torch.tensor([[5, 5]]),
        "global_n_tokens": torch.tensor([float(len(on))]), "global_n_forward_tokens": torch.tensor([n]),
        "mean_seq_len": torch.tensor([5.0]),
    }  # fmt: skip
    none = torch.full((1, 1), -1)
    inputs |= {key: none for key in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    trainer = SimpleNamespace(
        **{"accelerator": accelerator, "aux_loss_enabled": False, "epsilon_low": 0.2, "epsilon_high": 0.2},
        **{"current_gradient_accumulation_steps": 1, "_metrics": {"train": defaultdict(list)}},
        **{f"_step_{name}": 0.0 for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples")},
        _step_forward_s=0.0,
    )
    loss = async_grpo_trainer.AsyncGRPOTrainer.compute_loss(trainer, model, inputs)
    return loss, dict(trainer._metrics["train"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loss_of_async_grpo_is_trls() -> None:
    found = []
    for patched in (False, True):
        model = trl_runs.tiny_model()
        with patch() if patched else partial(utils.nullcontext)():
            from trl.experimental.async_grpo import async_grpo_trainer

            async_grpo_trainer.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
            loss, metrics = async_loss(model)
        loss.backward()
        found.append((loss, metrics, [p.grad for p in model.parameters()]))
    assert metrics["clip_ratio/region_mean"][0] > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["patched", None, "rlplus"])
def test_a_trained_copy_of_the_head(kind: str | None, tmp_path: Path) -> None:
    """LoRA with modules_to_save=["lm_head"], as in TRL; the reference is the model without adapters."""
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    config: dict[str, Any] = {"loss_type": "dapo", "beta": 0.1, "num_iterations": 2, "use_bias_correction_kl": False}
    config |= {"epsilon": 0.01, "epsilon_high": 0.02}
    want = trl_runs.curves(trl_runs.make_trainer(tmp_path, arguments={"peft_config": lora}, **config))
    assert any("modules_to_save" in name for name in want[1])
    if kind == "patched":
        with patch():
            trainer = trl_runs.make_trainer(tmp_path, arguments={"peft_config": lora}, **config)
    else:
        objective = None if kind is None else Objective(internal="clip", clip_low=0.01, clip_high=0.02)
        ours = {"peft_config": lora, "objective": objective, "demonstration_column": ""}
        trainer = trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, arguments=ours, **config)
    check_same(trl_runs.curves(trainer), want)


@pytest.mark.parametrize("kind", ["patched", None, "rlplus"])
def test_prompt_tuning(kind: str | None, tmp_path: Path) -> None:
    import peft

    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    want = trl_runs.curves(trl_runs.make_trainer(tmp_path, arguments={"peft_config": tuning}, num_iterations=2))
    if kind == "patched":
        with patch():
            trainer = trl_runs.make_trainer(tmp_path, arguments={"peft_config": tuning}, num_iterations=2)
    else:
        objective = None if kind is None else Objective(internal="clip")
        ours = {"peft_config": tuning, "objective": objective, "demonstration_column": ""}
        trainer = trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, arguments=ours, num_iterations=2)
    check_same(trl_runs.curves(trainer), want)


def vision_model() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, Qwen2Config, SiglipVisionConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**sizes, image_size=8, patch_size=4, num_channels=3),
        text_config=Qwen2Config(vocab_size=60, num_key_value_heads=1, **sizes),
        image_token_index=59, vision_feature_select_strategy="full", vision_feature_layer=-1, image_seq_length=4,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("objective", [None, Objective(internal="clip")])
def test_images_reach_the_loss(objective: Objective | None, tmp_path: Path) -> None:
    """A step's loss and gradients of a model with images. Its processor is left out: the batch is what it makes."""
    torch.manual_seed(1)
    prompts = torch.tensor([[59] * 4 + [5, 6]] * 4)
    completions = torch.randint(60 - 1, (4, 5))
    batch = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
        "completion_mask": torch.ones_like(completions), "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "num_items_in_batch": torch.tensor(20), "pixel_values": torch.randn(4, 3, 8, 8), "num_images": [1] * 4,
        "external": torch.zeros(4, dtype=torch.bool),
    }  # fmt: skip
    found = []
    for kind, more in (GRPOTrainer, {}), (RLPlusGRPOTrainer, {"objective": objective}):
        trainer = trl_runs.make_trainer(tmp_path, kind, arguments=more)
        model = vision_model()
        (utils.add_fused_lm_head if kind is GRPOTrainer else add_fused_lm_head)(
            model, temperature=0.8, outputs=("log_probs", "entropy")
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(model, dict(batch))
        loss.backward()
        found.append((loss.detach(), {k: p.grad for k, p in model.named_parameters() if p.grad is not None}))
    assert any("vision" in name and grad.any() for name, grad in found[0][1].items())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("objective", [None, Objective(internal="clip")])
def test_demonstrations_beside_trls_options(objective: Objective | None, level: str, tmp_path: Path) -> None:
    """The options apply to sampled tokens; a demonstration has RL-PLUS's loss, whatever they are."""
    options: dict[str, Any] = {"importance_sampling_level": level, "loss_type": "grpo", "num_iterations": 2}
    if level == "token":
        options |= {"top_entropy_quantile": 0.5, "off_policy_mask_threshold": 1e-3}
    trainer = trl_runs.make_trainer(tmp_path, RLPlusGRPOTrainer, arguments={"objective": objective}, **options)
    trainer.model.train()
    rows = [{"prompt": p, "demonstration": d} for p, d in zip(trl_runs.PROMPTS[:2], ("4", "three"), strict=True)]
    batch = trainer._generate_and_score_completions([row for row in rows for _ in range(4)])
    assert batch["external"].nonzero().flatten().tolist() == [3, 7]
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.05)
    trainer.current_gradient_accumulation_steps = 1

    def gradient(external: bool, batch: dict[str, Any]) -> Tensor:
        trainer.model.zero_grad()
        only = batch["external"] == external
        trainer._compute_loss(trainer.model, batch | {"advantages": batch["advantages"] * only}).backward()
        grad: Tensor = trainer.model.lm_head.weight.grad.clone()
        return grad

    batch["advantages"] = torch.tensor([1.0, -1.0, 0.5, 0.7, -0.5, 1.0, -1.0, -0.3])
    whole = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    mask, count = batch["completion_mask"], batch["completion_ids"].shape[1]
    got = gradient(True, batch)
    trainer.model.zero_grad()
    logits = trainer.model(input_ids=whole, attention_mask=attention).logits[:, -count - 1 : -1] / 0.8
    logprob = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    external = batch["external"][:, None].expand(mask.shape)
    want, _ = policy_loss(
        logprob,
        old_logprob=batch["old_per_token_logps"],
        advantage=(batch["advantages"] * batch["external"])[:, None].expand(mask.shape),
        token_weight=mask / (mask.sum(-1, keepdim=True) * len(mask)) * external,
        external=external,
    )
    want.backward()
    torch.testing.assert_close(got, trainer.model.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    sampled = gradient(False, batch)
    assert sampled.any()
    if objective is not None and level == "token":
        return  # the quantile spans sampled tokens, TRL's all
    stock = trl_runs.make_trainer(tmp_path, **options)
    stock.model.load_state_dict(trainer.model.state_dict())
    stock.model.train()
    stock.current_gradient_accumulation_steps = 1
    del batch["external"]
    silent = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    stock._compute_loss(stock.model, batch | {"advantages": batch["advantages"] * silent}).backward()
    torch.testing.assert_close(sampled, stock.model.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
