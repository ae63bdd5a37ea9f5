"""The section about data: files, columns, and the treatment of rows."""

import os
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, field_validator, model_validator

from rlplus.common.section import Count, DemonstrationPattern, Fraction, Pattern, Section, Text


def _template(template: str) -> str:
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if names <= {"demonstration", "answer"}:
            template.format(demonstration="", answer="")  # conversions and formats that text does not have
    except ValueError as error:
        raise ValueError(f"want a str.format template, braces doubled; got {template!r} ({error})") from error
    if not names or names - {"demonstration", "answer"}:
        came = ", ".join(f"{{{name}}}" for name in sorted(names)) or "none"
        raise ValueError(f"want the fields {{demonstration}} and {{answer}}, other braces doubled; got {came}")
    return template


Template = Annotated[str, AfterValidator(_template)]


class DataConfig(Section):
    """JSONL or Parquet, one prompt per row."""

    path: str | list[str] = []
    """A file, a data set on the hub as hf://owner/name/split (hf://owner/name/configuration/split, or a file in it), or
    a list of these, read one after the other. Only evaluations may leave it out: their `benchmarks` have sources."""
    prompt: Text = "prompt"
    """Column name, as of all columns dotted for nested ones: "reward_model.ground_truth". A prompt is a string or a
    list of chat messages {role, content}."""
    answer: Text = "answer"
    """Column of the answer."""
    demonstration: Text | None = None
    """Column of a worked solution (a string or one chat message), or of a list of several; None = no demonstrations."""
    demonstration_choice: Literal["first", "shortest", "likeliest", "random"] = "first"
    """Choice among several that the run's reward accepts: the first, the shortest in tokens, the likeliest under its
    author (by the mean behavior_logprob), or in each draw a random one."""
    behavior_logprob: Text | None = None
    """Column with the logprobs of the demonstration under its author, one for each token that the run trains on: the
    text behind response_prefix, by the run's tokenizer, and the end token. A list of lists where there are several
    demonstrations. For algorithm.objective.external mis, omega and shaped; None = unknown.
    examples/score_demonstrations.py writes it."""
    teacher_topk: Text | None = None
    """Column with a teacher's likeliest tokens at each place of the demonstration, counted as for behavior_logprob: an
    object {tokens, logprobs} of lists with k numbers per place, logprobs in nats at temperature 1. In the place of the
    teacher of recipe distill; examples/score_demonstrations.py --topk writes it."""
    answer_pattern: Pattern | None = None
    """Regular expression with one group, searched in the answer column: the group is the answer."""
    demonstration_pattern: DemonstrationPattern | None = None
    """Regular expression with one group, searched in the demonstration column: the group is the demonstration. A second
    one, (?P<answer>...), is the answer that the demonstration itself gives, if it matches."""
    demonstration_template: Template | None = None
    """Template of str.format with {demonstration} and {answer}: the answer that demonstration_pattern finds in the
    demonstration, so that a wrong one is graded as wrong, else the row's, which then no grading finds wrong."""
    benchmark: Text | None = None
    """Column that names the benchmark of a row: evaluations report each one by itself."""
    system_prompt: Text | None = None
    """System message, put before the prompt."""
    template: Literal["own", "qwen", "simplerl", "prime", "none"] = "own"
    """Form of the prompt: "own" = messages by the tokenizer's chat template, text unchanged; "qwen",
    "simplerl", "prime", "none" (the question alone) = as base models are evaluated, without the data's system
    message."""
    columns: list[Text] = []
    """Further columns, passed to reward functions that have a parameter of that name."""
    tools: Text | None = None
    """Column of the definitions of tools, a list in OpenAI's format or its JSON, which the chat template is given."""
    chat: bool = False
    """Make a string prompt a user message, and apply the chat template."""
    response_prefix: Text | None = None
    """Text that every response starts with, such as "<think>\\n". It is given, not generated: its tokens end the prompt
    (unless the chat template ends in it), demonstrations start after it, and it is put before a response that is
    graded."""
    max_prompt_length: Count = 1024
    """Longest prompt, response_prefix included; a row with a longer one is dropped."""
    max_demonstration_length: Count | None = None
    """Longest demonstration, its end token counted; a longer one is dropped. None = the limit of responses."""
    max_dropped_share: Fraction = 0.1
    """Largest share of rows, or of demonstrations, that may be dropped; beyond it the data are refused."""
    limit: Count | None = None
    """Number of rows that are read, from the first on; None = all."""

    @property
    def note(self) -> str | None:
        """A warning where the template gives the row's answer to the demonstrations of another column."""
        own = "(?P<answer>" in (self.demonstration_pattern or "") or self.demonstration in (None, self.answer)
        if own or "{answer" not in (self.demonstration_template or ""):
            return None
        return (
            "data.demonstration_template writes the row's answer into each demonstration, so all pass: whether their "
            "own is right is not looked at, unless demonstration_pattern finds it as (?P<answer>...)"
        )

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path

    @field_validator("path", mode="before")
    @classmethod
    def _check_path(cls, value: Any) -> str | list[str]:
        paths = value if isinstance(value, list) else [value]
        if not all(isinstance(path, str) and path for path in paths):
            raise ValueError(f"want a path or a list of paths; got {value!r}")
        expanded = [os.path.expanduser(path) for path in paths]
        return expanded if isinstance(value, list) else expanded[0]

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = ("demonstration_choice", "behavior_logprob", "teacher_topk", "demonstration_pattern")
        for name in (*names, "demonstration_template", "max_demonstration_length"):
            if self.demonstration is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is set but demonstration is not: name the column that holds them")
        if self.demonstration_choice == "likeliest" and self.behavior_logprob is None:
            raise ValueError("demonstration_choice likeliest goes by behavior_logprob: name the column that holds them")
        if self.template != "own" and (self.chat or self.system_prompt is not None):
            raise ValueError(f"template {self.template} is the whole prompt: leave chat and system_prompt out")
        if self.template != "own" and self.tools is not None:
            raise ValueError(f"tools are for the chat template, and template {self.template} takes its place")
        last = [name.rpartition(".")[2] for name in self.columns]
        if len(set(last)) < len(last) or {"text", "answer"} & set(last):
            raise ValueError(f"want columns whose last parts differ, and none text or answer; got {self.columns}")
        return self
