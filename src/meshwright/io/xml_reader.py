"""Reading XML from outside: bounded, without document types, entities or anything that is not in the file itself.

The tree holds elements and attributes; text between elements is kept short, for readers that refuse it. Refused are: a DOCTYPE (and
with it every entity of the file's own and every external one), more bytes, elements, attributes or nesting than stated, attribute values
beyond a length, and whatever the parser calls malformed. Every refusal is a `FormatError` that names the file and the line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from ..errors import FormatError
from .limits import MaxBytes
from .strict_json import read_at_most

__all__ = ["XmlLimits", "XmlNode", "parse_xml", "read_xml"]


@dataclass(frozen=True, kw_only=True)
class XmlLimits:
    max_bytes: int = MaxBytes.MSCCL_XML
    elements: int = 600_000
    depth: int = 32
    attributes: int = 64
    characters: int = 4096  # of one name or value


@dataclass(slots=True)
class XmlNode:
    """An element: attributes in file order, children in file order, the line it starts at, the first words of text inside it."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[XmlNode] = field(default_factory=list)
    text: str = ""

    def all(self, name: str) -> Iterator[XmlNode]:
        """The children of that name."""
        return (child for child in self.children if child.name == name)


def read_xml(path: str | os.PathLike[str], *, limits: XmlLimits | None = None) -> XmlNode:
    """The root element of a file (`-`: standard input). Raises: UsageError if it cannot be read; FormatError."""
    caps = limits or XmlLimits()
    where, data = read_at_most(path, caps.max_bytes)
    return parse_xml(data, where, limits=caps)


def parse_xml(data: bytes, where: str, *, limits: XmlLimits | None = None) -> XmlNode:
    """The root element of an XML document; `where` names it in errors. Raises: FormatError."""
    caps = limits or XmlLimits()
    if len(data) > caps.max_bytes:
        raise FormatError(f"larger than {caps.max_bytes} bytes", where=where)
    if not data.strip():
        raise FormatError("is empty", where=where, hint="an XML document has one root element")
    return _Reader(where, caps).parse(data)


class _Reader:
    def __init__(self, where: str, limits: XmlLimits) -> None:
        self.where, self.limits = where, limits
        self.root: XmlNode | None = None
        self.stack: list[XmlNode] = []
        self.elements = 0
        parser = expat.ParserCreate()
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._doctype
        parser.EntityDeclHandler = self._entity
        parser.ExternalEntityRefHandler = self._entity
        parser.SkippedEntityHandler = self._entity
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        self.parser = parser

    def parse(self, data: bytes) -> XmlNode:
        try:
            self.parser.Parse(data, True)
        except expat.ExpatError as error:
            text = expat.ErrorString(error.code)
            hint = "the file is cut short or was changed by hand: write it again"
            raise FormatError(f"not XML: {text}, column {error.offset + 1}", where=f"{self.where}: line {error.lineno}", hint=hint) from None
        except (ValueError, LookupError) as error:  # an encoding that Python does not know, or that is no encoding of text
            raise FormatError(f"not XML: {str(error)[:120]}", where=self.where) from None
        assert self.root is not None, "expat refuses a document without elements"
        return self.root

    def _refuse(self, message: str, hint: str = "") -> NoReturn:
        raise FormatError(message, where=f"{self.where}: line {self.parser.CurrentLineNumber}", hint=hint)

    def _doctype(self, *_: object) -> None:
        self._refuse("has a DOCTYPE, which is not read", "remove it; entities and external references are never followed")

    def _entity(self, *_: object) -> int:
        self._refuse("has an entity of its own or an external one, which is not read", "write the text out")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        caps = self.limits
        self.elements += 1
        if self.elements > caps.elements:
            self._refuse(f"has more than {caps.elements} elements")
        if len(self.stack) >= caps.depth:
            self._refuse(f"nests deeper than {caps.depth} elements")
        if len(attributes) > caps.attributes:
            self._refuse(f"an element with more than {caps.attributes} attributes")
        if len(name) > caps.characters:
            self._refuse(f"a name longer than {caps.characters} characters")
        for key, value in attributes.items():
            if len(key) > caps.characters or len(value) > caps.characters:
                self._refuse(f"the attribute {key[:32]!r} is longer than {caps.characters} characters")
        node = XmlNode(sys.intern(name), attributes, self.parser.CurrentLineNumber)
        if self.stack:
            self.stack[-1].children.append(node)
        else:
            self.root = node
        self.stack.append(node)

    def _end(self, _: str) -> None:
        self.stack.pop()

    def _text(self, text: str) -> None:
        if not text.isspace() and not self.stack[-1].text:
            self.stack[-1].text = text.strip()[:64]
