"""The progress of a run: its counts, what is due, and when it ends."""

from typing import Any

from rlplus.train.config import Config

IDLE_STEPS = 4  # consecutive steps without an update: fewer may be chance in small steps, more would tell the user late


class Progress:
    """A run's counts.

    - `step`: steps done
    - `generated`: tokens
    - `nonfinite`: by model, consecutive updates skipped for a non-finite gradient
    - `idle`: consecutive steps without an update, since this process started
    - `interrupted`: the signal that ended the run, 0 without one
    - `external_share`: of the last gradient, see `rlplus.train.algorithm.ExternalSchedule`
    - `best`: the step and mean reward of the best validation, the first among equals; None before any
    - `since_best`: validations since then in which something could be graded

    config: the run's, with the steps of its epochs.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.step = self.generated = self.idle = self.interrupted = self.since_best = 0
        self.nonfinite: dict[str, int] = {}
        self.external_share = 1.0
        self.best: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """The entries of a checkpoint of this step, besides the step."""
        return {
            "generated": self.generated,
            "nonfinite": self.nonfinite,
            "external_share": self.external_share,
            "best": self.best,
            "since_best": self.since_best,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.generated = state["generated"]
        self.nonfinite = dict(state["nonfinite"])
        self.external_share = state["external_share"]
        self.best = state["best"]
        self.since_best = state.get("since_best", 0)  # version 0.3.0 did not count them

    @property
    def share_done(self) -> float:
        return self.share(self.step, self.generated)

    def share(self, step: int, generated: int) -> float:
        """The share of the run that is done after so many steps and generated tokens."""
        train = self.config.train
        assert train.steps is not None, "want a configuration with_steps"
        tokens = generated / train.generated_tokens if train.generated_tokens else 0.0
        return min(1.0, max(step / train.steps, tokens))

    @property
    def by_tokens(self) -> bool:
        """Whether `share_done` counts generated tokens: at this pace they end the run, before its last step."""
        train = self.config.train
        assert train.steps is not None, "want a configuration with_steps"
        return train.generated_tokens is not None and self.generated * train.steps > self.step * train.generated_tokens

    @property
    def epoch(self) -> float | None:
        """The number of passes over the prompts, in a run that counts epochs."""
        epochs = self.config.train.epochs
        return None if epochs is None else epochs * self.share_done

    @property
    def finished(self) -> bool:
        return self.interrupted > 0 or self.share_done >= 1 or bool(self.early_end)

    @property
    def early_end(self) -> str:
        """The reason for which the run ends before its last step; empty if it does not."""
        patience = self.config.validation.patience
        if patience is None or self.since_best < patience or self.share_done >= 1:
            return ""
        assert self.best is not None, "want a best validation where others are counted since"
        return (
            f"ended early after step {self.step} of {self.config.train.steps}: {self.since_best} validations in a row "
            f"were not better than step {self.best['step']}'s, mean reward {self.best['reward']:.4g} "
            "(validation.patience)"
        )

    @property
    def evaluation_due(self) -> bool:
        """Whether to evaluate at the end of the current step."""
        return self._due_after(self.config.evaluation.every)

    @property
    def validation_due(self) -> bool:
        """Whether to validate at the end of the current step."""
        return self._due_after(self.config.validation.every)

    def _due_after(self, every: int) -> bool:
        return every > 0 and (self.step + 1) % every == 0

    @property
    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        best = self.best is not None and self.best["step"] == self.step
        return self.finished or best or (every > 0 and self.step % every == 0)

    def note_validation(self, metrics: dict[str, float]) -> str | None:
        """Remember this step where its validation is the best one so far; the message about it, or about the end."""
        reward = metrics.get("validation/reward")
        if reward is None:
            return None
        if self.best is not None and reward <= self.best["reward"]:
            self.since_best += 1
            return self.early_end or None
        self.best = {"step": self.step, "reward": reward}
        self.since_best = 0
        return f"step {self.step}: the best validation so far, mean reward {reward:.4g}; its checkpoint is kept"

    def note_idleness(self, metrics: dict[str, float]) -> str | None:
        """A message about consecutive steps without an update: after IDLE_STEPS, then at each doubling."""
        self.idle = 0 if metrics["actor/updated"] else self.idle + 1
        if self.idle < IDLE_STEPS or self.idle & (self.idle - 1):
            return None
        clipped = metrics.get("response_length/clipped", 0.0)
        masked = metrics.get("reward/masked", 0.0)
        reason = self.config.algorithm.resolve().recipe.no_update
        rewards = f"mean reward {metrics['reward/mean']:.3g}" if "reward/mean" in metrics else "no reward"
        return (
            f"step {self.step}: no update in {self.idle} steps: {reason} ({rewards} in "
            f"this step; {masked:.0%} of the responses not graded, {clipped:.0%} cut off), so no sample has a "
            "gradient. Check the reward on a response of the model, the prompts' format, "
            "rollout.max_response_length, and whether the problems are much too hard or too easy"
        )
