"""MSCCL XML files: <algo> of <gpu> of <tb> of <step>, and the <copy> elements that TACCL and TE-CCL write.

    <algo name="ring" proto="Simple" nchannels="1" nchunksperloop="4" ngpus="4" coll="allreduce" inplace="1" outofplace="1"
          minBytes="0" maxBytes="0">
      <gpu id="0" i_chunks="4" o_chunks="4" s_chunks="0">
        <tb id="0" send="1" recv="3" chan="0">
          <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>

The reader demands every attribute that the executor demands, of the type it demands, and nothing it would not understand; other attributes
are kept and written back. Whether a file is right is `meshwright.check.foreign.msccl`'s business. Errors point:
`ring.xml: gpu 3 tb 2 step 5: cnt: must be a whole number, got '1.5'`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

from ...errors import FormatError
from ...interop.msccl import COLLECTIVES, DIALECTS, MANY_STEPS, PARTS, PROTOCOLS, Attributes, MscclAlgo, MscclBlock, MscclGpu, MscclStep
from ..atomic import write_text
from ..limits import MAX_INT32
from ..xml_reader import XmlNode, parse_xml, read_xml

__all__ = ["msccl_text", "parse_msccl", "read_msccl", "write_msccl"]

_ALGO = ("name", "proto", "nchannels", "nchunksperloop", "ngpus", "coll", "inplace", "outofplace", "minBytes", "maxBytes", "root")
_GPU = ("id", "i_chunks", "o_chunks", "s_chunks")
_BLOCK = ("id", "send", "recv", "chan")
_STEP = ("s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps", "hasdep")
_STEP_FORM = "<step " + " ".join(f'{name}="%s"' for name in _STEP)  # numbers, and words that need no quoting


def read_msccl(path: str | os.PathLike[str]) -> MscclAlgo:
    """The algorithm in a file (`-`: standard input). Raises: UsageError if it cannot be read; FormatError."""
    where = "standard input" if str(path) == "-" else Path(path).name
    return _algo(read_xml(path), where)


def parse_msccl(data: bytes, where: str = "algorithm") -> MscclAlgo:
    """The algorithm in a document. Raises: FormatError."""
    return _algo(parse_xml(data, where), where)


# ---- reading -----------------------------------------------------------------------------------------------------------
class _Fields:
    """The attributes of one element, each taken once and checked; `extra` is what nobody took."""

    def __init__(self, node: XmlNode, where: str) -> None:
        self.node, self.where = node, where

    def error(self, name: str, message: str, hint: str = "") -> FormatError:
        field = f"{self.where}: {name}" if name else self.where
        return FormatError(message, where=field, hint=hint, data={"line": self.node.line, "field": name})

    def text(self, name: str, choices: tuple[str, ...] = (), default: str | None = None) -> str:
        value = self.node.attributes.get(name, default)
        if value is None:
            raise self.error(name, f"is missing (line {self.node.line})")
        if choices and value not in choices:
            raise self.error(name, f"must be one of {', '.join(choices)}, got {value[:40]!r}")
        return value

    def integer(self, name: str, default: int | None = None, most: int = MAX_INT32) -> int:
        text = self.text(name, default=None if default is None else str(default))
        digits = text[1:] if text[:1] == "-" else text
        if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
            raise self.error(name, f"must be a whole number, got {text[:40]!r}")
        value = int(text)
        if not -MAX_INT32 - 1 <= value <= most:
            raise self.error(name, f"must be {-MAX_INT32 - 1}..{most}, got {value}")
        return value

    def extra(self, known: tuple[str, ...]) -> Attributes:
        return tuple((k, v) for k, v in self.node.attributes.items() if k not in known)

    def children(self, names: tuple[str, ...]) -> Iterator[XmlNode]:
        if self.node.text:
            raise self.error("", f"text between elements is not allowed: {self.node.text[:40]!r}")
        for child in self.node.children:
            if child.name not in names:
                hint = f"the executor skips it; known here: {', '.join(names)}" if names else "nothing belongs inside it"
                raise self.error("", f"unknown element <{child.name[:40]}> (line {child.line})", hint)
            yield child


def _algo(node: XmlNode, where: str) -> MscclAlgo:
    f = _Fields(node, where)
    if node.name != "algo":
        raise f.error("", f"must be an <algo> document, got <{node.name[:40]}>", "is it a topology or another kind of XML file?")
    gpus = tuple(_gpu(child, where) for child in f.children(("gpu",)))
    return MscclAlgo(
        name=f.text("name", default=""), protocol=f.text("proto", PROTOCOLS), channels=f.integer("nchannels"),
        chunks_per_loop=f.integer("nchunksperloop"), ranks=f.integer("ngpus"), collective=f.text("coll", (*COLLECTIVES, *DIALECTS)),
        in_place=f.integer("inplace"), out_of_place=f.integer("outofplace"), min_bytes=f.integer("minBytes", most=1 << 62),
        max_bytes=f.integer("maxBytes", most=1 << 62), gpus=gpus, root=f.integer("root", -1), extra=f.extra(_ALGO),
    )  # fmt: skip


def _gpu(node: XmlNode, where: str) -> MscclGpu:
    f = _Fields(node, where)
    number = f.integer("id")
    f.where = f"{where}: gpu {number}"
    blocks: list[MscclBlock] = []
    copies: list[tuple[int, int]] = []
    for child in f.children(("tb", "copy")):
        if child.name == "tb":
            blocks.append(_block(child, f.where))
        else:
            c = _Fields(child, f"{f.where} copy {len(copies)}")
            list(c.children(()))
            copies.append((c.integer("i_off"), c.integer("o_off")))
    chunks = (f.integer("i_chunks"), f.integer("o_chunks"), f.integer("s_chunks"))
    return MscclGpu(number, *chunks, tuple(blocks), tuple(copies), f.extra(_GPU))


def _block(node: XmlNode, where: str) -> MscclBlock:
    f = _Fields(node, where)
    number = f.integer("id")
    f.where = f"{where} tb {number}"
    steps = tuple(_step(child, f.where, k) for k, child in enumerate(f.children(("step",))))
    return MscclBlock(number, f.integer("send"), f.integer("recv"), f.integer("chan"), steps, f.extra(_BLOCK))


def _step(node: XmlNode, where: str, position: int) -> MscclStep:
    f = _Fields(node, f"{where} step {position}")
    list(f.children(()))
    buffers = ("i", "o", "s")
    return MscclStep(
        f.integer("s"), f.text("type", tuple(PARTS)), f.text("srcbuf", buffers), f.integer("srcoff"), f.text("dstbuf", buffers), f.integer("dstoff"),
        f.integer("cnt"), f.integer("depid"), f.integer("deps"), f.integer("hasdep"), f.extra(_STEP),
    )  # fmt: skip


# ---- writing -----------------------------------------------------------------------------------------------------------
def write_msccl(path: str | os.PathLike[str], algo: MscclAlgo) -> None:
    """Write all or nothing. Raises what `io.atomic` raises."""
    write_text(path, msccl_text(algo))


def msccl_text(algo: MscclAlgo) -> str:
    """The algorithm as XML, in the form that the executor's own parser understands: one element per line, double quotes, no declaration.
    With more than `interop.msccl.MANY_STEPS` steps all on one line."""
    head = [
        ("name", algo.name), ("proto", algo.protocol), ("nchannels", algo.channels), ("nchunksperloop", algo.chunks_per_loop), ("ngpus", algo.ranks),
        ("coll", algo.collective), ("inplace", algo.in_place), ("outofplace", algo.out_of_place), ("minBytes", algo.min_bytes),
        ("maxBytes", algo.max_bytes), *([("root", algo.root)] if algo.root >= 0 else []),
    ]  # fmt: skip
    many = sum(len(b.steps) for g in algo.gpus for b in g.blocks) > MANY_STEPS
    two, four, six = ("", "", "") if many else ("  ", "    ", "      ")
    form = six + _STEP_FORM
    lines = [f"<algo{_attributes(head, algo.extra)}>"]
    for g in algo.gpus:
        of_gpu = [("id", g.id), ("i_chunks", g.i_chunks), ("o_chunks", g.o_chunks), ("s_chunks", g.s_chunks)]
        lines.append(f"{two}<gpu{_attributes(of_gpu, g.extra)}>")
        lines += [f'{four}<copy i_off="{i}" o_off="{o}"/>' for i, o in g.copies]
        for b in g.blocks:
            of_block = [("id", b.id), ("send", b.send), ("recv", b.recv), ("chan", b.channel)]
            lines.append(f"{four}<tb{_attributes(of_block, b.extra)}>")
            lines += [form % s[:10] + (_attributes((), s.extra) if s.extra else "") + "/>" for s in b.steps]
            lines.append(f"{four}</tb>")
        lines.append(f"{two}</gpu>")
    lines += ["</algo>", ""]
    return ("" if many else "\n").join(lines)


def _attributes(own: Sequence[tuple[str, object]], extra: Attributes) -> str:
    return "".join(f" {key}={_quoted(str(value))}" for key, value in (*own, *extra))


def _quoted(text: str) -> str:
    """In double quotes always: the executor's parser knows no others."""
    quoted = quoteattr(text)
    return quoted if quoted[0] == '"' else '"' + text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;") + '"'
