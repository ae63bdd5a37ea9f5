"""The section about data: files, columns, and what rows become."""

import os
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, field_validator, model_validator

from rlplus.config.base import Count, Fraction, Pattern, Section, Text


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
    """JSONL or Parquet, one prompt a row.

    path                     a file, a data set of the hub as hf://owner/name/split (hf://owner/name/configuration/split,
                             or a file of it), or a list of these that are read one after the other. Only
                             evaluation.data may leave it out: evaluation.benchmarks have sources of their own
    prompt, answer           column names, dotted for nested ones: "reward_model.ground_truth". A prompt is a string or
                             a list of chat messages {role, content}
    demonstration            column of a worked solution (a string or one chat message), or of a list of several; None =
                             no demonstrations
    demonstration_choice     of several that the run's reward accepts: the first, the shortest in tokens, the likeliest
                             under its author (by the mean behavior_logprob), or in each draw a random one
    behavior_logprob         column with the logprobs of the demonstration under its author, one for each token that the
                             run trains on: the text behind response_prefix, by the run's tokenizer, and the end token.
                             A list of lists where there are several demonstrations.
                             For algorithm.objective.external mis and omega; None = unknown.
                             examples/score_demonstrations.py writes it
    answer_pattern           regular expression with one group, searched in the answer column: the group is the answer
    demonstration_pattern    the same for the demonstration column
    demonstration_template   str.format template with {demonstration} and {answer}
    benchmark                column that names the benchmark of a row: evaluations report each one by itself
    system_prompt            put before the prompt as a system message
    template                 how the question becomes the prompt: "own" = messages by the tokenizer's chat template,
                             text as it is; "qwen", "simplerl", "prime", "none" (the question alone) = as base models
                             are evaluated, without the data's system message
    columns                  further columns, for reward functions that have a parameter of that name
    chat                     a string prompt becomes a user message and goes through the chat template
    response_prefix          text that every response starts with, such as "<think>\\n". It is given, not generated: its
                             tokens end the prompt (unless the chat template ends in it), demonstrations start after it,
                             and it is put before a response that is graded
    max_prompt_length        a row with a longer prompt, response_prefix included, is dropped
    max_demonstration_length a longer demonstration, its end token counted, is dropped; None = the limit of responses
    max_dropped_share        refuse the data when more than this share of rows, or of demonstrations, is dropped
    limit                    read only the first rows
    """

    path: str | list[str] = []
    prompt: Text = "prompt"
    answer: Text = "answer"
    demonstration: Text | None = None
    demonstration_choice: Literal["first", "shortest", "likeliest", "random"] = "first"
    behavior_logprob: Text | None = None
    answer_pattern: Pattern | None = None
    demonstration_pattern: Pattern | None = None
    demonstration_template: Template | None = None
    benchmark: Text | None = None
    system_prompt: Text | None = None
    template: Literal["own", "qwen", "simplerl", "prime", "none"] = "own"
    columns: list[Text] = []
    chat: bool = False
    response_prefix: Text | None = None
    max_prompt_length: Count = 1024
    max_demonstration_length: Count | None = None
    max_dropped_share: Fraction = 0.1
    limit: Count | None = None

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
        names = ("demonstration_choice", "behavior_logprob", "demonstration_pattern")
        for name in (*names, "demonstration_template", "max_demonstration_length"):
            if self.demonstration is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is set but demonstration is not: name the column that holds them")
        if self.demonstration_choice == "likeliest" and self.behavior_logprob is None:
            raise ValueError("demonstration_choice likeliest goes by behavior_logprob: name the column that holds them")
        if self.template != "own" and (self.chat or self.system_prompt is not None):
            raise ValueError(f"template {self.template} is the whole prompt: leave chat and system_prompt out")
        names = [name.rpartition(".")[2] for name in self.columns]
        if len(set(names)) < len(names) or {"text", "answer"} & set(names):
            raise ValueError(f"want columns whose last parts differ, and none text or answer; got {self.columns}")
        return self
