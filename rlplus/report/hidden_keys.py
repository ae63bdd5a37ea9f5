"""Keys, tokens and passwords in the texts of a run that is to be published: found by names and forms, and replaced."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "(hidden)"
SHORTEST = 6  # characters of a key; a shorter text may be any word of another text
# The last part of a setting's name; not tokens of text, such as pad_token.
_NAMES = re.compile(
    r"(.*[_-])?(api[_-]?key|secret([_-]?key)?|password|passwd|credentials?|authorization|access[_-]?key|private[_-]?key)"
    r"|((api|auth|access|hf|hub|bearer|secret)[_-]?)?token|key",
    re.IGNORECASE,
)
_FORMS = re.compile(
    r"hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|(?<=://)[^/\s:@'\"]+:[^/\s@'\"]+(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)


def without_keys(texts: Mapping[str, str], config: Any) -> tuple[dict[str, str], int]:
    """The texts with HIDDEN for each value that looks like a key, and the number of such values.

    config: the run's configuration; a value under a name such as api_key is a key in whatever form.
    """
    keys = {match[0] for text in texts.values() for match in _FORMS.finditer(text)} | {*named_keys(config)}
    if not keys:
        return dict(texts), 0
    written = {form for key in keys for form in (key, key.replace("'", "''"), json.dumps(key)[1:-1])}  # YAML's, JSON's
    longest_first = sorted(written, key=lambda form: (-len(form), form))
    anywhere = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")
    return {name: anywhere.sub(HIDDEN, text) for name, text in texts.items()}, len(keys)


def named_keys(value: Any, name: str = "") -> Iterator[str]:
    """Texts under the name of a key, but for references to a variable of the environment."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from named_keys(each, str(key))
    elif isinstance(value, list):
        for each in value:
            yield from named_keys(each, name)
    elif (
        isinstance(value, str)
        and len(value) >= SHORTEST
        and value != HIDDEN
        and not value.startswith("$")
        and _NAMES.fullmatch(name)
    ):
        yield value
