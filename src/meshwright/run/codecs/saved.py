"""What codecs remember, in files or in memory: saved per rank, loaded by the same or another number of ranks, with the same or other groups.

A file is safetensors: tensors `group/name`, and one JSON document about them (`Saved`) under the metadata key `meshwright`. Nothing is unpickled. The
same in memory is a dictionary of the tensors, with the document under that key (`packed`).

Another world size: new rank r gets the sum of the old ranks r, r + world, r + 2 world, ... of what was not sent yet (residual and DGC's velocity);
ranks beyond the old ones begin with zeros. Gradients are means over a rank's samples and updates means over ranks, so the sums count every
pending sample once when the *per-rank* batch stays the same; when the *global* batch does (`batch="global"`), they are multiplied by
new / old world besides, and the mean over ranks is kept. Either is exact to the rounding of one float32.
Other groups or codecs: what was not sent is kept per tensor name, and follows the tensor; the rest (PowerSGD's start, thresholds, Signum's momenta)
starts afresh. A tensor whose new codec keeps nothing, or that no group has, would lose its residual: that is refused unless `drop_residual`.
A rank (a replica) may be several parts, processes that hold other tensors or pieces of tensors each (`Part`): file number rank * parts + part. Pieces
are put together over the old parts and cut for the new one, so other stages and tensor-parallel degrees go on with the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from ...codec.codec import parse_codec
from ...errors import FormatError, UsageError
from ...io.atomic import write_bytes
from ...io.shard_file import crc32_of
from . import make_codec
from .base import PENDING, State

__all__ = ["Group", "Part", "Piece", "Saved", "load_packed", "load_states", "packed", "read_states", "save_states", "state_file"]

SCHEMA, VERSION = "meshwright.codec-state", 1
DOCUMENT = "meshwright"  # key of the document beside the tensors
Batch = Literal["per-rank", "global"]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fused group: its codec's text, and the names and shapes of its tensors in the order in which they lie in it."""

    codec: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [shape for _, shape in self.tensors]


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a tensor of shape `shape`, `ranges` of dimension `axis`, in order: what a part has of it."""

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[int, int], ...]

    def local(self) -> tuple[int, ...]:
        """The shape of what the part has. Raises: FormatError for ranges that no such tensor has."""
        inside = 0 <= self.axis < len(self.shape) and all(0 <= a <= b <= self.shape[self.axis] for a, b in self.ranges)
        if not inside:
            raise FormatError(f"ranges {self.ranges} of dimension {self.axis} of a tensor of shape {self.shape}", where="codec states")
        return tuple(sum(b - a for a, b in self.ranges) if i == self.axis else d for i, d in enumerate(self.shape))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which of the processes that make up a rank this is, and the tensors of which it has pieces only."""

    number: int = 0
    of: int = 1
    pieces: Mapping[str, Piece] = field(default_factory=dict)


ALL = Part()


class Saved(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The document of one rank's file. `crc32`: of each tensor's bytes."""

    schema: str = SCHEMA
    version: int = VERSION
    step: int
    rank: int
    world: int
    part: int = 0
    parts: int = 1
    pieces: dict[str, Piece] = {}
    groups: dict[str, Group]
    crc32: dict[str, int]


Found = tuple[Saved, dict[str, State]]


def state_file(folder: Path, rank: int, part: Part = ALL) -> Path:
    return folder / f"codecs-{rank * part.of + part.number:03d}.safetensors"


def packed(groups: Mapping[str, Group], states: Mapping[str, State], *, step: int, rank: int, world: int, part: Part = ALL) -> dict[str, Any]:
    """This rank's states, by group name, as one dictionary of tensors (copies on the CPU), and the document about them as text."""
    tensors = {f"{group}/{name}": tensor.detach().cpu().clone() for group, state in states.items() for name, tensor in state.items()}
    about = Saved(
        step=step, rank=rank, world=world, part=part.number, parts=part.of, pieces=dict(part.pieces), groups=dict(groups),
        crc32={k: crc32_of(v) for k, v in tensors.items()},
    )  # fmt: skip
    return {**tensors, DOCUMENT: msgspec.json.encode(about).decode()}


def save_states(
    folder: Path, groups: Mapping[str, Group], states: Mapping[str, State], *, step: int, rank: int, world: int, part: Part = ALL
) -> Path:
    """Write this rank's states, by group name; the file replaces an older one as a whole or not at all."""
    from safetensors.torch import save

    tensors = packed(groups, states, step=step, rank=rank, world=world, part=part)
    text = tensors.pop(DOCUMENT)
    folder.mkdir(parents=True, exist_ok=True)
    path = state_file(folder, rank, part)
    write_bytes(path, save(tensors, metadata={DOCUMENT: text}))
    return path


def read_states(path: Path) -> Found:
    """Raises: FormatError when the file is not what `save_states` writes, or damaged."""
    from safetensors import SafetensorError, safe_open

    where = str(path)
    try:
        with safe_open(where, "pt") as file:
            text = (file.metadata() or {}).get(DOCUMENT, "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        hint = "every old rank's file is needed, or drop what they had not sent yet (drop_residual)"
        raise FormatError(f"cannot be read: {error.strerror or error}", where=where, hint=hint) from None
    except SafetensorError as error:
        raise FormatError(f"is no file of codec states: {error}", where=where) from None
    return _unpacked(text, tensors, where)


def _unpacked(text: object, tensors: Mapping[str, Any], where: str) -> Found:
    try:
        about = msgspec.json.decode(text if isinstance(text, str) else "", type=Saved)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"is no file of codec states: {error}", where=where) from None
    if about.schema != SCHEMA or about.version != VERSION:
        raise FormatError(f"is {about.schema!r} version {about.version}, expected {SCHEMA!r} version {VERSION}", where=where)
    states: dict[str, State] = {}
    for name, group in about.groups.items():
        states[name] = {}
        for key, size in _sizes(name, group, where).items():
            found = tensors.get(f"{name}/{key}")
            if not isinstance(found, torch.Tensor) or found.shape != (size,) or found.dtype != torch.float32:
                raise FormatError(f"{name}/{key} is missing or not of {size} float32", where=where)
            if about.crc32.get(f"{name}/{key}") != crc32_of(found):
                raise FormatError(f"{name}/{key} is not what was saved", where=where, hint="the checkpoint is damaged")
            states[name][key] = found
        for tensor, shape in group.tensors:
            if (piece := about.pieces.get(tensor)) is not None and piece.local() != shape:
                raise FormatError(f"{tensor!r} has shape {shape} in {name!r}, and {piece.local()} by its piece", where=where)
    return about, states


def _sizes(name: str, group: Group, where: str) -> dict[str, int]:
    if any(min(shape, default=0) < 0 for shape in group.shapes):
        raise FormatError(f"group {name!r} has a tensor of negative size", where=where)
    try:
        return make_codec(parse_codec(group.codec), group.shapes, name=name).state_sizes()
    except UsageError as error:
        raise FormatError(f"group {name!r}: {error}", where=where) from None


def load_states(
    folder: Path, groups: Mapping[str, Group], *, rank: int, world: int, part: Part = ALL, batch: Batch = "per-rank", drop_residual: bool = False,
    elsewhere: Container[str] = (), read: Callable[[Path], Found] = read_states,
) -> dict[str, State]:  # fmt: skip
    """The states of these groups for `rank` of `world`, from what any number of ranks saved into `folder`.

    The same world, parts and groups get their own bits back. `drop_residual`: begin with empty memories where the old ones cannot be kept.
    `elsewhere`: tensors whose memories other parts take over. `read`: of a file, e.g. with its digest checked.
    Raises: FormatError (a file missing or damaged), UsageError (residuals would be lost).
    """
    if drop_residual and not state_file(folder, 0).exists():
        return _fresh(groups)

    def numbered(number: int) -> Found:
        return read(state_file(folder, number))

    return _load(_Old(numbered, numbered(0)[0]), groups, rank, world, part, batch, drop_residual, elsewhere)


def load_packed(
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], groups: Mapping[str, Group], *, rank: int, world: int, drop_residual: bool = False
) -> tuple[int, dict[str, State]]:
    """(step to go on with, states) from `packed` ones: this rank's own, or those of all old ranks. Raises: as `load_states`."""
    where = "codec states"
    rows = [_unpacked(one.get(DOCUMENT), one, where) for one in ([saved] if isinstance(saved, Mapping) else saved)]
    found = {about.rank: (about, states) for about, states in rows}
    worlds = {about.world for about, _ in rows}
    own = len(rows) == 1 and worlds == {world} and rank in found
    if not own and (len(worlds) != 1 or sorted(found) != list(range(*worlds)) or len(rows) != len(found)):
        raise FormatError(
            f"states of ranks {sorted(found)} of a run with {sorted(worlds)} ranks", where=where,
            hint="give this rank's own state, or those of all old ranks", data={"ranks": sorted(found)},
        )  # fmt: skip
    like = rows[0][0]
    return like.step, _load(_Old(found.__getitem__, like), groups, rank, world, ALL, "per-rank", drop_residual, ())


@dataclass(frozen=True)
class _Old:
    """What old ranks saved, by number; `like`: the document of one of them."""

    read: Callable[[int], Found]
    like: Saved

    def of(self, rank: int, part: int) -> Found:
        """Raises: FormatError for one of another run or step."""
        like = self.like
        about, states = self.read(rank * like.parts + part)
        have, want = ((x.rank, x.part, x.world, x.parts, x.step) for x in (about, msgspec.structs.replace(like, rank=rank, part=part)))
        if have != want:
            raise FormatError(
                f"is rank {about.rank} of {about.world} at step {about.step}, expected {rank} of {like.world} at {like.step}",
                where=f"codec states {rank * like.parts + part}",
            )  # fmt: skip
        return about, states


def _fresh(groups: Mapping[str, Group]) -> dict[str, State]:
    return {name: make_codec(parse_codec(g.codec), g.shapes, name=name).new_state() for name, g in groups.items()}


def _load(
    old: _Old, groups: Mapping[str, Group], rank: int, world: int, part: Part, batch: Batch, drop_residual: bool, elsewhere: Container[str]
) -> dict[str, State]:
    fresh, like = _fresh(groups), old.like
    if like.parts == part.of:
        about, near = old.of(rank if like.world == world else 0, part.number)
        same = dict(about.groups) == dict(groups) and about.pieces == dict(part.pieces)
        if like.world == world and same:
            return near
        for name, state in fresh.items():
            if about.groups.get(name) == groups[name]:  # equal on all ranks, or found again by itself
                state |= {key: near[name][key] for key in ("q",) if key in state}
    wanted = {t: part.pieces[t].shape if t in part.pieces else shape for g in groups.values() for t, shape in g.tensors}
    pending = _Pending(wanted)
    for at in range(rank, like.world, world):
        for number in range(like.parts):
            pending.add(*old.of(at, number))
    _place(groups, fresh, pending, part.pieces, world / like.world if batch == "global" else 1.0)
    if pending.left and not drop_residual and (lost := sorted({t for _, t in pending.left if t not in elsewhere})):
        raise UsageError(
            f"what was not sent yet of {_few(lost)} has no place: the new groups leave it out or keep nothing",
            where="codec states", hint="give these tensors a codec with error feedback, or drop it on purpose (drop_residual, --drop-residual)",
        )  # fmt: skip
    return fresh


class _Pending:
    """Sums over old ranks of what was not sent, by (kind, tensor), of tensors of these whole shapes; `left`: what has found no place."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.sums: dict[tuple[str, str], torch.Tensor] = {}
        self.left: set[tuple[str, str]] = set()

    def add(self, about: Saved, states: Mapping[str, State]) -> None:
        for name, group in about.groups.items():
            for kind in PENDING:
                if kind not in states[name]:
                    continue
                parts = states[name][kind].split([prod(shape) for shape in group.shapes])
                for (tensor, shape), values in zip(group.tensors, parts, strict=True):
                    self._one((kind, tensor), values.view(shape), about.pieces.get(tensor))

    def _one(self, key: tuple[str, str], values: torch.Tensor, piece: Piece | None) -> None:
        if values.any():
            self.left.add(key)
        shape = piece.shape if piece is not None else tuple(values.shape)
        if self.shapes.get(key[1]) != shape:
            return
        whole = self.sums.setdefault(key, torch.zeros(shape, dtype=torch.float64))
        for mine, theirs in _matched(whole, values, piece):
            mine += theirs


def _matched(whole: torch.Tensor, values: torch.Tensor, piece: Piece | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a whole tensor and of a part's, range by range."""
    if piece is None:
        return [(whole, values)]
    found, at = [], 0
    for a, b in piece.ranges:
        found.append((whole.narrow(piece.axis, a, b - a), values.narrow(piece.axis, at, b - a)))
        at += b - a
    return found


def _place(
    groups: Mapping[str, Group], states: Mapping[str, State], pending: _Pending, pieces: Mapping[str, Piece], factor: float
) -> None:
    """Write pending sums into the new states, by tensor name."""
    for name, group in groups.items():
        for kind in (k for k in PENDING if k in states[name]):
            parts = states[name][kind].split([prod(shape) for shape in group.shapes])
            for (tensor, shape), values in zip(group.tensors, parts, strict=True):
                whole = pending.sums.get((kind, tensor))
                if whole is not None:
                    for theirs, mine in _matched(whole, values.view(shape), pieces.get(tensor)):
                        mine.copy_(theirs * factor)
                    pending.left.discard((kind, tensor))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
