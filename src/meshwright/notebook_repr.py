"""How nouns show themselves in notebooks without knowing how they are drawn.

A noun has `_repr_html_ = repr_html`. The drawing is in `report`, above the nouns; the package tells this module where (`draw_with`) when it is
imported, and `report` is loaded when a notebook asks for the first time.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["draw_with", "repr_html"]

_drawing: Callable[[object], str] = repr


def draw_with(drawing: Callable[[object], str]) -> None:
    """From now on nouns are drawn by `drawing`."""
    global _drawing
    _drawing = drawing


def repr_html(noun: object) -> str:
    """What a notebook shows for `noun`: a small, static piece of HTML."""
    return _drawing(noun)
