"""The gated recipe: demonstrations only for prompts that the policy rarely solves (SuperRL, HPT)."""

from collections.abc import Callable

from rlplus.train.algorithm import Gate
from rlplus.train.config import Config
from rlplus.train.recipe.plain import Batch, Recipe, demonstration, unsolved


class GateRecipe(Recipe):
    """A prompt with at most `solved` solved rollouts trains on its demonstration, and on its rollouts only with `keep`.

    The other prompts train on their rollouts alone. The rest is defined by the algorithm, as in every recipe: the loss
    of demonstrations, its factor `external_coef`, and whether they enter the statistics of the rollouts that are kept.
    SuperRL (arXiv 2506.01096) and HPT (arXiv 2509.04419) both have solved = 0.
    """

    options: Gate

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._share = (0.0, 0.0)

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        batch = super().collect(draw)
        gated = unsolved(batch, self.options.solved)
        self._share = (len(gated), len(batch.examples))
        if not self.options.keep:
            batch.samples = [sample for sample in batch.samples if sample.group not in gated]
        batch.samples += [demonstration(batch.examples[group], group) for group in gated]
        return batch

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {"gate/demonstrated": self._share}
