"""Where a method comes from, as data: `meshwright cite` turns the strategies of a plan into a bibliography."""

from __future__ import annotations

import msgspec

__all__ = ["FOLKLORE", "Cite"]


class Cite(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    title: str
    year: int
    venue: str
    authors: str = ""
    doi: str = ""
    url: str = ""

    def line(self) -> str:
        """One readable line: `Authors. Title. Venue, year. doi`."""
        parts = [self.authors, self.title, f"{self.venue}, {self.year}" if self.year else "", self.doi or self.url]
        return ". ".join(p for p in parts if p)


FOLKLORE = Cite(key="folklore", title="common practice, no publication that we know", year=0, venue="")
