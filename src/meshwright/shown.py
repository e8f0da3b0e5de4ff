"""How nouns show themselves in notebooks without knowing how they are drawn.

A noun has `_repr_html_ = repr_html`. The drawing is in `report`, above the nouns, and is loaded when a notebook asks for the first time.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["repr_html"]


def repr_html(noun: object) -> str:
    """What a notebook shows for `noun`: a small, static piece of HTML."""
    html: str = import_module(f"{__package__}.report.notebook").html_of(noun)
    return html
