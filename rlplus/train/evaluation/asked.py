"""The settings that samples and grades depend on. Kept samples with other settings belong to another evaluation."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplus.train.config import Config, RewardConfig
from rlplus.train.config.surroundings import MAY_CHANGE, surroundings
from rlplus.train.data import Example
from rlplus.train.evaluation.scorers import reward_of
from rlplus.train.reward import rules_of

Asked = Mapping[str, str]  # settings by key; "model" and "data" have <place>@<hash>, and the place may change

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_BLOCKS = 16  # hashed parts of a file of weights
_BLOCK = 1 << 16  # bytes of such a part
# The engine's settings that change no distribution, or are for training alone.
_FREE = {key.removeprefix("rollout.") for key in MAY_CHANGE if key.startswith("rollout.")} | {
    "group_size",
    "temperature",
}


def asked_of(
    config: Config, model: Path, benchmark: str, problems: Sequence[Example], ranks: int, ends: Sequence[int] = ()
) -> dict[str, str]:
    """Everything that determines the samples of a benchmark and their grades; defaults are left out.

    model: a folder, or a name on the hub whose config.json is in the cache. ends: the tokens that end a response;
    empty: the tokenizer's `eos_token` alone.
    """
    assert config.evaluation.data is not None
    settings = config.model_dump(
        include={"model", "rollout", "evaluation"},
        exclude={
            "model": {"path", "scratch", "end_tokens"},
            "evaluation": {"k", "every", "benchmarks"},
            "rollout": _FREE,
        },
        exclude_defaults=True,
    )
    settings.get("evaluation", {}).get("data", {}).pop("path", None)
    reward = reward_of(config.reward, config.evaluation, benchmark)
    given = reward.model_dump(exclude_defaults=True, exclude={"workers", "cut_off", "box"})
    settings["reward"] = given | _rules(reward)
    settings["data"] = {"response_prefix": config.data.response_prefix}
    rows = [(e.index, e.prompt, e.answer, e.rows, dict(e.columns)) for e in problems]
    return {
        **dict(_flat(settings)),
        "benchmark": benchmark,
        "model": model_identity(model),  # after the settings: an empty section leaves its own name there
        "data": f"{', '.join(config.evaluation.data.paths)}@{_hash(rows)}",
        **({"model.end_tokens": json.dumps(sorted(ends))} if ends else {}),
        "evaluation.samples": str(config.evaluation.samples),
        "evaluation.temperature": str(config.evaluation.temperature),
        "train.seed": str(config.train.seed),
        "processes": str(ranks),
        **{key: value for key, value in surroundings(config).items() if not key.startswith("algorithm.")},
    }


def _rules(reward: RewardConfig) -> dict[str, str]:
    """The rules in effect, by key; none for graders that take every response, as those of version 0.3.0 did."""
    found = [rules_of(name, reward.cut_off, reward.box) for name in reward.names]
    ends = {"zero" if rules.zero_if_cut else "grade" for rules in found}
    boxes = {str(rules.box) for rules in found}
    return {
        key: " or ".join(sorted(values))
        for key, values in (("cut_off", ends), ("box", boxes))
        if not values <= {"grade", "optional"}
    }


def comparable(asked: Asked) -> dict[str, str]:
    """Without the places of the model and the data, which change no sample."""
    return {key: value.rpartition("@")[2] if key in ("model", "data") else value for key, value in asked.items()}


def differences(there: Asked, asked: Asked) -> list[str]:
    """The differences, such as "evaluation.samples 5 (asked: 8)"."""
    one = comparable(there)
    other = comparable(asked)
    keys = [key for key in dict.fromkeys([*asked, *there]) if one.get(key) != other.get(key)]
    return [f"{key} {there.get(key, 'default')} (asked: {asked.get(key, 'default')})" for key in keys]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()[:12]


def model_identity(model: Path) -> str:
    """<folder>@<hash of its config.json, and of names, sizes and some blocks of its weights>, or <name>@<commit>.

    The hash is the same wherever the folder is, and whenever it was written.
    """
    if not model.is_dir():
        return f"{model}@{_cached_revision(str(model)) or _hash(str(model))}"
    return f"{model}@{model_hash(model)}"


def model_hash(model: Path) -> str:
    """The hash of a model's folder in `model_identity`."""
    files = [file for file in sorted(model.glob("*")) if file.suffix in _WEIGHTS]
    return _hash([(model / "config.json").read_bytes(), *map(_sketch, files)])


def _sketch(file: Path) -> tuple[str, int, list[bytes]]:
    """Name, size and blocks at equal distances, the first and the last one included."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        blocks = []
        for place in range(_BLOCKS):
            opened.seek(max(0, size - _BLOCK) * place // (_BLOCKS - 1))
            blocks.append(hashlib.sha256(opened.read(_BLOCK)).digest())
    return file.name, size, blocks


def _cached_revision(name: str) -> str | None:
    """The commit of the hub's model that the cache has as its newest; None without any."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, "config.json")
    return Path(path).parent.name if isinstance(path, str) else None
