r"""Answers that are words, which Math-Verify would read as products of letters: "seat" would be right for "east"."""

import re

_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt)|operatorname|mbox|bf|rm)\b\s*")
_LETTERS = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_ARTICLE = re.compile(r"^(?:the|an|a)\s+(?=[^\W\d_]{2})", re.IGNORECASE)
_SHORT = frozenset(
    {"yes", "no", "one", "two", "six", "ten", "odd", "all", "any", "day", "red", "man", "boy", "cat", "dog"}
    | {"on", "up", "us", "add", "bad", "bay", "cab", "dab", "dad"}
)
# Letters of algebra, and none of these with a vowel: products, such as axy and mgh.
_ALGEBRA = re.compile(r"[a-dx-z]+|[b-df-hj-np-tv-z]+")
# Names of mathematics, which Math-Verify knows: with no backslash, too.
_NAMES = re.compile(
    r"infinity|infty|alpha|beta|gamma|delta|theta|lambda|sigma|omega|(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp)h?[a-z]?"
)
_LONG = 4  # letters that are a word; fewer may be a product, such as abc
_ORDERED = 3  # letters whose order counts where they may be a word: "won" is not "now", though xy is yx
# Two words or more and punctuation, as in "see the book".
_PROSE = re.compile(r"[^\W\d_]+(?:[\s,;:.?!'\"()-]+[^\W\d_]+)+[\s.?!)]*")
_WORD = re.compile(r"[^\W\d_]{2,}")
# Texts that data sets have in the place of an answer.
_MISSING = frozenset({"proof", "notfound", "not found", "n/a", "nan", "null", "no answer", "see solution"})


def stands_for_none(answer: str) -> bool:
    """Whether the answer is a data set's word for a missing one: a response with that word would be right."""
    return _bare(answer).casefold() in _MISSING


def is_prose(answer: str) -> bool:
    """Whether it is two words or more, with no sign of mathematics."""
    return len(_WORD.findall(answer)) > 1 and _PROSE.fullmatch(answer.strip()) is not None


def letters_of(text: str) -> str | None:
    r"""The letters, in lower case, of a text that has no others, such as `\text{East}`; None for any other text."""
    bare = _bare(text)
    return bare.casefold() if _LETTERS.fullmatch(bare) else None


def word_of(answer: str) -> str | None:
    """The word, in lower case, that the answer is; None where it may be a product of letters, or is no word."""
    letters = letters_of(answer)
    if letters is None or _NAMES.fullmatch(letters):
        return None
    long = (len(letters) >= _LONG and not _ALGEBRA.fullmatch(letters)) or (len(letters) > 1 and "\\" in answer)
    name = len(letters) > 2 and _bare(answer).istitle()
    return letters if long or name or letters in _SHORT else None


def reordered(given: str, answer: str) -> bool:
    """Whether these are the letters of the answer in another order, and the answer may be a word: "won" for "now"."""
    ours = letters_of(given)
    theirs = letters_of(answer)
    if ours is None or theirs is None or ours == theirs or len(theirs) < _ORDERED or sorted(ours) != sorted(theirs):
        return False
    return len(theirs) > _ORDERED or not _ALGEBRA.fullmatch(_bare(answer))


def same_words(given: str, answer: str) -> bool:
    """Whether both are the same word of three letters or more, or the same words, but for case and an article."""
    ours = _bare(given).casefold().split()
    theirs = _bare(answer).casefold().split()
    return ours == theirs and (is_prose(_bare(answer)) or len(letters_of(answer) or "") >= _ORDERED)


def _bare(text: str) -> str:
    """The text without commands that set words, braces, quotes, dollars, a full stop and an article before it."""
    return _ARTICLE.sub("", _COMMAND.sub("", text).strip(" \t\n{}$\"'`.*"), count=1)
