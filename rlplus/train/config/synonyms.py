"""Names that other trainers have for this package's keys, so that an unknown key can be answered with the one meant.

`rlplus convert` and the messages about unknown keys read the same tables.
"""

from collections.abc import Iterable

from rlplus.train.config import openrlhf_names, trl_names, verl_names

TRL = trl_names.NAMES
VERL = verl_names.NAMES
OPENRLHF = openrlhf_names.NAMES

# Words of no one trainer, and of rlplus 0.3.0.
COMMON = {
    "batch_size": "train.prompts_per_step",
    "train_batch_size": "train.prompts_per_step",
    "mini_batch_size": "train.prompts_per_update",
    "kl_coef": "algorithm.objective.kl_coef",
    "clip_eps": "algorithm.objective.clip_low",
    "max_new_tokens": "rollout.max_response_length",
    "max_tokens": "rollout.max_response_length",
    "max_length": "rollout.max_response_length",
    "model_name": "model.path",
    "num_epochs": "train.epochs",
    "bf16": "model.dtype",
    "push_folder": "rollout.transfer",
    "train.memory": "train.max_scratch_mb",
}

# Sizes that others count in sequences or steps.
COUNTED = {
    "train.tokens_per_micro_batch": ", in tokens",
    "train.prompts_per_step": ", in prompts",
    "train.prompts_per_update": ", in prompts",
}


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


WITHOUT = {  # the reason, by the trainer and its key
    "verl": _by_key(verl_names.WITHOUT),  # first: its keys are the longest
    "TRL": _by_key(trl_names.WITHOUT),
    "OpenRLHF": _by_key(openrlhf_names.WITHOUT),
}


def ending(key: str, names: Iterable[str]) -> str | None:
    """The longest of the dotted names that the key is or ends in."""
    return max((name for name in names if f".{key}".endswith(f".{name}")), key=len, default=None)


def synonym(key: str) -> str | None:
    """The meaning of an unknown key elsewhere, as in "TRL's beta is algorithm.objective.kl_coef here"."""
    if (name := ending(key, VERL)) is not None and VERL[name] != key:
        return _meant("verl", name, VERL[name])
    flag = key.lstrip("-").replace("-", "_")
    last = key.rpartition(".")[2].lstrip("-").replace("-", "_")
    common = ending(flag, COMMON)
    for trainer, names, name in (("TRL", TRL, last), ("OpenRLHF", OPENRLHF, flag), ("OpenRLHF", OPENRLHF, last)):
        if name in names and (key.startswith("-") or common is None):
            return _meant(trainer, name, names[name])
    if common is not None:
        return f"here it is {COMMON[common]}{COUNTED.get(COMMON[common], '')}"
    for trainer, reasons in WITHOUT.items():
        name = ending(key, reasons) if trainer == "verl" else next((n for n in (flag, last) if n in reasons), None)
        if name is not None:
            return f"{trainer}'s {name} has no counterpart here: {reasons[name]}"
    return None


def _meant(trainer: str, name: str, here: str) -> str:
    return f"{trainer}'s {name} is {here} here{COUNTED.get(here, '')}"
