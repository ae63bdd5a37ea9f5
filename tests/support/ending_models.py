"""A chat model whose turns end in another token than its tokenizer's eos, as Gemma's do; it says a known text."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlplus.train.data import byte_tokenizer

EOS, END_OF_TURN = 257, 258
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def turn_tokenizer(template: str | None = GEMMA, *, special: bool = True) -> Any:
    """A byte is a token, <|endoftext|> (257) the eos, <end_of_turn> 258 and <start_of_turn> 259."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.add_tokens([AddedToken(f"<{which}_of_turn>", special=special) for which in ("end", "start")])
    tokenizer.chat_template = template
    return tokenizer


def write_chat_model(
    folder: Path, says: str = "", end: int = END_OF_TURN, *, template: str | None = GEMMA, special: bool = True
) -> Path:
    """A model that answers every chat prompt with the text, whose characters differ, and with `end` for ever.

    The last token decides: the head's row of each token points at its predecessor, and the layer adds next to nothing.
    """
    tokenizer = turn_tokenizer(template, special=special)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=EOS,
        pad_token_id=256, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        lm = Qwen2ForCausalLM(config).float()
        embedding, head = lm.model.embed_tokens.weight, lm.lm_head.weight
        embedding.copy_(torch.randint(0, 2, embedding.shape) * 2.0 - 1)
        embedding[:, 0] = 1
        head.zero_()
        head[end, 0] = 45  # between the 64 of a predecessor and what other tokens have in common with it
        for before, after in zip(b"\n" + says.encode(), [*says.encode(), end], strict=True):
            head[after] += embedding[before]
    lm.generation_config = GenerationConfig(eos_token_id=[EOS, END_OF_TURN], pad_token_id=256)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
