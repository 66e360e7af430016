"""Words that this project used to misuse, wide table cells and references that lead nowhere; exits with 1 for any.

`python scripts/prose.py [PATH ...]` reads Markdown without its code, the comments and strings of Python, and the whole
text of other sources. Without paths it reads everything that git tracks.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WIDEST_CELL = 80
# a pattern, and what to write in its place
INSTEAD = {
    r"\brows? S\d+|\bS\d+ (and|to) S\d+|\(S\d+\)|\bS\d+:|\bHOUSE\b|\bthe seeds\b": "cite a paper or a file",
    r"\b(a|the|one|its|their|common|each|no|of|'s) begins?\b": "prefix, or start",
    r"\bbegins? (in|that) common\b": "common prefix",
    r"\bbeside\b": "compared with, next to, together with",
    r"\b(of others|of ours|of theirs)\b": "of other libraries, Saccade's",
    r"\bturned\b(?! (off|on|into|out)\b)": "rotated, transposed",
    r"\btold\b": "reported, known, or name who does it",
    r"\bwants?\b": "needs, expects",
    r"\bnobody\b": "say what there is",
    r"\bparted\b": "separated",
    r"\b(is|are|be) no numbers?\b": "NaN",
    r"\bnot there\b": "missing, not supported",
    r"\bbut for\b": "except",
    r"[a-z`)], for (it|they|he|she|there|what|nothing|no|its|their|this|that|these|those)\b(?! example)": "because",
    r"\bat work\b": "running, active",
    r"\bstands?\b(?! for\b|-)": "is",
    r"\b(who|which|where)(so)?ever\b": "any, all",
    r"\b(what|who) no\b": "name the subject: a key that no query sees",
    r"\banew\b": "again, from the start",
    r"\ba \w+ an? (query|key|column|row|layer|head|token|line|step|channel|lane|tile|program|sequence)\b": "per",
    r"\bthere too\b|\bneedles too\b": "also",
    r"\bare as many\b": "name both numbers",
}
PATTERNS = [(re.compile(pattern, re.I), instead) for pattern, instead in INSTEAD.items()]
SUFFIXES = {".md", ".py", ".pyi", ".cpp", ".hpp", ".wgsl", ".metal", ".h", ".js", ".mjs", ".html"}
# the lists of words, and their test
EXCEPT = ("scripts/prose.py", "scripts/counts.py", "tests/system/test_house.py")


class Place(NamedTuple):
    path: str
    line: int
    what: str
    instead: str


def prose(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and lines of what people read in a file."""
    if path.endswith(".md"):
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fence = line.lstrip().startswith("```")
            fenced ^= fence
            if not (fence or fenced):
                yield number, line
    elif path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield from enumerate(token.string.splitlines(), token.start[0])
    else:
        yield from enumerate(text.splitlines(), 1)


def shown(cell: str) -> str:
    """A cell of Markdown as its reader sees it."""
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("\\|", "|").strip()


def places(path: str, text: str) -> Iterator[Place]:
    """What is wrong in one file."""
    for number, line in prose(path, text):
        for pattern, instead in PATTERNS:
            for match in pattern.finditer(line):
                yield Place(path, number, match[0], instead)
        if path.endswith(".md") and line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                if len(shown(cell)) > WIDEST_CELL:
                    yield Place(path, number, shown(cell)[:30] + "…", f"a cell of at most {WIDEST_CELL} characters")


def tracked() -> list[str]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    own = (p for p in sorted(set(listing)) if "/vendor/" not in p)
    return [p for p in own if Path(p).suffix in SUFFIXES and (ROOT / p).exists()]


def all_places(paths: Iterable[str]) -> list[Place]:
    return [
        place
        for path in paths
        if path not in EXCEPT
        for place in places(path, (ROOT / path).read_text(encoding="utf-8"))
    ]


def main() -> int:
    wanted = tuple(sys.argv[1:])
    wrong = all_places(p for p in tracked() if not wanted or p.startswith(wanted))
    for path, line, what, instead in wrong:
        print(f"{path}:{line}: {what!r}: write {instead}")
    print(f"{len(wrong)} places")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
