"""Codec specs: texts, options, stated sizes."""

from __future__ import annotations

import pytest

from meshwright.codec.codec import CodecSpec, parse_codec
from meshwright.codec.kinds import CODECS
from meshwright.codec.terms import PayloadBytes
from meshwright.errors import UnknownName, UsageError


@pytest.mark.parametrize("kind", CODECS, ids=lambda k: k.name)
def test_texts_are_read_back(kind) -> None:  # type: ignore[no-untyped-def]
    plain = parse_codec(kind.name)
    assert plain.text == kind.name and plain == CodecSpec.of(kind.name) and plain.kind is kind
    for option in kind.options:
        value = option.choices[-1] if option.choices else not option.default if isinstance(option.default, bool) else option.default
        others = {"feedback": False} if option.name == "scaled" else {}
        changed = CodecSpec.of(kind.name, **{option.name: value}, **others)
        assert parse_codec(changed.text) == changed and changed[option.name] == value


def test_spaces_and_defaults_do_not_matter() -> None:
    assert parse_codec(" topk: density=0.01 ,feedback=True") == parse_codec("topk")
    assert parse_codec("topk:density=1e-1,feedback=0").text == "topk:density=0.1,feedback=false"


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("topq", UnknownName, "no codec 'topq'"), ("", UnknownName, "no codec"), ("topk:depth=1", UnknownName, "no option 'depth'"),
        ("topk:density", UsageError, "not option=value"),
        ("topk:density=1,density=1", UsageError, "twice"), ("topk:,", UsageError, "not option=value"),
        ("topk:density=0", UsageError, "outside 1e-09 to 1"), ("topk:density=nan", UsageError, "outside"), ("topk:density=x", UsageError, "no float"),
        ("topk:feedback=maybe", UsageError, "no bool"), ("dgc:feedback=true", UnknownName, "no option 'feedback'"),
        ("randomk:scaled=true", UsageError, "cannot go with error feedback"), ("qsgd:bits=3", UsageError, "none of 2, 4, 8"),
        ("efsign:block=12", UsageError, "no multiple of 8"), ("powersgd:rank=1.5", UsageError, "no int"),
    ],
)  # fmt: skip
def test_wrong_texts(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        parse_codec(text)


def test_sizes() -> None:
    spec = parse_codec("topk:density=0.01")
    assert spec.payload_bytes(10_000_000) == PayloadBytes.exactly(800_000) and spec.payload_bytes(10).exact
    assert spec.payload_bytes(1) == PayloadBytes.exactly(8) and spec.payload_bytes(0) == PayloadBytes.exactly(0)
    assert spec.payload_bytes(1 << 31) == PayloadBytes.exactly(12 * 21_474_836)
    assert parse_codec("none").payload_bytes(3, element_bytes=8).upper == 24
    assert parse_codec("threshold:density=0.1").payload_bytes(100) == PayloadBytes(lower=0, expected=80, upper=160)
    sent = [parse_codec("dgc:warmup=40").payload_bytes(4096, step=s).upper // 8 for s in (0, 10, 29, 30, 39, 40, None)]
    assert sent == [1024, 256, 64, 40, 40, 40, 40]
    assert parse_codec("powersgd:rank=2").rounds([(100, 50), (100,), (4, 4)]) == (
        PayloadBytes.exactly(4 * (200 + 100 + 16)), PayloadBytes.exactly(4 * 100),
    )  # fmt: skip
