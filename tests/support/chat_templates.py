"""Chat templates and tokenizers for the tests of environments."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlplus.train.data import byte_tokenizer

TURNS = (Path(__file__).parents[2] / "examples/turns.jinja").read_text()

# Qwen2.5's form, shortened.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's: thinking of turns before the last user message is left out.
FORGETFUL = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}",
)


def byte_turns(template: str = TURNS) -> Any:
    """One token per byte: the text of any tokens is known without a tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def word_tokenizer(template: str = CHATML) -> Any:
    """A byte-level BPE with merges, which splits a text in one way of many, and special tokens as Qwen2.5 has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([f"{template} higher lower guess {i}" for i in range(50)] * 4, trainer)
    tokenizer.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = template
    return fast
