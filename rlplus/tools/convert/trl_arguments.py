"""TRL's GRPOConfig as a run of ours. Defaults: TRL 1.16 and transformers 5.24."""

from math import ceil
from typing import Any

from rlplus.common.errors import check_name
from rlplus.tools.convert.draft import Draft, Script, whole
from rlplus.train.config.synonyms import WITHOUT

DEFAULTS: dict[str, Any] = {
    "output_dir": "trainer_output", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "num_train_epochs": 3.0, "max_steps": -1,
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "gradient_checkpointing": True, "fp16": False, "beta": 0.0, "epsilon": 0.2,
    "loss_type": "dapo", "scale_rewards": "group", "importance_sampling_level": "token", "use_bias_correction_kl": True,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "use_vllm": False, "vllm_mode": "colocate",
    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0, "seed": 42,
    "save_strategy": "steps", "save_steps": 500,
}  # fmt: skip
DEFAULTS_AROUND = {"LoraConfig.r": 8, "LoraConfig.lora_alpha": 8, "load_dataset.split": "train"}
NO_LIMIT = 1e9
NOTHING = {"output_dir": "trainer_output", "max_grad_norm": NO_LIMIT, "vllm_importance_sampling_clip_max": NO_LIMIT}
# TRL's losses: the preset, and the normaliser.
LOSSES = {
    "grpo": ("grpo", "sequence"), "dapo": ("grpo", "token"), "bnpo": ("grpo", "token"), "dr_grpo": ("grpo", "constant"),
    "cispo": ("cispo", "token"), "sapo": ("sapo", "sequence"),
}  # fmt: skip
SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine", "constant": "constant"}
SCHEDULES["constant_with_warmup"] = "constant"
GRADERS = {"trl.accuracy_reward": "math_verify"}
OWN_FUNCTION = "TRL's functions take lists of completions; here one takes (text, answer) and returns a number"
# Keywords around GRPOConfig that have no counterpart.
AROUND = {
    "environment_factory": "environments are rollout.environment here, see docs/environments.md",
    "tools": "tools and several turns are a function, rollout.function",
    "rollout_func": "tools and several turns are a function, rollout.function",
    "eval_dataset": "evaluations are pass@k on problems: evaluation.data, evaluation.every, evaluation.samples",
    "processing_class": "the tokenizer is the model's: model.path",
    "reward_processing_classes": "models that give rewards are functions of your own here",
    "callbacks": "the trainer calls nothing of the user's but rewards and rollouts",
    "optimizers": "the optimizer is AdamW: train.lr, train.betas, train.weight_decay",
    "quantization_config": "weights are bfloat16 or float32: model.dtype",
    "dtype": "the weights have model.dtype, which is by bf16",
    "torch_dtype": "the weights have model.dtype, which is by bf16",
    "lora_dropout": "adapters have no dropout here",
    "task_type": "adapters are of causal language models, always",
    "train_dataset": "rows are trained on as they are in data.path: write the changed ones into a file",
}


def from_trl(script: Script, gpus: int) -> Draft:
    """ValueError for a loss that is none of ours, and sizes that TRL itself refuses."""
    draft = Draft("TRL", script, DEFAULTS | DEFAULTS_AROUND, NOTHING)
    draft.take("output_dir", "output_dir")
    _model(draft)
    _data_and_reward(draft)
    _rollout(draft)
    _algorithm(draft)
    per_step = _sizes(draft, gpus)
    _optimizer(draft)
    _checkpoints(draft, per_step)
    for name in draft.script.settings:
        if name.startswith("GRPOTrainer.train_dataset."):
            draft.lose(name, AROUND["train_dataset"])
    reasons = dict(WITHOUT["TRL"])
    for name in (*draft.script.settings, *draft.script.unread):
        first, dot, _ = name.partition(".")
        if first.startswith("load_dataset("):
            reasons[name] = "not known to be the training's data"
        elif dot and (reason := AROUND.get(name.rpartition(".")[2]) or reasons.get(first)):
            reasons[name] = reason
        elif dot and name in draft.script.settings:
            reasons[name] = "no counterpart"
    draft.list_the_rest(reasons, "no argument of TRL's GRPOConfig")
    return draft


def _model(draft: Draft) -> None:
    model = draft.get("GRPOTrainer.model")
    if isinstance(model, str):
        draft.set("model.path", model, "GRPOTrainer.model")
    else:
        note = "the script does not say the model in a way that can be read"
        draft.fill_in("model.path", "FILL-IN", note, "GRPOTrainer.model")
    half = draft.get("bf16") is not False
    if draft.get("fp16"):
        draft.lose("fp16", "bfloat16 takes its place")
    draft.set("model.dtype", "bfloat16" if half else "float32", "bf16", note="the optimizer's weights are fp32")
    draft.take("model.gradient_checkpointing", "gradient_checkpointing")
    draft.take("model.attention", "model_init_kwargs.attn_implementation")
    draft.take("model.trust_remote_code", "trust_remote_code")
    if draft.get("use_liger_kernel"):
        draft.set("model.liger", True, "use_liger_kernel")
    if draft.given("LoraConfig"):
        rank = "LoraConfig.r"
        alpha = "LoraConfig.lora_alpha"
        draft.set("model.lora.rank", draft.count(rank), "LoraConfig", rank, *draft.unread("GRPOTrainer.peft_config"))
        draft.set("model.lora.alpha", draft.number(alpha), alpha)
        modules = draft.take("model.lora.target_modules", "LoraConfig.target_modules")
        if not modules:
            draft.lose("LoraConfig.target_modules", "peft chooses by the model; here all linear layers but the head")


def _data_and_reward(draft: Draft) -> None:
    names = ("load_dataset.path", "load_dataset.name", "load_dataset.data_files", "load_dataset.split")
    path, name, files, split = map(draft.get, names)
    known = all(isinstance(part, str) for part in (path, split)) and not {*names} & draft.script.unread.keys()
    if known and path in ("json", "parquet") and isinstance(files, str) and split == "train":
        draft.set("data.path", files, names[0], *names[2:])
    elif known and path.count("/") == 1 and "[" not in split and isinstance(name, str | None) and files is None:
        draft.set("data.path", f"hf://{'/'.join(filter(None, [path, name, split]))}", *names[:2], names[3])
    else:
        note = "a file of prompts and answers, or hf://owner/name/split"
        draft.fill_in("data.path", "FILL-IN.jsonl", note, *names, "GRPOTrainer.train_dataset")
    guess = "a guess; want the column's name in the file, which the script does not say"
    draft.fill_in("data.prompt", "prompt", f"prompt, TRL's name, is {guess}")
    draft.fill_in("data.answer", "solution", f"solution, by TRL's accuracy_reward, is {guess}")
    given = draft.given("max_prompt_length")
    note = "" if given else "TRL has no limit; rows with longer prompts are dropped here"
    longest = draft.count("max_prompt_length") if given else 1024
    draft.set("data.max_prompt_length", longest, "max_prompt_length", note=note)
    _rewards(draft)
    draft.set("reward.cut_off", "grade", note="TRL grades cut completions, too")
    draft.set("reward.box", "optional", note="TRL asks for none")


def _rewards(draft: Draft) -> None:
    source = "GRPOTrainer.reward_funcs"
    weights = draft.get("reward_weights")
    if weights is not None and not (isinstance(weights, list) and all(isinstance(w, int | float) for w in weights)):
        raise ValueError(f"want TRL's reward_weights a list of numbers; got {weights!r}")
    functions = [name.removeprefix("trl.") if name not in GRADERS else name for name in draft.get(source) or []]
    for name in functions:
        if not name.isidentifier() and name not in GRADERS:
            draft.lost.append(f"reward_funcs: {name}: models that give rewards are functions of your own here")
    names = [GRADERS.get(name, f"rewards.py:{name if name.isidentifier() else 'FILL_IN'}") for name in functions]
    own = [name for name in names if ":" in name]
    if not names:
        draft.fill_in("reward.function", "rewards.py:FILL_IN", f"the graders: {OWN_FUNCTION}, or reward.kind", source)
    elif own:
        draft.missing.append(f"reward.function: {', '.join(own)}: {OWN_FUNCTION}")
    note = "FILL IN" if own else ""
    if len(names) == 1 and not own:
        draft.set("reward.kind", names[0], source)
    elif names and weights is not None and len(weights) == len(names):
        weighted = dict(zip(names, map(float, weights), strict=True))
        draft.set("reward.function", weighted, source, "reward_weights", note=note)
    elif names:
        draft.set("reward.function", names if len(names) > 1 else names[0], source, note=note)


def _rollout(draft: Draft) -> None:
    vllm = draft.get("use_vllm")
    draft.set("rollout.engine", "vllm" if vllm else "transformers", "use_vllm")
    draft.set("rollout.group_size", draft.count("num_generations"), "num_generations")
    draft.take("rollout.temperature", "temperature")
    draft.set("rollout.max_response_length", draft.count("max_completion_length"), "max_completion_length")
    if not vllm:
        return
    if draft.get("vllm_mode") == "server":
        host = draft.get("vllm_server_host")
        port = draft.get("vllm_server_port")
        url = draft.get("vllm_server_base_url") or f"http://{'localhost' if host == '0.0.0.0' else host}:{port}"
        draft.set("rollout.mode", "server", "vllm_mode", note="a server of vllm serve, as docs/rollouts.md starts it")
        draft.set("rollout.server_url", url, "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
        return
    draft.set("rollout.mode", "colocated", "vllm_mode")
    draft.take("rollout.gpu_memory_utilization", "vllm_gpu_memory_utilization")
    draft.take("rollout.tensor_parallel_size", "vllm_tensor_parallel_size")
    draft.take("rollout.sleep", "vllm_enable_sleep_mode")


def _algorithm(draft: Draft) -> None:
    loss = str(draft.get("loss_type"))
    check_name("TRL's loss_type", loss, LOSSES)
    preset, reduction = LOSSES[loss]
    draft.set("algorithm.preset", preset, "loss_type")
    note = "TRL's mean is over a micro-batch, here over an update" if loss == "bnpo" else ""
    draft.set("algorithm.reduction", reduction, "loss_type", note=note)
    scale = draft.get("scale_rewards")
    scale = {True: "group", False: "none"}[scale] if isinstance(scale, bool) else scale
    check_name("TRL's scale_rewards", scale, ("group", "batch", "none"))
    if scale == "batch":
        draft.set("algorithm.advantage", "batch-std", "scale_rewards")
    else:
        draft.set("algorithm.normalize_std", scale == "group", "scale_rewards")
    if draft.get("importance_sampling_level") != "token":
        draft.set("algorithm.ratio_level", "sequence", "importance_sampling_level")
    if (share := draft.get("top_entropy_quantile")) not in (None, 1, 1.0):
        draft.set("algorithm.top_entropy", share, "top_entropy_quantile")
    _clipping(draft, loss)
    beta = draft.number("beta")
    draft.set("algorithm.objective.kl_coef", float(beta), "beta")
    unbiased = draft.get("use_bias_correction_kl")
    if beta:
        draft.set("algorithm.objective.kl_estimator", "k3-unbiased" if unbiased else "k3", "use_bias_correction_kl")
    if draft.get("entropy_coef"):
        note = "" if reduction == "token" else f"TRL's mean is over tokens, here as reduction {reduction} says"
        draft.set("algorithm.objective.entropy_coef", draft.get("entropy_coef"), "entropy_coef", note=note)
    _mismatch(draft)


def _clipping(draft: Draft, loss: str) -> None:
    low = draft.number("epsilon")
    both = ("epsilon_high",) if draft.given("epsilon_high") else ("epsilon_high", "epsilon")
    high = draft.number(both[-1])
    if loss == "sapo":
        draft.set("algorithm.objective.tau_pos", draft.get("sapo_temperature_pos"), "sapo_temperature_pos")
        draft.set("algorithm.objective.tau_neg", draft.get("sapo_temperature_neg"), "sapo_temperature_neg")
    elif loss == "cispo":
        if high < 1:
            raise ValueError(f"want TRL's epsilon_high, the largest ratio of loss_type cispo, at least 1; got {high}")
        draft.set(
            "algorithm.objective.clip_high", high - 1, *both, note="TRL's bound is of the ratio, here of ratio - 1"
        )
    else:
        draft.set("algorithm.objective.clip_low", low, "epsilon")
        draft.set("algorithm.objective.clip_high", high, *both)
        if draft.get("delta") is not None:
            draft.set("algorithm.objective.dual_clip", draft.get("delta"), "delta")


def _mismatch(draft: Draft) -> None:
    """The weight for the difference between vLLM's logprobs and the trainer's."""
    on = draft.get("vllm_importance_sampling_correction")
    level, _, mode = str(draft.get("vllm_importance_sampling_mode")).partition("_")
    cap = draft.get("vllm_importance_sampling_clip_max")
    low = draft.get("vllm_importance_sampling_clip_min")
    cap = draft.get("vllm_importance_sampling_cap") or cap
    if not (draft.get("use_vllm") and on):
        if draft.get("use_vllm"):
            draft.set("algorithm.objective.mismatch_cap", None, "vllm_importance_sampling_correction")
        return
    names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max")
    draft.set("algorithm.objective.mismatch_cap", cap, names[1], note="no cap" if cap == NO_LIMIT else "")
    draft.set("algorithm.objective.mismatch_mode", mode, names[0])
    draft.set("algorithm.mismatch_level", level, names[0])
    if low is not None:
        draft.set("algorithm.objective.mismatch_low", low, "vllm_importance_sampling_clip_min")


def _sizes(draft: Draft, gpus: int) -> float:
    """Prompts of a step and of an update, and the micro-batch; -> updates of a step."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    each, accumulated, group = map(draft.count, names)
    given = [n for n in ("steps_per_generation", "generation_batch_size") if draft.given(n)]
    sizes = {name: draft.count(name) for name in given}
    update = each * gpus * accumulated
    generated = sizes.get("generation_batch_size", each * gpus * sizes.get("steps_per_generation", accumulated))
    processes = f"{gpus} process{'es' if gpus > 1 else ''}"
    if generated % group:
        raise ValueError(
            f"want TRL's generation batch a multiple of num_generations {group}; got {generated} completions, which is "
            f"per_device_train_batch_size {each} on {processes}: name their number by --gpus"
        )
    note = f"of {processes}"
    step = max(generated, update) // group
    draft.set("train.prompts_per_step", step, *names, *given, note=note)
    part = whole(update / group)
    if part is None or step % part:
        draft.lose("gradient_accumulation_steps", f"an update of {update} completions is no part of {step} groups")
        part = step
    elif part < step:
        draft.set("train.prompts_per_update", part, *names, note=note)
    if part % gpus:
        draft.missing.append(f"train: {part} prompts per update are no multiple of {gpus} GPUs, which a run wants")
    length = draft.values["data"]["max_prompt_length"] + draft.values["rollout"]["max_response_length"]
    draft.set(
        "train.tokens_per_micro_batch", each * length, "per_device_train_batch_size", note="times the longest sample"
    )
    if (steps := draft.count("max_steps", least=-1)) > 0:
        draft.set("train.steps", ceil(steps * part / step), "max_steps", note="TRL counts updates")
    else:
        epochs = draft.number("num_train_epochs", above=0)
        draft.set("train.epochs", max(1, ceil(epochs)), "num_train_epochs", *draft.unread("max_steps"))
        if whole(epochs) is None:
            draft.lose("num_train_epochs", f"{epochs} are rounded up: want train.steps in place of train.epochs")
    return step / part


def _optimizer(draft: Draft) -> None:
    draft.take("train.lr", "learning_rate")
    schedule = str(draft.get("lr_scheduler_type"))
    check_name("TRL's lr_scheduler_type", schedule, SCHEDULES)
    draft.set("train.lr_schedule", SCHEDULES[schedule], "lr_scheduler_type")
    share = "lr_scheduler_kwargs.min_lr_rate"
    least = "lr_scheduler_kwargs.min_lr"
    if draft.has(share):
        draft.take("train.lr_min_ratio", share)
    elif draft.has(least):
        ratio = draft.number(least) / draft.number("learning_rate", above=0)
        draft.set("train.lr_min_ratio", ratio, least, "learning_rate")
    warmup = draft.number("warmup_steps")
    share = draft.get("warmup_ratio")
    if share or 0 < warmup < 1:
        draft.set("train.warmup_ratio", share or warmup, "warmup_ratio" if share else "warmup_steps")
    elif warmup:
        draft.take("train.warmup_steps", "warmup_steps")
    draft.take("train.weight_decay", "weight_decay")
    if draft.given("adam_beta1") or draft.given("adam_beta2"):
        draft.set("train.betas", [draft.get("adam_beta1"), draft.get("adam_beta2")], "adam_beta1", "adam_beta2")
    norm = draft.get("max_grad_norm") or NO_LIMIT
    draft.set("train.grad_clip", norm, "max_grad_norm", note="no clipping" if norm == NO_LIMIT else "")
    draft.take("train.seed", "seed")
    if draft.get("torch_compile"):
        draft.set("train.compile", True, "torch_compile")
    if draft.get("full_determinism"):
        draft.set("train.deterministic", True, "full_determinism")
    draft.take("train.zero_stage", "deepspeed.zero_optimization.stage")
    if (zero := draft.get("deepspeed")) is not None:
        draft.lose("deepspeed", f"{zero} is another file: set train.zero_stage and train.offload_optimizer as it does")


def _checkpoints(draft: Draft, per_step: float) -> None:
    strategy = draft.get("save_strategy")
    every = 0 if strategy == "no" else draft.number("save_steps", above=0)
    if strategy == "epoch":
        draft.lose("save_strategy", "checkpoints are counted in steps: checkpoint.every")
    else:
        draft.set("checkpoint.every", ceil(every / per_step), "save_strategy", "save_steps", note="TRL counts updates")
    draft.take("checkpoint.keep", "save_total_limit")
    reports = draft.get("report_to") or []
    for tracker in ("wandb", "trackio"):
        if tracker in (reports if isinstance(reports, list) else [reports]):
            draft.set(f"log.{tracker}", draft.get("project") or "huggingface", "report_to", "project")
