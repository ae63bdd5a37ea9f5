"""Add to a run's data the logprobs of the demonstrations under their author, or what a teacher says of them.

    python examples/score_demonstrations.py run.yaml --model DEMONSTRATOR --output scored.jsonl [section.key=value ...]
    rlplus train run.yaml data.path=scored.jsonl data.behavior_logprob=behavior_logprob

Every row of `data.path` becomes a line of JSON with one column more: a list, one logprob per token that the run will
train on, the end token included; null where the run would not train on the demonstration; a list of these where the
row has a list of demonstrations. With it the denominator of `mis`, `omega` and `shaped` is the true one; without it
`mis` estimates it, and the others take it as 1.

Tokens come from the run's tokenizer, and the demonstrator gives the probability of exactly these. So both must have
the same tokens: a used token with another meaning in the demonstrator's vocabulary is an error, and so is an end token
at which the demonstrator would not end. Prompts are the run's as well. If the demonstrator was prompted differently,
set `model.chat_template=ITS_TEMPLATE` and other keys of `data`, as long as the demonstrations' tokens stay the same.
`--temperature` is the one that the demonstrations were sampled at.

With `--topk K` the model is a teacher, and the column has its K likeliest tokens at each place, for recipe `distill`:

    python examples/score_demonstrations.py run.yaml --model TEACHER --topk 16 --output taught.jsonl
    rlplus train run.yaml data.path=taught.jsonl data.teacher_topk=teacher_topk algorithm.preset=sft
        "algorithm.recipe={name: distill, teacher_topk: 16}"

With `--states FOLDER` its hidden states and its head are kept, from which the run has the whole vocabulary:

    python examples/score_demonstrations.py run.yaml --model TEACHER --states states
    rlplus train run.yaml algorithm.preset=sft "algorithm.recipe={name: distill, teacher_states: states}"
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

try:
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

    from rlplus.common.durable import locked
    from rlplus.common.teacher_states import LOCK, StatesWriter, TeacherStates, digest, vocabulary_digest
    from rlplus.common.terminal import counter
    from rlplus.loss import head_of, linear_logprob
    from rlplus.train.config import Config, load_config
    from rlplus.train.data import Example, find_ends, load_examples, load_tokenizer
    from rlplus.train.data.demonstration_columns import holds_several
    from rlplus.train.data.row_files import Row, get_column, read_rows
    from rlplus.train.learner.pretrained import load_model, positions, read_model_config, weights_fingerprint
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[train]"') from None

COLUMN, TOPK = "behavior_logprob", "teacher_topk"
PLACES = 512  # whose logits are in memory at a time
MOST = 1024  # the largest algorithm.recipe.teacher_topk


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Score demonstrations with the model that wrote them.")
    parser.add_argument("config", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--model", required=True, help="the demonstrator: a Hugging Face folder or hub name")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, help="JSONL file to write")
    where.add_argument("--states", type=Path, help="folder for a teacher's hidden states and head, in place of a file")
    parser.add_argument("--temperature", type=float, default=1.0, help="that demonstrations were sampled at; default 1")
    parser.add_argument("--topk", type=int, default=0, help="likeliest tokens of a teacher, in place of logprobs")
    parser.add_argument("--tokens", type=int, default=16384, help="per forward pass, padding included")
    args = parser.parse_intermixed_args(argv)
    if (args.topk or args.states) and args.temperature != 1:
        parser.error(f"want --temperature 1 of a teacher, which wrote nothing; got {args.temperature:g}")
    if not 0 <= args.topk <= MOST or (args.topk and args.states):
        parser.error(f"want --topk from 1 to {MOST}, and not with --states; got {args.topk}")
    config = load_config(args.config, args.overrides)
    tokenizer = load_tokenizer(config.model)
    data = config.data.model_copy(update={COLUMN: None, TOPK: None})
    ends, limit = find_ends(config.model, tokenizer), config.max_demonstration_length
    examples, report = load_examples(data, tokenizer, max_demonstration_length=limit, ends=ends)
    print(report.summary())
    theirs_config = read_model_config(args.model, config.model.trust_remote_code, "--model")
    longest = max((len(e.prompt) + len(e.demonstration or ()) for e in examples), default=0)
    if (places := positions(theirs_config)) is not None and longest > places:
        raise ValueError(
            f"want a model with {longest} positions, for prompt and demonstration; {args.model} has {places}"
        )
    lm = load_model(config.model, args.model, theirs_config)
    check_tokens(examples, tokenizer, theirs := AutoTokenizer.from_pretrained(args.model), lm)
    few = tokenizer.get_vocab() != theirs.get_vocab() or head_of(lm)["weight"].shape[0] < len(tokenizer)
    if (args.topk or args.states) and few:
        raise ValueError(f"want a teacher with all of the run's {len(tokenizer)} tokens, each with the same number")
    lm = lm.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    if args.states:
        keep_states(lm, examples, args, config, tokenizer)
    else:
        write_column(lm, examples, args, config, len(tokenizer))


def write_column(
    lm: PreTrainedModel, examples: Sequence[Example], args: argparse.Namespace, config: Config, vocabulary: int
) -> None:
    """Write the rows of the data with one column more."""
    column_name = TOPK if args.topk else COLUMN
    total = sum(example.demonstration is not None for example in examples)
    scored: dict[int, Any] = {}  # keys: places in `examples`; tensors, which are a tenth of the lists
    with counter("demonstrations scored:") as progress:
        for batch in batches(examples, args.tokens):
            chosen = [examples[i] for i in batch]
            scored |= zip(batch, score(lm, chosen, args.temperature, args.topk, vocabulary), strict=True)
            progress(len(scored), total)
    found: dict[int, list[Any]] = {}  # keys: rows
    for i, example in enumerate(examples):
        found.setdefault(example.index, []).append(scored.get(i))
    with args.output.open("w", encoding="utf-8") as file:
        for index, row in enumerate(rows(config)):
            told = [one and listed(one) for one in found.get(index, [])]
            column = {column_name: (told or None) if several(row, config) else told[0] if told else None}
            file.write(json.dumps(row | column, ensure_ascii=False) + "\n")
    print(f"{len(scored)} demonstrations scored; written to {args.output}")


def keep_states(
    lm: PreTrainedModel,
    examples: Sequence[Example],
    args: argparse.Namespace,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write the folder; goes on where it was interrupted."""
    head: Any = head_of(lm)
    if (fingerprint := weights_fingerprint(args.model)) is None:
        raise ValueError(f"want a teacher with safetensors, by which a run knows it; got {args.model} without")
    teacher = {
        "fingerprint": fingerprint,
        "vocabulary": vocabulary_digest(tokenizer.get_vocab()),
        "dtype": config.model.dtype,
        "hidden": head["weight"].shape[1],
        "logit_scale": head["logit_scale"],
        "logit_softcap": head["logit_softcap"],
    }
    tensors = {name: head[name].detach().cpu() for name in ("weight", "bias") if head[name] is not None}
    args.states.mkdir(parents=True, exist_ok=True)
    with locked(args.states / LOCK, f"want one process at a time that writes into {args.states}"):
        writer = StatesWriter(args.states, teacher, tensors)
        shown = {digest(e.prompt, e.demonstration): e for e in examples if e.demonstration is not None}
        left = {name: e for name, e in shown.items() if name not in writer.known}
        tokens = sum(len(e.demonstration or ()) for e in left.values())
        size = tokens * teacher["hidden"] * head["weight"].itemsize / 1e9
        print(f"{len(left)} of {len(shown)} different demonstrations to keep, {size:.2g} GB")
        done, (names, chosen) = 0, (list(left), list(left.values()))
        with counter("demonstrations kept:") as progress:
            for batch in batches(chosen, args.tokens):
                for i, states in zip(batch, predicting(lm, [chosen[i] for i in batch]), strict=True):
                    writer.add(names[i], states)
                progress(done := done + len(batch), len(left))
        writer.close()
        there = len(TeacherStates(args.states))
    print(f"the states of {len(shown)} demonstrations are in {args.states}, and those of {there - len(shown)} others")


def check_tokens(
    examples: Sequence[Example], ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, lm: PreTrainedModel
) -> None:
    """ValueError if the run's tokens, or the ends of its demonstrations, are not the demonstrator's."""
    used = sorted({token for example in examples for token in (*example.prompt, *(example.demonstration or ()))})
    size = lm.get_input_embeddings().num_embeddings
    for token in used:
        want, got = ours.convert_ids_to_tokens(token), theirs.convert_ids_to_tokens(token) if token < size else None
        if want != got:
            raise ValueError(f"want a demonstrator with the run's tokens; token {token} is {want!r} there, got {got!r}")
    ends = lm.generation_config.eos_token_id if lm.generation_config is not None else None
    ends = theirs.eos_token_id if ends is None else ends
    for token in sorted({example.demonstration[-1] for example in examples if example.demonstration}):
        if token not in (ends if isinstance(ends, list) else [ends]):
            raise ValueError(f"want a demonstrator that ends at the run's token {token}; it ends at {ends}")


@torch.no_grad()
def predicting(lm: PreTrainedModel, batch: Sequence[Example]) -> list[torch.Tensor]:
    """The hidden states (T, H) that predict each demonstration's tokens."""
    sequences = [torch.tensor([*e.prompt, *(e.demonstration or ())], device=lm.device) for e in batch]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=lm.device)
    mask = torch.arange(ids.shape[1], device=lm.device) < lengths[:, None]
    states = lm.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
    parts = zip(batch, sequences, states, strict=True)
    return [hidden[len(e.prompt) - 1 : len(sequence) - 1] for e, sequence, hidden in parts]


@torch.no_grad()
def score(lm: PreTrainedModel, batch: Sequence[Example], temperature: float, topk: int, vocabulary: int) -> list[Any]:
    """The logprobs, at most 0, of each demonstration's tokens; or the likeliest of the first `vocabulary` tokens."""
    head: Any = head_of(lm)
    scored = []
    for e, predictors in zip(batch, predicting(lm, batch), strict=True):
        if topk:
            scored.append(likeliest(predictors, head, topk, vocabulary))
            continue
        target = torch.tensor(e.demonstration, device=lm.device)
        logprob, _ = linear_logprob(predictors, target=target, temperature=temperature, **head)
        scored.append((logprob.clamp(max=0.0).cpu(),))
    return scored


def likeliest(hidden: torch.Tensor, head: dict[str, Any], k: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest of the first tokens at each place, int32, and their logprobs, (T, k) each.

    Logits are in fp32, like those of a run.
    """
    weight, bias, cap = head["weight"][:vocabulary], head["bias"], head["logit_softcap"]
    found = []
    for part in hidden.split(PLACES):
        if part.is_cuda and part.dtype != torch.float32:
            logits = torch.mm(part, weight.t(), out_dtype=torch.float32)
        else:
            logits = part.float() @ weight.float().t()
        logits = head["logit_scale"] * (logits if bias is None else logits + bias[:vocabulary])
        logits = logits if cap is None else cap * (logits / cap).tanh()
        logprobs, tokens = logits.log_softmax(1).topk(k)
        found.append((tokens.to("cpu", torch.int32), logprobs.clamp(max=0.0).cpu()))
    tokens, logprobs = map(torch.cat, zip(*found, strict=True))
    return tokens, logprobs


def listed(one: tuple[torch.Tensor, ...]) -> Any:
    """As JSON has it: logprobs, or tokens and theirs."""
    return (
        dict(zip(("tokens", "logprobs"), (x.tolist() for x in one), strict=True)) if len(one) > 1 else one[0].tolist()
    )


def batches(examples: Sequence[Example], tokens: int) -> Iterator[list[int]]:
    """Indices of examples with a demonstration, longest first, in batches of at most that many padded tokens."""
    lengths = {i: len(e.prompt) + len(e.demonstration) for i, e in enumerate(examples) if e.demonstration is not None}
    batch: list[int] = []
    for i in sorted(lengths, key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def several(row: Row, config: Config) -> bool:
    """Whether the row has a list of demonstrations."""
    try:
        return holds_several(get_column(row, config.data.demonstration or ""))
    except KeyError:
        return False


def rows(config: Config) -> Iterator[Row]:
    """The rows of the run's data with all of their columns, in the order that counts `Example.index`."""

    def of(path: str) -> Iterator[Row]:
        columns = pq.read_schema(path).names if path.endswith(".parquet") else []
        return (row for _, row in read_rows([path], columns, None))

    return islice(chain.from_iterable(map(of, config.data.paths)), config.data.limit)


if __name__ == "__main__":
    main()
