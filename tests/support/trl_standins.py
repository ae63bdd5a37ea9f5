"""Stand-ins for the models and data sets that TRL's tests download: the same names, architectures and columns.

`make` writes them into a folder; from there a name such as "trl-internal-testing/zen" is a path. A token is a byte, but
for Qwen3Moe: tests give it answers as Qwen's token ids, so it has Qwen's vocabulary and merges, from the package
dashscope: prompts with tools are short then, and logits of 151,669 words few.
"""

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast
from trl import chat_template_utils

from rlplus.train.data import byte_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"]
SPECIAL += ["<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"]
PLAIN += ["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
MOE = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # the name after tiny-: type, TRL's chat template, its own sizes
    "Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5", {}),
    "Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5", {"num_labels": 1}),
    "Qwen3ForCausalLM": ("qwen3", "qwen3", {"head_dim": 4}),
    "Qwen3ForSequenceClassification": ("qwen3", "qwen3", {"head_dim": 4, "num_labels": 1}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3", {"head_dim": 4, "moe_intermediate_size": 32, **MOE}),
    "LlamaForCausalLM-3.2": ("llama", "llama3_2", {}),
    "LlamaForSequenceClassification-3.2": ("llama", "llama3_2", {"num_labels": 1}),
    "MistralForCausalLM-0.2": ("mistral", "qwen2_5", {}),
    "Gemma2ForCausalLM": ("gemma2", "gemma", {"head_dim": 4}),
    "GptOssForCausalLM": ("gpt_oss", "gptoss", {"head_dim": 4, **MOE}),
    "Cohere2ForCausalLM": ("cohere2", "cohere2", {"logit_scale": 1.0}),
    "Glm4MoeForCausalLM": ("glm4_moe", "glm4moe", {"head_dim": 4, "moe_intermediate_size": 32, "n_group": 1, **MOE}),
    "NemotronHForCausalLM-nano": (
        *("nemotron_h", "nemotron_3_nano"),
        {
            **{"layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 4},
            **{"mamba_n_groups": 1, "ssm_state_size": 16, "moe_shared_expert_intermediate_size": 32},
            **{"moe_intermediate_size": 32, "use_mamba_kernels": False, **MOE},
        },
    ),
}
SIZES = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "num_key_value_heads": 2,
}
QUESTIONS = ["Beautiful is better than", "Explicit is", "Flat is better than"]


def make(folder: Path) -> None:
    """Write all stand-ins into folder/trl-internal-testing."""
    home = folder / "trl-internal-testing"
    small, large = tokenizer(_bytes(), []), tokenizer(*_qwen())
    for name, (kind, template, own) in MODELS.items():
        tokens = large if name == "Qwen3MoeForCausalLM" else small
        special = {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id, "bos_token_id": None}
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=len(tokens), **SIZES, **special, **own)
        model = getattr(transformers, name.partition("-")[0])(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
        model.to(torch.bfloat16).save_pretrained(home / f"tiny-{name}")
        text = Path(chat_template_utils.__file__).parent / "chat_templates" / f"{template}.jinja"
        tokens.chat_template = text.read_text()
        tokens.save_pretrained(home / f"tiny-{name}")
    conversation = [{"role": "user", "content": QUESTIONS[0]}]  # one: prompts with tools are the long ones
    write_data(home / "zen", standard_prompt_only=QUESTIONS, conversational_prompt_only=[conversation])


def tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Byte-level BPE. SPECIAL and PLAIN follow the vocabulary as in Qwen3's."""
    own = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(SPECIAL)
    own.add_tokens(PLAIN)
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<|endoftext|>", eos_token="<|im_end|>")


def _bytes() -> dict[str, int]:
    model = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]
    return {sign: id for sign, id in model["vocab"].items() if id < 256}


def _qwen() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """-> Qwen's vocabulary and its merges: all halves of each word, in the order of the words' ranks."""
    spec = find_spec("dashscope")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("want dashscope, which has Qwen's vocabulary: pip install --no-deps dashscope")
    words = (Path(spec.origin).parent / "resources/qwen.tiktoken").read_bytes().split()
    signs = {byte: sign for sign, byte in _bytes().items()}
    ids = zip(words[::2], words[1::2], strict=True)
    ranks = {"".join(signs[byte] for byte in base64.b64decode(word)): int(rank) for word, rank in ids}
    merges = []
    for word in sorted(ranks, key=ranks.__getitem__):
        halves = ((word[:i], word[i:]) for i in range(1, len(word)))
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return ranks, merges


def write_data(folder: Path, **prompts: list[Any]) -> None:
    """A data set with a configuration for each list of prompts, and the splits train and test."""
    lines = ["---", "configs:"]
    for name, column in prompts.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, rows in {"train": column, "test": column[:2]}.items():
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows))
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
