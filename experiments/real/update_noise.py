"""python -m experiments.real.update_noise MODEL DATA OUT.json: by how much sampling moves an update, beside rounding.

The gradient by all weights of a few sequences' loss, of demonstrations and of the model's own responses with the
advantages +1 and -1, in fp32: with the exact backward pass; with sampled ones, for some thresholds and several seeds;
computed in bf16; and of as many other sequences. OUT.json has the distances from the first, relative to its norm, and
the noise that a call itself reports, which is of the logits' gradient.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlplus.bench.machine import revision
from rlplus.common.durable import write_text
from rlplus.loss import PolicyLoss, head_of, linear_policy_loss
from rlplus.loss.guard.verdicts import versions
from rlplus.train.config import DataConfig, ModelConfig
from rlplus.train.data import Example, load_examples, load_tokenizer

from .boxed import ASKED

THRESHOLDS = {"2^-8": 2.0**-8, "2^-10": 2.0**-10, "2^-12": 2.0**-12}
LONGEST = 2**20  # tokens: no prompt or demonstration is longer
Gradient = list[Tensor]


class Batch(NamedTuple):
    """Sequences padded at their end: tokens, trained (S, L), whose first column is not trained; advantage (S,)."""

    tokens: Tensor
    trained: Tensor
    advantage: Tensor


class Graph(NamedTuple):
    """The model's pass over a batch up to the head: hidden, target, advantage of the trained tokens, and the model."""

    model: PreTrainedModel
    hidden: Tensor
    target: Tensor
    advantage: Tensor


def batch_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], advantage: Sequence[float]) -> Batch:
    """Prompts and the responses that are trained."""
    length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
    trained = torch.zeros(len(prompts), length, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        tokens[i, :end] = torch.tensor([*prompt, *response])
        trained[i, len(prompt) : end] = True
    return Batch(tokens, trained, torch.tensor(advantage))


def run(model: PreTrainedModel, batch: Batch) -> Graph:
    """The hidden states that predict the trained tokens; no mask is needed where padding stands at the end."""
    hidden = model.base_model(batch.tokens[:, :-1]).last_hidden_state
    at = batch.trained[:, 1:]
    advantage = batch.advantage[:, None].expand(at.shape)[at]
    return Graph(model, hidden[at], batch.tokens[:, 1:][at], advantage)


def gradient(graph: Graph, **options: Any) -> tuple[Gradient, PolicyLoss]:
    """The loss's gradient by all weights, in fp32. options: of `linear_policy_loss`."""
    hidden = graph.hidden.detach().requires_grad_()
    head = head_of(graph.model)
    weights = torch.full(graph.target.shape, 1 / len(graph.target))
    constants: dict[str, Any] = {"old_logprob": None, "advantage": graph.advantage, "token_weight": weights}
    out = linear_policy_loss(hidden, target=graph.target, objective="grpo", **constants, **head, **options)
    of_hidden, of_head = torch.autograd.grad(out.loss, (hidden, head["weight"]))
    parameters = list(graph.model.parameters())
    found = torch.autograd.grad(graph.hidden, parameters, of_hidden, retain_graph=True, allow_unused=True)
    gradients = [torch.zeros_like(p) if each is None else each for p, each in zip(parameters, found, strict=True)]
    for parameter, each in zip(parameters, gradients, strict=True):
        if parameter is head["weight"]:
            each += of_head
    return [each.float() for each in gradients], out


def distance(one: Gradient, other: Gradient) -> float:
    """The norm of the difference, relative to the norm of `other`."""
    return norm([a - b for a, b in zip(one, other, strict=True)]) / norm(other)


def norm(of: Gradient) -> float:
    return sum(float(each.double().square().sum()) for each in of) ** 0.5


def drawn(graph: Graph, exact: Gradient, threshold: float, seeds: int) -> dict[str, Any]:
    """Distances of sampled gradients, and of their mean, whose noise falls by the root of their number."""
    mean, distances, reported, elements = [torch.zeros_like(each) for each in exact], [], 0.0, 0.0
    for seed in range(seeds):
        found, out = gradient(graph, backward="sampled", threshold=threshold, seed=seed)
        distances.append(distance(found, exact))
        mean = [a + b / seeds for a, b in zip(mean, found, strict=True)]
        s = out.stats
        reported = float(s["sampled_variance"] / s["sampled_square"]) ** 0.5
        elements = float(s["sampled_elements"]) / len(graph.target)
    summary = {"update": fmean(distances), "of_mean": distance(mean, exact), "logits": reported, "elements": elements}
    return summary | {"distances": distances}


def measured(model: PreTrainedModel, batch: Batch, other: Batch, seeds: int) -> dict[str, Any]:
    """All distances of a batch. other: as many sequences."""
    graph = run(model, batch)
    exact, out = gradient(graph)
    rows = {name: drawn(graph, exact, threshold, seeds) for name, threshold in THRESHOLDS.items()}
    others = distance(gradient(run(model, other))[0], exact)
    del graph
    rounded = distance(gradient(run(model.bfloat16(), batch))[0], exact)
    model.float()  # the same numbers again, which the file has in bf16
    facts = {"tokens": len(out.logprob), "entropy": float(out.entropy.mean()), "norm": norm(exact)}
    return facts | {"sampled": rows, "bf16": rounded, "other_sequences": others}


def sampled_responses(model: PreTrainedModel, examples: Sequence[Example], group: int, length: int) -> Batch:
    """A group of responses to each prompt by the model, half of each group with the advantage 1, the others -1."""
    prompts, responses = [], []
    for example in examples:
        prompt = torch.tensor([example.prompt]).expand(group, -1)
        with torch.no_grad():
            whole = model.generate(prompt, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=length)
        for row in whole[:, prompt.shape[1] :].tolist():
            prompts.append(example.prompt)
            responses.append(ended(row, model.generation_config.eos_token_id))
    return batch_of(prompts, responses, [1.0, -1.0] * (len(prompts) // 2))


def ended(row: Sequence[int], end: int | list[int]) -> list[int]:
    """A response up to its end token."""
    ends = [end] if isinstance(end, int) else end
    length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    return list(row[:length])


def read(model: str, data: str, number: int) -> list[Example]:
    """The first prompts with their demonstrations."""
    tokenizer = load_tokenizer(ModelConfig(path=model), model)
    columns = DataConfig(path=data, demonstration="demonstration", chat=True, system_prompt=ASKED, limit=number)
    examples, _ = load_examples(columns, tokenizer, max_demonstration_length=LONGEST)
    return examples


def main() -> None:
    """Measure, and write the file after each kind of sequences."""
    parser = argparse.ArgumentParser(prog="python -m experiments.real.update_noise", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, with weights in bf16")
    parser.add_argument("data", help="file with columns prompt and demonstration")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--length", type=int, default=96, help="tokens of a response at most")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    n = options.sequences
    shown = read(options.model, options.data, 2 * n)
    known = [(example.prompt, example.demonstration or (), 1.0) for example in shown]
    kinds = {
        "demonstrations": [batch_of(*zip(*part, strict=True)) for part in (known[:n], known[n:])],
        "responses": [
            sampled_responses(model, part, 2, options.length) for part in (shown[: n // 2], shown[n // 2 : n])
        ],
    }
    found: dict[str, Any] = {"revision": revision(), "versions": versions(), "model": Path(options.model).name}
    for kind, (batch, other) in kinds.items():
        found[kind] = measured(model, batch, other, options.seeds)
        write_text(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
