"""Keys, tokens and passwords in the texts of a run that is to be published: found by names and forms, and replaced."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "(hidden)"
SHORTEST = 6  # characters of a key; a shorter text may be any word of another text
# Names of settings, with _ between words; no tokens of text, such as pad_token and think_end_token.
_NAMES = re.compile(
    r"(.*_)?(secret|password|passwd|pwd|passphrase|credentials?|authorization|jwt|webhook(_url)?"
    r"|(api|secret|access|private|signing|encryption|account|ssh|auth|wandb|license|master|subscription)_?key)|key"
    r"|(?!(.*_)?(pad|eos|bos|sep|cls|mask|unk|boi|eoi|eot|eom|image|video|audio|vision|stop|start|begin|end|special|think"
    r"|tool|prompt|response|first|last|next|new|per|max|min)_?token)(.*_)?\w*token"
)
_PAIR = re.compile(r"([\w.-]+)=[\"']?([^\s,;&\"']+)")  # NAME=value: of an environment, an option or an address
_FORMS = re.compile(
    r"hf_\w{16,}|nvapi-[\w-]{16,}|gsk_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|(?<=://)[^/\s:@'\"]+:[^\s'\"]+(?=@)"
    r"|(?<=Bearer )[\w.~+/=-]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
# Who an address is for, where no password follows: a token or a name, such as git. Hidden there and nowhere else.
_USER = re.compile(r"(?<=://)(?!\(hidden\))[^/\s:@'\"]+(?=@)")
_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*')  # its strings and numbers


def without_keys(texts: Mapping[str, str], config: Any) -> tuple[dict[str, str], int]:
    """The texts with HIDDEN for each value that looks like a key, and the number of such values.

    config: the run's configuration; a value under a name such as api_key is a key in whatever form.
    """
    keys = {match[0] for text in texts.values() for match in _FORMS.finditer(text)} | {*named_keys(config)}
    users = {match[0] for text in texts.values() for match in _USER.finditer(text)} - keys
    if keys:
        written = {
            form for key in keys for form in (key, key.replace("'", "''"), json.dumps(key)[1:-1])
        }  # YAML's, JSON's
        longest_first = sorted(written, key=lambda form: (-len(form), form))
        anywhere = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")
        texts = {name: _replaced(anywhere, text, ".json" in name) for name, text in texts.items()}
    return {name: _USER.sub(HIDDEN, text) for name, text in texts.items()}, len(keys) + len(users)


def _replaced(keys: re.Pattern[str], text: str, is_json: bool) -> str:
    """The text with HIDDEN for each key; in JSON a number becomes a string."""
    if not is_json:
        return keys.sub(HIDDEN, text)

    def replaced(match: re.Match[str]) -> str:
        each = match[0]
        return keys.sub(HIDDEN, each) if each[0] == '"' else f'"{HIDDEN}"' if keys.fullmatch(each) else each

    return _JSON.sub(replaced, text)


def is_name(name: str) -> bool:
    """Whether a setting of this name is a key: in any case, with -, _ or capitals between words."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[.-]", "_", name)
    return _NAMES.fullmatch(words.lower()) is not None


def named_keys(value: Any, name: str = "") -> Iterator[str]:
    """Values under the name of a key, or behind it and =, but for references to a variable of the environment."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from named_keys(each, str(key))
    elif isinstance(value, list):
        for each in value:
            yield from named_keys(each, name)
    elif value is not None and not isinstance(value, bool):
        pairs = _PAIR.findall(value) if isinstance(value, str) else []
        # Programs, too, have arguments of these two names.
        given = [(name, str(value)), *((each, text) for each, text in pairs if each not in ("key", "token"))]
        yield from (
            text
            for each, text in given
            if len(text) >= SHORTEST and HIDDEN not in text and text[0] != "$" and is_name(each)
        )
