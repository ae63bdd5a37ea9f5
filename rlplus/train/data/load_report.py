"""Counts of the rows of data that were kept and dropped, and whether too many were."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlplus.train.config import DataConfig

if TYPE_CHECKING:
    from rlplus.train.data.prompts import Prompt

ASKING = ("user", "tool")  # roles of the last message of a prompt


@dataclass
class LoadReport:
    """Counts of what was kept and dropped. `first` names the first place of each kind of loss.

    plain: rows whose prompt is text, not chat messages.
    prompt_lengths, demonstration_lengths: tokens of each, also of those that are dropped for their length.
    """

    max_prompt_length: int
    max_demonstration_length: int
    rows: int = 0
    kept: int = 0
    plain: int = 0
    prompts_too_long: int = 0
    answers_missing: int = 0
    prompts_unasked: int = 0
    demonstrations: int = 0
    demonstrations_missing: int = 0
    demonstrations_unmatched: int = 0
    demonstrations_too_long: int = 0
    demonstrations_unprefixed: int = 0
    first: dict[str, str] = field(default_factory=dict)
    prompt_lengths: list[int] = field(default_factory=list)
    demonstration_lengths: list[int] = field(default_factory=list)

    def count_row(self, where: str, prompt: "Prompt", tokens: int) -> None:
        """Count a row with a prompt of so many tokens."""
        self.rows += 1
        self.prompt_lengths.append(tokens)
        self.plain += isinstance(prompt, str)
        if not isinstance(prompt, str) and prompt[-1]["role"] not in ASKING:
            self.count("prompts_unasked", where)

    def count(self, what: str, where: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.first.setdefault(what, where)

    @property
    def dropped_share(self) -> float:
        """Share of the rows that were dropped."""
        return (self.prompts_too_long + self.answers_missing) / max(1, self.rows)

    @property
    def dropped_demonstration_share(self) -> float:
        """Share of the demonstrations of kept rows that were dropped."""
        dropped = self.demonstrations_unmatched + self.demonstrations_too_long
        return dropped / max(1, self.demonstrations + dropped)

    def summary(self) -> str:
        """One line, for logs and errors."""
        labels = {
            "prompts_too_long": f"prompts longer than {self.max_prompt_length} tokens",
            "answers_missing": "rows without an answer, or not matched by answer_pattern",
            "prompts_unasked": "prompts whose last message is neither a user's nor a tool's, kept",
            "demonstrations_too_long": f"demonstrations longer than {self.max_demonstration_length} tokens",
            "demonstrations_unmatched": "demonstrations not matched by demonstration_pattern",
            "demonstrations_missing": "rows without a demonstration",
            "demonstrations_unprefixed": "demonstrations that did not start with data.response_prefix, kept whole",
        }
        losses = [
            f"{getattr(self, name)} {labels[name]} (first: {self.first[name]})" for name in labels if name in self.first
        ]
        kept = f"{self.rows} rows, {self.kept} kept, {self.demonstrations} demonstrations"
        return "; ".join([kept, *losses])

    def refusal(self, config: DataConfig, *, whole: bool = False) -> str | None:
        """The reason for which these data are refused, with the counts: too much is dropped, or nothing is left.

        whole: nothing may be dropped, whatever `max_dropped_share` allows.
        """
        most = 0.0 if whole else config.max_dropped_share
        files = ", ".join(config.paths)
        shares = [("rows", self.dropped_share), ("demonstrations", self.dropped_demonstration_share)]
        for what, share in shares:
            if share > most:
                return (
                    f"{files}: {share:.1%} of the {what} would be dropped, "
                    f"{'a benchmark' if whole else 'data.max_dropped_share'} allows {most:.1%}: {self.summary()}"
                )
        if not self.kept:
            return f"{files}: want at least one row; got {self.summary()}"
        if config.demonstration is not None and not self.demonstrations:
            return f"{files}: want demonstrations in column {config.demonstration!r}; got {self.summary()}"
        return None
