"""The fenced blocks of README.md, with the marks that stand before them in a comment.

<!-- no-run: why -->   tests do not run it
<!-- exit: 1 -->       what its last command ends with, where that is not 0
<!-- exact -->         what it shows is all that it prints, but for `...`, which stands for any lines
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHELLS = ("bash", "console")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<marks>[^>]+) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"(?<!`)`(hfpaged [^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """A line of a shell, which may go on over others, and what the README shows as its output."""

    line: str
    shown: str = ""


@dataclass(frozen=True)
class Block:
    """`number` counts all blocks from 1; `is_adjacent`: nothing stands between it and the one before."""

    number: int
    language: str
    body: str
    marks: dict[str, str] = field(default_factory=dict)
    is_adjacent: bool = False

    @property
    def name(self) -> str:
        return f"README.md, {self.language} block {self.number}"

    @property
    def runs(self) -> bool:
        return "no-run" not in self.marks

    @property
    def exit_codes(self) -> set[int]:
        return {int(code) for code in re.findall(r"\d+", self.marks.get("exit", "0"))}

    @property
    def commands(self) -> list[Command]:
        """Of a shell's block: of a console each behind its `$`, of bash the script as a whole."""
        if self.language == "bash":
            return [Command(self.body)]
        return [_command(text) for text in re.split(r"^\$ ", self.body, flags=re.MULTILINE) if text]


def _command(text: str) -> Command:
    """The lines up to the first that ends no quotation, here document or backslash are the command."""
    lines = text.splitlines(keepends=True)
    end = next(n for n in range(1, len(lines) + 1) if _is_whole("".join(lines[:n])))
    return Command("".join(lines[:end]), "".join(lines[end:]))


def _is_whole(text: str) -> bool:
    if text.endswith("\\\n"):
        return False
    here = re.search(r"<<\s*'?(\w+)'?", text)
    if here is not None:
        return text.endswith(f"\n{here[1]}\n")
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def blocks(text: str = README) -> list[Block]:
    """All of them, in order."""
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(text):
        is_adjacent = bool(found) and not text[end : match.start()].strip()
        marks = _marks(match["marks"] or "")
        found.append(Block(len(found) + 1, match["language"], match["body"], marks, is_adjacent))
        end = match.end()
    return found


def _marks(text: str) -> dict[str, str]:
    """By name; of several in one comment all but the last end with a semicolon."""
    pairs = (mark.partition(":") for mark in text.split(";") if mark.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def shell_blocks(text: str = README) -> list[Block]:
    return [block for block in blocks(text) if block.language in SHELLS]


def outside_of_blocks(text: str = README) -> str:
    return _BLOCK.sub("", text)


def hfpaged_commands(text: str = README) -> list[list[str]]:
    """The words behind `hfpaged` of each such command: of shells, whatever stands around it there, and in sentences."""
    lines = [command.line for block in shell_blocks(text) for command in block.commands]
    sentences = [" ".join(line.split()) for line in _INLINE.findall(outside_of_blocks(text))]
    return [words for line in [*lines, *sentences] for words in _calls(line)]


def _calls(script: str) -> list[list[str]]:
    bare = re.sub(r"[ \t]+# .*$", "", script.replace("\\\n", " "), flags=re.MULTILINE)  # shlex takes line ends, too
    lexer = shlex.shlex(bare, posix=True, punctuation_chars="|&;()<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    calls: list[list[str]] = [[]]
    for word in lexer:
        if re.fullmatch(r"[|&;()\n]+", word):
            calls.append([])
        else:
            calls[-1].append(word)
    return [_without_redirections(words[1:]) for words in calls if words[:1] == ["hfpaged"]]


def _without_redirections(words: list[str]) -> list[str]:
    end = next((n for n, word in enumerate(words) if re.fullmatch(r"[<>&]+", word)), None)
    if end is None:
        return words
    return words[: end - (words[end - 1 : end] == ["2"])]  # of 2>, which the lexer takes apart


def alike(shown: str, printed: str, numbers: bool = False) -> bool:
    """Whether the same was printed, but for white space, what `...` stands for, and numbers unless they count."""
    parts = [re.escape(_plain(part, numbers)) for part in shown.split("...")]
    return re.fullmatch(r"\s*.*?\s*".join(parts), _plain(printed, numbers), re.DOTALL) is not None


def _plain(text: str, numbers: bool) -> str:
    return " ".join((text if numbers else re.sub(r"\d[\d.,:]*", "#", text)).split())
