"""The commands that README, CONTRIBUTING and docs/ tell people to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "solvers/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
_PROGRAMS = ("vasuki", "python", "make", "pip")
_INLINE = re.compile(rf"`((?:{'|'.join(_PROGRAMS)}) [^`]+)`")


@dataclass(frozen=True)
class Command:
    """One command as a page writes it."""

    page: str
    words: tuple[str, ...]  # without variables before it, comments and redirections
    is_mention: bool  # within a sentence, perhaps without its arguments

    @property
    def program(self) -> str:
        return Path(self.words[0]).name

    def __str__(self) -> str:
        return " ".join(self.words)


def commands() -> list[Command]:
    """All commands, in the order of pages and lines, each once."""
    found = (command for page in PAGES for command in _commands_of(page))
    return list(dict.fromkeys(found))


def _commands_of(page: Path) -> Iterator[Command]:
    blocks, sentences = _split(page.read_text(encoding="utf-8"))
    for line in blocks.replace("\\\n", " ").splitlines():
        for words in _shell_words(line):
            if Path(words[0]).name in _PROGRAMS:
                yield Command(page.name, words, is_mention=False)
    for text in _INLINE.findall(" ".join(sentences.split())):
        yield Command(page.name, tuple(shlex.split(text)), is_mention=True)


def _split(text: str) -> tuple[str, str]:
    """What stands in code blocks, and what stands around them."""
    blocks, sentences, fenced = [], [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            blocks.append(line)
        else:
            sentences.append(line)
    return "\n".join(blocks), "\n".join(sentences)


def _shell_words(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of one line of shell."""
    line = re.sub(r"^\s*(?:\S+ ){2}\* \* \* ", "", line)  # a line of cron
    for part in line.split("&&"):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # not shell, but YAML or a table
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        while words and re.fullmatch(r"[0-9]?>.*|&", words[-1]):
            words = words[:-1]
        if words:
            yield tuple(word for word in words if not re.match(r"[0-9]?>", word))
