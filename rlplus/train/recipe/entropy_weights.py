"""The entropy-weighted recipe: demonstrations are reinforced and imitated in one update (SRFT, arXiv 2506.19767)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlplus.common import agree
from rlplus.loss import PolicyLoss, TokenLoss, token_loss
from rlplus.train.algorithm import EntropyWeights
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch
from rlplus.train.learner.batch import counted, over_sequences
from rlplus.train.recipe.plain import Batch, Recipe, Update


class EntropyWeightsRecipe(Recipe):
    """The objective's loss, with weights on positive advantages, and beside it a supervised one of demonstrated tokens.

    SRFT's eq. 12 has right rollouts, with the weight .1 exp(H), and wrong ones, eq. 8 the likelihood, with the weight
    .5 exp(-H), eq. 9 and 10 reinforced demonstrations, whose advantages are eq. 7's. H is a response's mean, as in the
    implementation by HPT's authors (arXiv 2509.04419).

    A demonstrated token has two losses, the op one surrogate for it. So the op gets the slope of their sum under the
    policy before the update as the token's advantage, with a ratio to that policy, which is 1: the same gradient.
    Losses and statistics are then set to the two losses'.
    """

    options: EntropyWeights

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        objective = self.algorithm.objective
        self._reinforced = replace(objective, kl_coef=0.0, entropy_coef=0.0, mismatch_cap=None, mismatch_low=0.0)
        self._taken = replace(objective, external="proxy", external_coef=1.0, gamma=0.0)
        self._weights: dict[str, Tensor] = {}  # (2,), their sum and number on this rank

    def credit(self, batch: Batch) -> None:
        none = torch.zeros(2, dtype=torch.float64, device=self.policy.device)
        self._weights = {"positive": none, "supervised": none}
        super().credit(batch)
        if self.options.signs:
            for sample in batch.samples:
                if not sample.demonstration:
                    sample.advantage = 1.0 if sample.reward > 0 else -1.0

    def updates(self, batch: Batch) -> list[Update]:
        """The plain recipe's, where demonstrations have a gradient even without an advantage."""
        updates = super().updates(batch)
        if not self.options.supervised:
            return updates
        algorithm = replace(self.algorithm, objective=replace(self.algorithm.objective, external="nll"))
        return [replace(update, algorithm=algorithm) for update in updates]

    def accumulate(
        self, update: Update, batches: Sequence[MicroBatch], before_each: Callable[[], None] | None = None
    ) -> list[PolicyLoss]:
        (demonstrated,) = agree.sums(sum(int(counted(batch, external=True).sum()) for batch in batches))
        supervised = [torch.zeros_like(batch.token_weight) for batch in batches]
        taken = list(batches)
        for i, batch in enumerate(batches):
            if not batch.forward_only:
                taken[i], supervised[i] = self._weighed(batch, demonstrated)
        outputs = self.policy.backward(taken, self.policy.loss_of(self._taken), before_each)
        return [self._as_told(*each) for each in zip(outputs, batches, supervised, strict=True)]

    def _weighed(self, batch: MicroBatch, demonstrated: float) -> tuple[MicroBatch, Tensor]:
        """The micro-batch as the op takes it, and the weight of -log p (N,). demonstrated: tokens in the update."""
        o = self.options
        logprob, entropy = self.policy.statistics(batch)
        if o.level == "sequence":
            on = batch.token_weight != 0
            entropy = over_sequences(entropy, batch, on, mean=True, parallel=self.config.train.sequence_parallel)
        external = counted(batch, external=True)
        right = counted(batch, external=False) & (batch.advantage > 0)
        positive = torch.where(right, o.positive * (o.positive_exponent * entropy).exp(), 1.0)
        weight = torch.where(external, o.supervised * (o.supervised_exponent * entropy).exp(), 0.0)
        for name, values, where in (("positive", positive, right), ("supervised", weight, external)):
            sums = torch.stack([values.double().masked_fill(~where, 0.0).sum(), where.sum()])
            self._weights[name] = self._weights[name] + sums  # read once a step: each time the host would wait
        weight = weight / max(demonstrated, 1)
        slope = self._external(batch, logprob, entropy).dlogprob - weight
        advantage = torch.where(external, -slope / batch.token_weight, positive * batch.advantage)
        old = None if batch.old_logprob is None else torch.where(external, logprob, batch.old_logprob)
        return replace(batch, advantage=advantage, old_logprob=old), weight

    def _external(self, batch: MicroBatch, logprob: Tensor, entropy: Tensor) -> TokenLoss:
        """The objective's loss of the demonstrated tokens alone."""
        constants = self.policy.constants(batch, self._reinforced)
        weight = constants.token_weight.where(batch.external, 0.0)
        return token_loss(logprob, entropy, constants._replace(token_weight=weight), self._reinforced)

    def _as_told(self, out: PolicyLoss, batch: MicroBatch, supervised: Tensor) -> PolicyLoss:
        """The output with the loss of demonstrated tokens as it is defined."""
        told = self._external(batch, out.logprob, out.entropy).stats
        loss = told["loss_external"] - torch.where(supervised != 0, supervised * out.logprob, 0.0).sum()
        stats = out.stats | {"loss_external": loss, "ratio_external": told["ratio_external"]}
        return out._replace(loss=out.loss + (loss - out.stats["loss_external"]), stats=stats)

    def metrics(self) -> dict[str, tuple[float, float]]:
        sums = {name: each.tolist() for name, each in self._weights.items()}
        return {f"weights/{name}": (total, tokens) for name, (total, tokens) in sums.items()}
