"""The model a run starts from: a folder, a name on the hub, or random weights."""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.utils import cached_file

from rlplus.common import agree
from rlplus.common.errors import install_command
from rlplus.train.config import Config, ModelConfig, ScratchModel
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.dropout import turn_off_dropout, without_dropout

SHOWN = 5  # tensors, in a message
# Model types of transformers whose packed sequences see each other: positions that restart do not separate them.
MIXES = {"bloom", "falcon_h1", "gpt_oss", "mamba", "mpt", "opt", "recurrent_gemma"}

logger = logging.getLogger(__name__)


def prepare_model(config: ModelConfig, folder: Path, seed: int) -> tuple[str, PretrainedConfig]:
    """(path, configuration) to load the model from; all ranks call it. ValueError for weights that are not the model's.

    A scratch model is written to `folder`/scratch, with its tokenizer, by rank 0. An existing one is overwritten: it
    may be incomplete, or have another seed or size.
    """
    if config.scratch is None:
        assert config.path is not None
        return config.path, existing_model(config.path, config.trust_remote_code, config.overrides)
    path = str(folder / "scratch")
    if dist.get_rank() == 0:
        tokenizer = byte_tokenizer()
        write_model(make_scratch_model(config.scratch, tokenizer, seed), path)
        write_pretrained(tokenizer, path)
    agree.barrier()
    if config.overrides:
        return path, existing_model(path, config.trust_remote_code, config.overrides)
    return path, read_model_config(path, config.trust_remote_code)


def existing_model(
    path: str, trust_remote_code: bool, overrides: dict[str, Any] | None = None, *, key: str = "model.path"
) -> PretrainedConfig:
    """The configuration of the model in `path`, with the overrides; ValueError for other weights. Collective.

    key: the configuration's, for the error where there is none.
    """
    model_config = with_overrides(read_model_config(path, trust_remote_code, key), overrides or {})
    check_packing(model_config)
    _check_weights(path, model_config, trust_remote_code)
    return model_config


def check_packing(model_config: PretrainedConfig) -> None:
    """ValueError for a model that would train on packed sequences as if they were one."""
    if model_config.model_type in MIXES:
        raise ValueError(
            "want a model that keeps packed sequences apart by their positions (docs/models.md has a list); got "
            f"{model_config.model_type}, whose sequences would see each other"
        )


def _check_weights(path: str, model_config: PretrainedConfig, trust_remote_code: bool) -> None:
    """ValueError on all ranks unless the checkpoint has every parameter of the model, in its shape.

    transformers initialises missing parameters randomly, and so may vLLM; under ZeRO-3 wrong shapes fail on one rank
    only and unexpected tensors are not reported. So rank 0 reads the checkpoint once before.
    """
    together = dist.is_initialized()
    problem = ""
    if not together or dist.get_rank() == 0:
        try:
            problem = _problem_with_weights(path, model_config, trust_remote_code)
        except Exception as error:  # the other ranks wait for the answer
            problem = f"could not read the weights of {path}: {' '.join(str(error).split()) or repr(error)}"
    if problem := agree.gathered(problem)[0] if together else problem:
        raise ValueError(problem)


def _problem_with_weights(path: str, model_config: PretrainedConfig, trust_remote_code: bool) -> str:
    """A description of the problem; empty if there is none. A parameter tied to an existing one is not missing."""
    _, found = AutoModelForCausalLM.from_pretrained(
        path,
        config=model_config,
        trust_remote_code=trust_remote_code,
        device_map="meta",
        ignore_mismatched_sizes=True,  # they are reported below
        output_loading_info=True,
    )
    if found["unexpected_keys"]:
        logger.warning("%s has tensors that the model does not: %s", path, _some(found["unexpected_keys"]))
    shapes = [f"{name} {tuple(got)} instead of {tuple(want)}" for name, got, want in found["mismatched_keys"]]
    wrong = {"lacks": found["missing_keys"], "has other shapes than the model:": shapes}
    listed = [f"{verb} {_some(names)}" for verb, names in wrong.items() if names]
    kind = type(model_config).__name__.removesuffix("Config")
    return f"want a checkpoint with all weights of the {kind} model; {path} {' and '.join(listed)}" if listed else ""


def _some(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    rest = f" and {len(more) - SHOWN + 1} more" if len(more) >= SHOWN else ""
    return ", ".join([first, *more[: SHOWN - 1]]) + rest


def load_model(config: ModelConfig, path: str, model_config: PretrainedConfig) -> PreTrainedModel:
    """The causal LM with the run's attention, dtype and kernels, without dropout.

    ValueError for what is not installed or has no GPU.
    """
    if config.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        raise ValueError(
            "model.attention flash_attention_2 needs the package flash-attn, which is not installed: "
            f"{install_command('flash')} --no-build-isolation"
        )
    lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path,
        config=without_dropout(model_config),
        dtype=getattr(torch, config.dtype),
        attn_implementation=config.attention,
        trust_remote_code=config.trust_remote_code,
    )
    cap = getattr(lm.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if cap is not None and config.attention == "sdpa":
        raise ValueError(
            "want model.attention flash_attention_2 or eager, since transformers' sdpa leaves out the softcap of "
            f"{type(lm).__name__} (attn_logit_softcapping {cap}); got sdpa"
        )
    if config.liger:
        _apply_liger(lm)
    turn_off_dropout(lm)
    return lm


def weights_fingerprint(path: str) -> str | None:
    """A hash of config.json and of the names, shapes and first 4 kB of all tensors; None without safetensors.

    It distinguishes models, even if one was trained from the other, by reading about a megabyte; it does not detect bit
    rot.
    """

    def find(name: str) -> str | None:
        found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return found

    config = find("config.json")
    index = find("model.safetensors.index.json")
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    files = [find(name) for name in names]
    if config is None or None in files:
        return None
    fields = json.loads(Path(config).read_text())
    written_by = ("_name_or_path", "transformers_version")
    digest = hashlib.sha256(
        json.dumps({k: v for k, v in fields.items() if k not in written_by}, sort_keys=True).encode()
    )
    for file in files:
        with open(str(file), "rb") as weights:
            size = int.from_bytes(weights.read(8), "little")
            header = json.loads(weights.read(size))
            for name in sorted(header.keys() - {"__metadata__"}):
                begin, end = header[name]["data_offsets"]
                weights.seek(8 + size + begin)
                digest.update(
                    json.dumps([name, header[name]], sort_keys=True).encode() + weights.read(min(4096, end - begin))
                )
    return digest.hexdigest()


def write_model(lm: PreTrainedModel, folder: str, state: dict[str, Tensor] | None = None) -> None:
    """Write a Hugging Face folder of the model, or of the weights in `state`, with the permissions of the umask.

    OSError, which names the folder, when the disk is full.
    """
    for unfinished in Path(folder).glob(".tmp??????"):  # safetensors', of a process that died
        unfinished.unlink(missing_ok=True)
    with _named("the model", folder):
        lm.save_pretrained(folder, state_dict=state)
    for file in Path(folder).glob("*.safetensors"):
        shutil.copymode(Path(folder) / "config.json", file)  # safetensors' own is 0600, whatever the umask


def write_pretrained(part: PreTrainedTokenizerBase | PretrainedConfig, folder: str) -> None:
    """Write a tokenizer or a model's configuration into a Hugging Face folder; OSError names that."""
    with _named("the configuration" if isinstance(part, PretrainedConfig) else "the tokenizer", folder):
        part.save_pretrained(folder)


@contextmanager
def _named(what: str, folder: str) -> Iterator[None]:
    """OSError with the folder for failed writes, of which the libraries do not say where, nor all raise OSError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:  # tokenizers raises that
            raise
        raise OSError(f"could not write {what} to {folder}: {error}") from error


@contextmanager
def in_shards(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """ZeRO-3: models loaded in this context are sharded layer by layer; no rank ever holds a whole one."""
    held = HfDeepSpeedConfig(deepspeed_config)  # transformers has a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()  # else every later model of this process, a rollout engine's too, would be sharded
        del held


def restore_buffers(lm: PreTrainedModel) -> None:
    """Compute again what a model loaded `in_shards` has in another dtype than a whole one: its rotary frequencies.

    While it is made, DeepSpeed turns every new tensor into the weights' dtype. With frequencies in bf16, position 1000
    is turned by up to two radians too far or too little. ValueError for buffers that transformers cannot initialise.
    """
    options: dict[str, Any] = {"dtype": lm.dtype, "attn_implementation": "eager"}  # which has the same buffers
    with torch.device("meta"):
        whole = dict(type(lm)._from_config(deepcopy(lm.config), **options).named_buffers())
    changed = {name: buffer for name, buffer in lm.named_buffers() if buffer.dtype != whole[name].dtype}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in changed):
        module = lm.get_submodule(path)
        names = [name.rpartition(".")[2] for name in changed if name.rpartition(".")[0] == path]
        for name in names:
            buffer = getattr(module, name)
            setattr(module, name, torch.full_like(buffer, torch.nan, dtype=whole[f"{path}.{name}".lstrip(".")].dtype))
        lm._init_weights(module)
        for name in names:
            if not getattr(module, name).isfinite().all():
                raise ValueError(
                    f"train.zero_stage 3: want buffers that {type(lm).__name__} can initialise; "
                    f"got {path}.{name}, which DeepSpeed turned into {changed[f'{path}.{name}'.lstrip('.')].dtype}"
                )


def _apply_liger(lm: PreTrainedModel) -> None:
    """Liger's RMSNorm, rotary embedding and SwiGLU, never its losses."""
    if not torch.cuda.is_available():
        raise ValueError("model.liger needs CUDA: Liger's kernels do not run on the CPU")
    if find_spec("liger_kernel") is None:
        raise ValueError(
            f"model.liger needs the package liger-kernel, which is not installed: {install_command('vllm')}"
        )
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as LIGER

    kind = lm.config.model_type
    if kind not in LIGER:
        raise ValueError(f"model.liger: want a model type that Liger knows ({', '.join(LIGER)}); got {kind}")
    LIGER[kind](model=lm, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False)


def make_scratch_model(scratch: ScratchModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, tied embeddings and the tokenizer's vocabulary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=scratch.hidden_size,
                intermediate_size=scratch.intermediate_size,
                num_hidden_layers=scratch.layers,
                num_attention_heads=scratch.heads,
                num_key_value_heads=scratch.heads,
                max_position_embeddings=scratch.max_position_embeddings,
                initializer_range=scratch.initializer_range,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )


def add_value_head(lm: PreTrainedModel, seed: int) -> None:
    """Replace the model's head by one of width 1 without bias: normal of std 1 / (H + 1), the same on every rank."""
    width = lm.get_output_embeddings().in_features
    weight = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / (width + 1)
    head = nn.utils.skip_init(nn.Linear, width, 1, bias=False, device=lm.device, dtype=lm.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    lm.set_output_embeddings(head)


def read_model_config(path: str, trust_remote_code: bool, key: str = "model.path") -> PretrainedConfig:
    """The configuration of a Hugging Face folder or hub name; ValueError where there is none."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # foreign files can raise anything
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"want {key} a Hugging Face folder or hub name; got {path!r}: {reason}") from error
    return config


def positions(model_config: PretrainedConfig) -> int | None:
    """The number of tokens that the model can take; None if its configuration sets no limit."""
    found: int | None = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found


def check_positions(config: Config, model_config: PretrainedConfig, *, trains: bool = True) -> None:
    """ValueError if the model has fewer positions than the longest prompt and response have tokens.

    trains: whether the run trains, or only evaluates.
    """
    longest = max(config.max_sample_length, config.max_generation_length) if trains else config.max_evaluation_length
    places = positions(model_config)
    if places is not None and longest > places:
        evaluates = not trains or config.max_generation_length > config.max_sample_length
        whose = " of an evaluation" if evaluates else ""
        section = "evaluation.data" if evaluates else "data"
        teachers = "" if evaluates else config.teachers
        raise ValueError(
            f"the longest prompt{teachers} and response{whose} have {longest} tokens together, the model has "
            f"{places} positions: lower {section}.max_prompt_length or rollout.max_response_length, or raise "
            "model.overrides.max_position_embeddings (and the rope with it)"
        )


def with_overrides(config: PretrainedConfig, overrides: dict[str, Any]) -> PretrainedConfig:
    """The model's configuration with the run's overrides; ValueError for fields or values that it does not accept."""
    fields = config.to_dict()
    for name, value in overrides.items():
        if name == "rope_theta" and isinstance(fields.get("rope_parameters"), dict):
            fields["rope_parameters"] = fields["rope_parameters"] | {"rope_theta": value}
        elif name in fields:
            fields[name] = value
        else:
            raise ValueError(
                f"model.overrides.{name}: want a field of {type(config).__name__}; it has {', '.join(fields)}"
            )
    if not overrides:
        return config
    try:
        return type(config).from_dict(json.loads(json.dumps(fields, default=str)))
    except Exception as error:  # foreign classes can raise anything
        reason = " ".join(str(error).split()) or repr(error)
        wanted = f"want model.overrides that make a valid {type(config).__name__}"
        raise ValueError(f"{wanted}; got {overrides}: {reason}") from error
