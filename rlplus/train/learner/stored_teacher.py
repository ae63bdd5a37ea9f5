"""A teacher of which only the head is here, and its hidden states for demonstrations in files."""

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

import torch

from rlplus.common import agree
from rlplus.common.teacher_states import TeacherStates, digest, vocabulary_digest
from rlplus.train.data import MicroBatch, load_tokenizer
from rlplus.train.learner.policy import Policy

KEY = "algorithm.recipe.teacher_states"


class StoredTeacher:
    """The teacher whose states are in a folder, see `rlplus.common.teacher_states`.

    model_path: the policy's, for its tokenizer. ValueError for states of a model that cannot teach the policy.
    Collective.
    """

    def __init__(self, folder: str, policy: Policy, model_path: str) -> None:
        self._states = TeacherStates(folder)
        part = policy.config.model
        facts = self._states.facts
        self.name = f"{KEY} {folder}"
        self.fingerprint = facts["fingerprint"]
        if len(found := set(agree.gathered(self.fingerprint))) > 1:
            raise ValueError(f"{KEY}: want the same folder on every machine; the ranks have {len(found)} teachers")
        if vocabulary_digest(load_tokenizer(part, model_path).get_vocab()) != facts["vocabulary"]:
            raise ValueError(f"{KEY}: want a teacher whose tokenizer has the policy's tokens; {folder} is another's")
        if part.dtype != facts["dtype"]:
            raise ValueError(f"{KEY}: want states in model.dtype {part.dtype}; {folder} has {facts['dtype']}")
        rows = policy.model_config.get_text_config(decoder=True).vocab_size
        head = {name: tensor.to(policy.device) for name, tensor in self._states.head().items()}
        if len(head["weight"]) < rows:
            raise ValueError(
                f"{KEY}: want a head with at least the policy's {rows} rows; {folder} has {len(head['weight'])}"
            )
        # All of the head's arguments: the policy's stand for those that are missing.
        self._head: dict[str, Any] = {"teacher_bias": None} | {
            f"teacher_{name}": tensor[:rows] for name, tensor in head.items()
        }
        self._head |= {f"teacher_{name}": facts[name] for name in ("logit_scale", "logit_softcap")}

    def head(self, batch: MicroBatch) -> dict[str, Any]:
        """A `Teach`: the stored states of the batch's tokens. A rank's dummy, which counts for nothing, has zeros."""
        weight = self._head["teacher_weight"]
        parts = []
        for name, count in _sequences(batch):
            if name in self._states:
                parts.append(self._states.read(name))
            elif batch.token_weight.any():
                raise ValueError(f"{KEY}: no states of a demonstration of {count} tokens, see `RecipeOptions.refusals`")
            else:
                parts.append(torch.zeros(count, weight.shape[1], dtype=weight.dtype))
        hidden = torch.cat(parts) if parts else weight.new_zeros(0, weight.shape[1])
        return self._head | {"teacher_hidden": hidden.to(weight.device, non_blocking=True)}


def _sequences(batch: MicroBatch) -> Iterator[tuple[str, int]]:
    """The digest of each sequence, and its number of response tokens, in the order of the batch's tokens."""
    on_device = (batch.input_ids.flatten(), batch.position_ids.flatten(), batch.sequence, batch.rows)
    copied = iter(torch.cat(on_device).tolist())  # one copy from the device
    ids, places, sequence, predictors = ([*islice(copied, len(each))] for each in on_device)
    for _, tokens in groupby(zip(sequence, predictors, strict=True), key=lambda each: each[0]):
        rows = [row for _, row in tokens]
        first = rows[0]
        end = rows[-1] + 2
        yield digest(ids[first - places[first] : first + 1], ids[first + 1 : end]), len(rows)
