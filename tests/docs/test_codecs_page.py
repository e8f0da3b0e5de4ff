"""The page about codecs says what the codecs say, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.codec.codec import CodecSpec
from meshwright.codec.kinds import CODECS
from meshwright.codec.terms import CodecKind
from meshwright.run.codecs import make_codec

PAGE = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text(encoding="utf-8")
SHAPES = [(1024, 1024)]


def row(kind: CodecKind) -> str:
    """The line of the page's table."""
    spec, n = CodecSpec.of(kind.name), 1 << 20
    size = sum(r.expected for r in spec.rounds(SHAPES))
    error = "0"
    if spec.bias == "unbiased":
        error = f"variance {spec.variance(n):.3g}"
    elif spec.bias == "biased":
        share = spec.contraction(n)
        error = "depends on x" if share is None else f"keeps {share:.6g}" if share < 0.99 else f"loses {1 - share:.1e}"
    remembers = bool(make_codec(spec, SHAPES).state_sizes())
    memory = "its own" if kind.own_memory and remembers else "yes" if kind.feedback else "no"
    source = f"{kind.cite.venue} {kind.cite.year}" if kind.cite and not kind.cite.venue.startswith("arXiv") else kind.cite.venue if kind.cite else ""
    way = "sum" + (f", {len(spec.rounds(SHAPES))} rounds" if len(spec.rounds(SHAPES)) > 1 else "") if kind.aggregation == "all-reduce" else "gather"
    promise = "yes" if kind.keeps_loss else "no"
    return f"| `{kind.name}` | {kind.title} | {size} | {4 * n / size:.3g} | {way} | {spec.bias} | {error} | {memory} | {promise} | {source} |"


@pytest.mark.parametrize("kind", CODECS, ids=lambda k: k.name)
def test_the_table(kind: CodecKind) -> None:
    assert row(kind) in PAGE


@pytest.mark.parametrize("kind", CODECS, ids=lambda k: k.name)
def test_the_options(kind: CodecKind) -> None:
    for option in kind.options:
        default = str(option.default).lower() if isinstance(option.default, bool) else option.default
        assert f"`{option.name}={default}`" in PAGE, (kind.name, option.name)


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for code, output in blocks:
        exec(code, {})
        assert capsys.readouterr().out == output
