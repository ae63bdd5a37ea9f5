"""The check that an integration makes of the library that it is written for."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any


def check_interface(release: str, version: str, functions: Mapping[Callable[..., Any], tuple[str, ...]]) -> None:
    """ImportError unless each function (or class) takes the arguments that it is listed with.

    release: the one that the integration is written for, such as "verl 0.9"; version: the installed one.
    """
    for function, want in functions.items():
        got = tuple(signature(function).parameters)
        if got != want:
            raise ImportError(
                f"want {release}, whose {function.__qualname__} takes ({', '.join(want)}); got "
                f"{release.split()[0]} {version}, where it takes ({', '.join(got)})"
            )
