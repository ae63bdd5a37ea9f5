"""A language model of GSM8K's text: its own byte-level BPE, and a small Qwen3 trained on questions and solutions."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlplus.common.textfiles import read_text
from rlplus.learner.pretrained import write_model
from rlplus.loss import linear_logprob

END = "<|end|>"
HELD_OUT = 64  # problems at the end of the data that the model is not trained on: the prompts of its samples


@dataclass(frozen=True)
class Size:
    vocabulary: int = 16_000
    hidden: int = 256
    layers: int = 4
    batch: int = 32  # texts
    length: int = 256  # tokens; a text is cut there
    epochs: int = 3
    lr: float = 2e-3


def problems(file: Path) -> list[tuple[str, str]]:
    """(question, solution) of each line of a file like openai/gsm8k's train.jsonl."""
    found = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        row = json.loads(line)
        if not {"question", "answer"} <= set(row):
            raise ValueError(f"{file}, line {number}: want question and answer; got {', '.join(row)}")
        found.append((row["question"] + "\n", row["answer"]))
    if len(found) <= HELD_OUT:
        raise ValueError(f"{file}: want more than {HELD_OUT} problems; got {len(found)}")
    return found


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, padding_side="left")


def make_model(tokenizer: PreTrainedTokenizerFast, size: Size, seed: int) -> Qwen3ForCausalLM:
    """Random weights; the head has weights of its own, since a tied one of this width learns more slowly."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=size.hidden,
                intermediate_size=3 * size.hidden,
                num_hidden_layers=size.layers,
                num_attention_heads=max(1, size.hidden // 64),
                num_key_value_heads=max(1, size.hidden // 64),
                head_dim=64,
                max_position_embeddings=2 * size.length,
                tie_word_embeddings=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )


def batches(rows: Sequence[list[int]], size: Size, rng: random.Random) -> Iterator[Tensor]:
    """Token ids (batch, longest), -1 behind the end of a text; texts of a batch are about equally long."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]) + rng.random())
    starts = list(range(0, len(rows), size.batch))
    rng.shuffle(starts)
    for start in starts:
        part = [torch.tensor(rows[i][: size.length]) for i in order[start : start + size.batch]]
        yield torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=-1)


def text_loss(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """Mean negative logprob of all tokens but the first of each text."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids.clamp(min=0)).last_hidden_state[:, :-1]
    target = ids[:, 1:].masked_fill(ids[:, 1:] < 0, -100)
    logprob, _ = linear_logprob(hidden.bfloat16(), model.lm_head.weight, target)
    return -logprob.sum() / (target >= 0).sum()


def make(folder: Path, file: Path, size: Size, seed: int, say: Callable[[str], None]) -> None:
    """Train tokenizer and model on the file's problems but the last, and write both to `folder`."""
    texts = ["".join(problem) for problem in problems(file)[:-HELD_OUT]]
    tokenizer = make_tokenizer(texts, size.vocabulary)
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts).input_ids]
    model, rng = make_model(tokenizer, size, seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps = size.epochs * -(-len(rows) // size.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.lr, total_steps=steps, pct_start=0.05)
    for epoch in range(size.epochs):
        losses = []
        for ids in batches(rows, size, rng):
            loss = text_loss(model, ids)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        say(f"epoch {epoch + 1} of {size.epochs}: {sum(losses) / len(losses):.3f} nats a token")
    write_model(model, str(folder))
    tokenizer.save_pretrained(folder)
