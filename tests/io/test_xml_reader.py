"""XML from outside: bombs, doctypes and malformed documents are refused with the line; whatever the bytes, a tree or a FormatError."""

from __future__ import annotations

import io
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.io.xml_reader import XmlLimits, XmlNode, parse_xml, read_xml

GOOD = b'<?xml version="1.0"?>\n<a x="1" y="two &amp; three"><!-- note --><b/>\n<c k=\'v\'>hello</c><b z=""/></a>'
LAUGHS = b"""<?xml version="1.0"?>
<!DOCTYPE lolz [
 <!ENTITY lol "lol"><!ENTITY lol1 "&lol;&lol;&lol;&lol;&lol;&lol;&lol;&lol;&lol;&lol;">
 <!ENTITY lol2 "&lol1;&lol1;&lol1;&lol1;&lol1;&lol1;&lol1;&lol1;&lol1;&lol1;">
]>
<a>&lol2;</a>"""


def test_elements_attributes_and_lines() -> None:
    root = parse_xml(GOOD, "x.xml")
    assert (root.name, root.attributes, root.line) == ("a", {"x": "1", "y": "two & three"}, 2)
    assert [(c.name, c.line) for c in root.children] == [("b", 2), ("c", 3), ("b", 3)]
    assert [c.attributes for c in root.all("b")] == [{}, {"z": ""}]
    assert root.children[1].text == "hello" and not root.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (LAUGHS, "x.xml: line 2: has a DOCTYPE"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "x.xml: line 1: has a DOCTYPE"),
        (b'<!DOCTYPE a PUBLIC "p" "http://localhost/x.dtd"><a/>', "x.xml: line 1: has a DOCTYPE"),
        (b"<!DOCTYPE a [<!ENTITY % p SYSTEM 'http://localhost/x'> %p;]><a/>", "x.xml: line 1: has a DOCTYPE"),
        (b"<!DOCTYPE a [<!ENTITY x SYSTEM '/dev/zero'>]><a>&x;</a>", "x.xml: line 1: has a DOCTYPE"),
        (b"<a>&boom;</a>", "x.xml: line 1: not XML: undefined entity"),
        (b"<a>\n<b>\n</a>", "x.xml: line 3: not XML: mismatched tag"),
        (b"<a x='1' x='2'/>", "x.xml: line 1: not XML: duplicate attribute"),
        (b"<a/><b/>", "x.xml: line 1: not XML: junk after document element"),
        (b"<a", "x.xml: line 1: not XML: unclosed token"),
        (b"<a>\x00</a>", "x.xml: line 1: not XML"),
        (b"<a>\xff</a>", "x.xml: line 1: not XML"),
        (b'<?xml version="1.0" encoding="no-such"?><a/>', "x.xml"),
        (b'<?xml version="1.0" encoding="rot13"?><a/>', "x.xml"),
        (b"   \n ", "x.xml: is empty"),
        (b"", "x.xml: is empty"),
        (b"{}", "x.xml: line 1: not XML"),
        (b"<a>" * 33 + b"</a>" * 33, "x.xml: line 1: nests deeper than 32 elements"),
        (b"<a " + b" ".join(b"a%d='1'" % i for i in range(65)) + b"/>", "x.xml: line 1: an element with more than 64 attributes"),
        (b"<a x='" + b"y" * 5000 + b"'/>", "x.xml: line 1: the attribute 'x' is longer than 4096 characters"),
        (b"<" + b"y" * 5000 + b"/>", "x.xml: line 1: a name longer than 4096 characters"),
    ],
)
def test_refused_with_the_line(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_xml(data, "x.xml")
    assert str(caught.value).startswith(message)


def test_a_bomb_costs_no_memory() -> None:
    """Ten levels of ten would be 10^10 characters; quadratic blow-up needs an entity too, so both end at the DOCTYPE."""
    levels = b"".join(b'<!ENTITY e%d "%s">' % (i, b"&e%d;" % (i - 1) * 10) for i in range(1, 11))
    for data in (
        b'<!DOCTYPE a [<!ENTITY e0 "boom">' + levels + b"]><a>&e10;</a>",
        b'<!DOCTYPE a [<!ENTITY e "' + b"x" * 100_000 + b'">]><a>' + b"&e;" * 10_000 + b"</a>",
    ):
        tracemalloc.start()
        with pytest.raises(FormatError, match="DOCTYPE"):
            parse_xml(data, "bomb.xml")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20


def test_elements_are_counted() -> None:
    with pytest.raises(FormatError, match=r"x\.xml: line 1: has more than 1000 elements"):
        parse_xml(b"<a>" + b"<b/>" * 1000 + b"</a>", "x.xml", limits=XmlLimits(elements=1000))
    assert len(parse_xml(b"<a>" + b"<b/>" * 999 + b"</a>", "x.xml", limits=XmlLimits(elements=1000)).children) == 999


def test_size_limit_is_checked_before_parsing(tmp_path: Path) -> None:
    path = tmp_path / "big.xml"
    path.write_bytes(b"<a>" + b" " * 2000 + b"</a>")
    with pytest.raises(FormatError, match=r"big\.xml: larger than 1000 bytes"):
        read_xml(path, limits=XmlLimits(max_bytes=1000))
    assert read_xml(path).name == "a"


def test_file_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_xml(tmp_path / "missing.xml")
    with pytest.raises(UsageError, match="cannot read"):
        read_xml(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GOOD)))
    assert read_xml("-").name == "a"


def is_tree(node: XmlNode, depth: int = 0) -> bool:
    return depth < 32 and all(isinstance(v, str) for v in node.attributes.values()) and all(is_tree(c, depth + 1) for c in node.children)


PIECES = (
    b"<a>", b"</a>", b"<b/>", b"&lt;", b"<!--", b"-->", b"<![CDATA[", b"]]>", b"<?x?>", b"<a b='", b"'/>", b"<!DOCTYPE a>", b"\n", b"x",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80) | st.lists(st.sampled_from(PIECES)).map(b"".join))
def test_any_bytes_are_a_tree_or_a_format_error(data: bytes) -> None:
    try:
        assert is_tree(parse_xml(data, "f"))
    except FormatError as error:
        assert str(error).startswith("f: ")
