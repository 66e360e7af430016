"""What a paged cache knows of one sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tokens:
    """The tokens of one sequence: their pages, and how many they are."""

    # after `evict` there is a gap behind the first `sinks` tokens, of the `gone` tokens that it removed
    pages: list[int]
    length: int = 0
    sinks: int = 0
    gone: int = 0

    def cut(self, length: int) -> None:
        """Leave the first `length` tokens; a gap counts while there are tokens behind it."""
        self.length, self.gone = length, self.gone if length > self.sinks else 0

    def last_slot(self, page_size: int) -> int:
        """Where its last token lies, numbered over all pages, -1 for none."""
        last = self.length - 1
        return self.pages[last // page_size] * page_size + last % page_size if self.length else -1
