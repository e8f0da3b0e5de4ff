"""Puts a page together: sections, packed data, style and script in one file that loads nothing and runs nothing else.

The content policy names the one style and the one script by their digests and forbids everything else, connections included. Data stands in
script elements of a type that is never run; in it `<`, `>` and `&` are written as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ... import __version__
from ...errors import MeshwrightError
from .html import Html, joined, tag

__all__ = ["assembled", "data_block"]

SCRIPTS = ("format.js", "unpack.js", "colors.js", "overview.js", "gestures.js", "timeline.js", "spans.js", "transfers.js", "main.js")


def data_block(id: str, content: dict[str, Any]) -> Html:
    """Data that the page's script reads from the element `id`."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for raw, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(raw, escaped)
    return Html(f'<script type="application/json" id="{id}">{text}</script>')


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def assembled(heading: str, subtitle: str, title: str, sections: Sequence[tuple[str, str, Html]], blocks: Sequence[Html]) -> str:
    """The page. `title`: of the browser's window; `sections`: (id, name in the navigation, section) in order; `blocks`: of `data_block`."""
    style = _asset("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    policy = Html(f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'")
    parts = {
        "policy": tag("meta", http_equiv="Content-Security-Policy", content=policy),
        "title": tag("title", f"{title} - meshwright"),
        "style": Html(style), "script": Html(script),
        "heading": tag("h1", heading), "subtitle": tag("p", subtitle),
        "links": joined(tag("li", tag("a", name, href=f"#{id}")) for id, name, _ in sections),
        "sections": joined(made for _, _, made in sections), "data": joined(blocks),
        "footer": tag("p", f"Written by meshwright {__version__}. This page loads nothing and sends nothing."),
    }  # fmt: skip
    html = _asset("page.html")
    for name, part in parts.items():
        before, marker, after = html.partition(f"<!-- {name} -->")
        if not marker:
            raise MeshwrightError(f"the page's template lacks {name}", hint="install meshwright again")
        html = before + part + after
    return html
