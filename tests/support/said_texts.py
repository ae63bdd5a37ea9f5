"""An engine that says given texts, and a recipe that keeps samples, for the tests of rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlplus.train.data import Sample
from rlplus.train.recipe import Batch, Recipe
from rlplus.train.rollout import Completion, Request, Sampling

END = 257  # the end token of the byte tokenizer


@dataclass
class Saying:
    """Says the next list of `texts` at each call, in bytes; then its turn ends."""

    texts: list[list[str]]
    name: str = "saying"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        groups = []
        for text, request in zip(self.texts.pop(0), requests, strict=True):
            tokens = [*text.encode(), END][: request.max_tokens]
            groups.append([Completion(tokens, [-0.5] * len(tokens), truncated=tokens[-1] != END)])
        return groups


class Kept(Recipe):
    """The plain recipe; keeps the samples of every step."""

    kept: list[Sample] = []  # noqa: RUF012

    def credit(self, batch: Batch) -> None:
        self.kept.extend(batch.samples)
        super().credit(batch)
