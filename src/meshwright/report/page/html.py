"""Markup that cannot be forgotten to escape: `tag("td", name)` escapes every text; only what `tag` made is taken as it is.

No `style` attributes and no `on...` attributes: the page's policy forbids both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .packed import clean

__all__ = ["Html", "cell", "figure_of", "joined", "shortened", "source_link", "table", "tag"]

MAX_TEXT_CHARACTERS = 4000  # of any one text
VOID = frozenset({"meta", "input", "br", "hr", "path", "rect", "line", "polyline"})


class Html(str):
    """Text that is markup already."""


def tag(name: str, *children: str | None, **attributes: object) -> Html:
    """`<name attributes>children</name>`. `cls` is `class`, `data_x` is `data-x`; attributes that are None or False are left out.

    An attribute that is `Html` is taken as it is too: paths and policies, which may be long.
    """
    said = "".join(
        f" {'class' if k == 'cls' else k.replace('_', '-')}"
        + ("" if v is True else f'="{v if isinstance(v, Html) else escape(clean(str(v), MAX_TEXT_CHARACTERS))}"')
        for k, v in attributes.items()
        if v is not None and v is not False
    )
    if name in VOID and not children:
        return Html(f"<{name}{said}>" if name in ("meta", "input", "br", "hr") else f"<{name}{said}/>")
    return Html(f"<{name}{said}>{joined(children)}</{name}>")


def joined(children: Iterable[str | None]) -> Html:
    return Html("".join(c if isinstance(c, Html) else escape(clean(c, MAX_TEXT_CHARACTERS)) for c in children if c is not None))


def shortened(text: str, limit: int = 48) -> Html:
    """A name; a long one with its middle left out and the whole of it as a title."""
    text = clean(text)
    if len(text) <= limit:
        return joined([text])
    tail = limit // 3
    return tag("span", text[: limit - tail - 1] + "…" + text[-tail:], title=text)


def cell(value: object, *, number: bool = False, **attributes: object) -> Html:
    content = value if isinstance(value, str) else str(value)
    return tag("td", content, cls="number" if number else None, **attributes)


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = (), id: str | None = None) -> Html:
    """A table with a caption in a box that scrolls by itself. Columns listed in `numbers` stand to the right; the first cell heads its row."""
    head = tag("tr", *(tag("th", h, scope="col", cls="number" if i in numbers else None) for i, h in enumerate(heads)))
    body = []
    for row in rows:
        first, *rest = row
        cells = [cell(v, number=i in numbers) for i, v in enumerate(rest, 1)]
        body.append(tag("tr", tag("th", first if isinstance(first, str) else str(first), scope="row"), *cells))
    made = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), id=id)
    return tag("div", made, cls="wide", tabindex="0", role="region", aria_label=f"table: {caption}")


def figure_of(value: str, label: str, source: str, *, note: str = "") -> Html:
    """One figure of the summary: what it is, how much, and a link to where it comes from."""
    extra = tag("p", note, cls="note") if note else None
    return tag("div", tag("dt", label), tag("dd", tag("span", value, cls="value"), source_link(source), extra), cls="figure")


def source_link(source: str) -> Html:
    return tag("a", source, href=f"#source-{source.replace(' ', '-')}", cls=f"source {source.partition(' ')[0]}")
