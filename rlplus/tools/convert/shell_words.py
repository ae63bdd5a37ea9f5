"""A shell script as commands of words. Words keep their quotes and expansions; nothing is expanded here."""

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

OPERATOR = re.compile(r"&&|\|\||\|&|;;&|;;|;&|[;&|()\n]")
REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(?:&>>?|<<<|<<-?|<>|>>|>\||[<>]&?)")
HEREDOC = re.compile(r"(?<!<)<<-?$")
BLANK = re.compile(r"(?:[ \t]|\\\n)+")
COMMENT = re.compile(r"#[^\n]*")
PLAIN = re.compile(r"[^\s'\"`$\\;&|()<>]+|[^\S\n \t]")
LITERAL = re.compile(r"[^\"`$\\]+")
NAME = re.compile(r"\w+|[@*#?$!-]")
ARRAY = re.compile(r"\w+\+?=")
LOOPS = ("for", "while", "until", "select")
CLOSING = {"fi": ("if",), "done": LOOPS, "esac": ("case",), "}": ("{",)}
OPENING = {opening for pairs in CLOSING.values() for opening in pairs}
BETWEEN = {"then", "else", "elif", "do", "!", "time"}
CONDITIONAL = {"&&", "||", "|", "|&", "&"}


@dataclass(frozen=True)
class Part:
    """A piece of a word. kind: text; name, the inside of `${...}`; sum, the inside of `$((...))`; or unknown."""

    text: str
    kind: str = "text"
    quoted: bool = False


@dataclass(frozen=True)
class Word:
    """raw: the word as it is written, in a line. items: the words of an array, where the word is `name=(...)`."""

    parts: tuple[Part, ...]
    line: int
    raw: str
    items: tuple["Word", ...] | None = None


@dataclass(frozen=True)
class Command:
    """sure: whether it is executed exactly once, in its place, and by this shell. inside: whether a compound has it."""

    words: tuple[Word, ...]
    sure: bool
    inside: bool


class Scanner:
    """Reads a text from its start. ValueError for a quote or an expansion that is not closed."""

    def __init__(self, text: str, path: str = "") -> None:
        self._text = text
        self._path = path
        self._at = 0
        self._ends = [found.start() for found in re.finditer("\n", text)]
        self._heredocs: list[tuple[str, bool]] = []

    def commands(self) -> Iterator[Command]:
        """All commands, those in compounds and functions, too."""
        words: list[Word] = []
        open_: list[str] = []
        before = "\n"
        while True:
            word = self._next(words)
            if isinstance(word, Word):
                words.append(word)
                continue
            words = _without_keywords(words, open_)
            if words:
                sure = not open_ and before not in CONDITIONAL - {"&"} and word not in CONDITIONAL - {"&&", "||"}
                yield Command(tuple(words), sure, bool(open_))
            if words or word != "\n":
                before = word
            words = []
            if word == "(":
                open_.append("(")
            elif word == ")" and open_[-1:] == ["("]:
                open_.pop()
            elif not word:
                return

    def parts(self, quoted: bool) -> tuple[Part, ...]:
        """The parts of the whole text, as one word. quoted: whether it is within double quotes."""
        found: list[Part] = []
        while self._at < len(self._text):
            if not quoted and self._text[self._at] in " \t\n;&|()<>":
                found.append(Part(self._text[self._at]))
                self._at += 1
            else:
                found += self._part(quoted)
        return tuple(found)

    def _line(self) -> int:
        return 1 + bisect(self._ends, self._at - 1)

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found[0] if found else ""

    def _next(self, words: list[Word]) -> Word | str:
        """The next word, or the operator that ends the command; "" at the text's end."""
        while self._at < len(self._text):
            if self._take(BLANK) or self._take(COMMENT):
                continue
            if self._text.startswith("((", self._at) and all(word.raw in OPENING | BETWEEN for word in words):
                return self._arithmetic()
            if not self._text.startswith(("<(", ">("), self._at) and (redirection := self._take(REDIRECTION)):
                self._take(BLANK)
                target = self._word()
                if HEREDOC.search(redirection):
                    self._heredocs.append((re.sub(r"[\\'\"]", "", target.raw), redirection.endswith("-")))
                if redirection.startswith("{"):  # sets a variable
                    return Word((Part("", "unknown"),), self._line(), redirection)
                continue
            if operator := self._take(OPERATOR):
                if operator == "\n":
                    self._skip_heredocs()
                if _in_test(words):
                    continue
                return operator
            return self._word()
        return ""

    def _arithmetic(self) -> Word:
        line = self._line()
        start = self._at
        self._at += 1
        self._balanced("(", ")")
        self._at = max(self._at, start + 2)
        self._take(re.compile(r"\)"))
        return Word((Part("", "unknown"),), line, self._text[start : self._at])

    def _skip_heredocs(self) -> None:
        for end, tabs in self._heredocs:
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                stop = len(self._text) if stop < 0 else stop
                line = self._text[self._at : stop]
                self._at = stop + 1
                if (line.lstrip("\t") if tabs else line) == end:
                    break
        self._heredocs = []

    def _word(self) -> Word:
        line = self._line()
        start = self._at
        parts: list[Part] = []
        while self._at < len(self._text):
            raw = self._text[start : self._at]
            if self._text.startswith(("<(", ">("), self._at) and not raw:
                self._at += 1
                self._balanced("(", ")")
                parts.append(Part("", "unknown"))
            elif self._text[self._at] == "(" and ARRAY.fullmatch(raw):
                return self._array(line, start)
            elif self._text[self._at] in " \t\n;&|()<>":
                break
            else:
                parts += self._part(quoted=False)
        return Word(tuple(parts), line, self._text[start : self._at])

    def _array(self, line: int, start: int) -> Word:
        end = self._at
        self._at += 1
        items: list[Word] = []
        while self._at < len(self._text):
            if self._take(BLANK) or self._take(COMMENT) or self._take(re.compile("\n")):
                continue
            if self._text[self._at] in ";&|()<>":
                break
            items.append(self._word())
        if self._text[self._at : self._at + 1] != ")":
            raise ValueError(f"{self._path}, line {line}: want a ) that closes the array; got none")
        self._at += 1
        return Word((Part(self._text[start:end]),), line, self._text[start : self._at], tuple(items))

    def _part(self, quoted: bool) -> list[Part]:
        """The next parts of a word; at least one character is taken."""
        char = self._text[self._at]
        if char == "'" and not quoted:
            return [Part(self._until("'"), quoted=True)]
        if char == '"':
            return self._double()
        if char == "\\":
            self._at += 2
            escaped = self._text[self._at - 1 : self._at]
            if escaped == "\n":
                return []
            return [Part("\\" + escaped if quoted and escaped not in '"$`\\' else escaped, quoted=True)]
        if char == "`":
            self._until("`")
            return [Part("", "unknown", quoted)]
        if char == "$":
            return self._dollar(quoted)
        return [Part(self._take(LITERAL if quoted else PLAIN), quoted=quoted)]

    def _until(self, quote: str) -> str:
        line = self._line()
        start = self._at + 1
        end = self._text.find(quote, start)
        if end < 0:
            raise ValueError(f"{self._path}, line {line}: want a {quote} that closes the quote; got none")
        self._at = end + 1
        return self._text[start:end]

    def _double(self) -> list[Part]:
        line = self._line()
        self._at += 1
        parts = [Part("", quoted=True)]
        while self._at < len(self._text):
            if self._text[self._at] == '"':
                self._at += 1
                return parts
            parts += self._part(quoted=True)
        raise ValueError(f'{self._path}, line {line}: want a " that closes the quote; got none')

    def _dollar(self, quoted: bool) -> list[Part]:
        self._at += 1
        rest = self._text[self._at : self._at + 2]
        if rest == "((":
            inside = self._balanced("(", ")")
            whole = inside.startswith("(") and inside.endswith(")")
            return [Part(inside[1:-1], "sum" if whole else "unknown", quoted)]
        if rest[:1] == "(":
            self._balanced("(", ")")
            return [Part("", "unknown", quoted)]
        if rest[:1] == "[":
            self._balanced("[", "]")
            return [Part("", "unknown", quoted)]
        if rest[:1] == "{":
            return [Part(self._balanced("{", "}"), "name", quoted)]
        if rest[:1] == "'" and not quoted:
            text = self._until("'")
            return [Part(text, "unknown" if "\\" in text else "text", True)]
        if rest[:1] == '"' and not quoted:
            return self._double()
        name = self._take(NAME)
        return [Part(name, "name", quoted) if name else Part("$", quoted=quoted)]

    def _balanced(self, opening: str, closing: str) -> str:
        """The text between a pair, at whose start the scanner is; quotes and escapes hide what they contain."""
        line = self._line()
        start = self._at + 1
        depth = 0
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return self._text[start : self._at - 1]
            if char == "\\":
                self._at += 1
            elif char in "'\"" and opening == "(":
                self._at -= 1
                self._until("'") if char == "'" else self._double()
        raise ValueError(f"{self._path}, line {line}: want a {closing} that closes the {opening}; got none")


def _in_test(words: list[Word]) -> bool:
    """Whether `[[` is open, in which operators end no command."""
    first = next((word.raw for word in words if word.raw not in OPENING | BETWEEN), "")
    return first == "[[" and words[-1].raw != "]]"


def _without_keywords(words: list[Word], open_: list[str]) -> list[Word]:
    """The words of the command itself. open_: the compounds that are open, which the keywords in front change."""
    while words:
        first = words[0].raw
        if first == "function":
            words = words[2:]
            continue
        if first in OPENING:
            open_.append(first)
            if first in ("for", "case", "select"):
                break
        elif first in CLOSING:
            if open_[-1:] and open_[-1] in CLOSING[first]:
                open_.pop()
        elif first not in BETWEEN:
            break
        words = words[1:]
    return words
