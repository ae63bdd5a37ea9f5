"""The section about an environment of a library, which makes the responses with the engine."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlplus.common.section import Count, Seconds, Section, Text

ROW = "row"  # the column of a problem as its environment wants it


class EnvironmentConfig(Section):
    """An environment of `verifiers`, or one that an OpenEnv server serves."""

    library: Literal["verifiers", "openenv"]
    """verifiers: an environment with `load_environment`, in the trainer's process. openenv: a server of OpenEnv."""
    name: Text
    """verifiers: the environment's name, as `verifiers.load_environment` takes it. openenv: the server's address, such
    as http://localhost:8000."""
    arguments: dict[str, Any] = {}
    """verifiers: arguments of the environment's load_environment."""
    action: Text | None = None
    """openenv: the field of an action that holds the response's text, such as message."""
    observation: Text | None = None
    """openenv: the field of an observation that holds the text that the policy reads, such as echoed_message."""
    max_turns: Count = 10
    """openenv: actions that a response may take; one that took as many ends, whatever the environment says."""
    unfinished: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """openenv: the reward of an episode that was cut before its end, by max_turns or for want of room, if none of its
    steps had a reward."""
    max_turn_tokens: Count | None = None
    """Tokens of a turn; a longer one is cut there, and its end token is inserted. None = the response's room."""
    timeout_s: Seconds = 300.0
    """The run stops when the environment takes longer, for a turn of all responses or for their rewards."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        if self.library == "openenv":
            if not self.name.startswith(("http://", "https://")):
                raise ValueError(f"library openenv: want name as http://HOST:PORT; got {self.name!r}")
            if self.action is None or self.observation is None:
                raise ValueError("library openenv: want action and observation, the names of the fields with text")
        others = ("arguments",) if self.library == "openenv" else ("action", "observation", "max_turns", "unfinished")
        for key in others:
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is not for library {self.library}: leave it out")
        return self
