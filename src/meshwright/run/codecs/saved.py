"""What codecs remember, in files: saved per rank, loaded by the same or another number of ranks, with the same or other groups.

A file is safetensors: tensors `group/name`, and one JSON document about them (`Saved`) under the metadata key `meshwright`. Nothing is unpickled.

Another world size: new rank r gets the sum of the old ranks r, r + world, r + 2 world, ... of what was not sent yet (residual and DGC's velocity);
ranks beyond the old ones begin with zeros. Gradients are means over a rank's samples and updates means over ranks, so the sums count every
pending sample once when the *per-rank* batch stays the same; when the *global* batch does (`batch="global"`), they are multiplied by
new / old world besides, and the mean over ranks is kept. Either is exact to the rounding of one float32.
Other groups or codecs: what was not sent is kept per tensor name, and follows the tensor; the rest (PowerSGD's start, thresholds, Signum's momenta)
starts afresh. A tensor whose new codec keeps nothing, or that no group has, would lose its residual: that is refused unless `drop_residual`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Literal

import msgspec
import torch

from ...codec import parse_codec
from ...errors import FormatError, UsageError
from ...io.atomic import write_bytes
from ..checkpoint_parts import crc32_of
from . import make_codec
from .base import PENDING, State

__all__ = ["Group", "Saved", "load_states", "read_states", "save_states", "state_file"]

SCHEMA, VERSION = "meshwright.codec-state", 1
Batch = Literal["per-rank", "global"]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fused group: its codec's text, and the names and shapes of its tensors in the order in which they lie in it."""

    codec: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [shape for _, shape in self.tensors]


class Saved(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The document of one rank's file. `crc32`: of each tensor's bytes."""

    schema: str = SCHEMA
    version: int = VERSION
    step: int
    rank: int
    world: int
    groups: dict[str, Group]
    crc32: dict[str, int]


def state_file(folder: Path, rank: int) -> Path:
    return folder / f"codecs-{rank:03d}.safetensors"


def save_states(folder: Path, groups: Mapping[str, Group], states: Mapping[str, State], *, step: int, rank: int, world: int) -> Path:
    """Write this rank's states, by group name; the file replaces an older one as a whole or not at all."""
    from safetensors.torch import save

    tensors = {f"{group}/{name}": tensor.detach().contiguous().cpu() for group, state in states.items() for name, tensor in state.items()}
    about = Saved(step=step, rank=rank, world=world, groups=dict(groups), crc32={k: crc32_of(v) for k, v in tensors.items()})
    folder.mkdir(parents=True, exist_ok=True)
    path = state_file(folder, rank)
    write_bytes(path, save(tensors, metadata={"meshwright": msgspec.json.encode(about).decode()}))
    return path


def read_states(path: Path) -> tuple[Saved, dict[str, State]]:
    """Raises: FormatError when the file is not what `save_states` writes, or damaged."""
    from safetensors import SafetensorError, safe_open

    where = str(path)
    try:
        with safe_open(where, "pt") as file:
            about = msgspec.json.decode((file.metadata() or {}).get("meshwright", ""), type=Saved)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        hint = "every old rank's file is needed, or drop what they had not sent yet (drop_residual)"
        raise FormatError(f"cannot be read: {error.strerror or error}", where=where, hint=hint) from None
    except (SafetensorError, msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"is no file of codec states: {error}", where=where) from None
    if about.schema != SCHEMA or about.version != VERSION:
        raise FormatError(f"is {about.schema!r} version {about.version}, expected {SCHEMA!r} version {VERSION}", where=where)
    states: dict[str, State] = {}
    for name, group in about.groups.items():
        states[name] = {}
        for key, size in _sizes(name, group, where).items():
            found = tensors.get(f"{name}/{key}")
            if found is None or found.shape != (size,) or found.dtype != torch.float32:
                raise FormatError(f"{name}/{key} is missing or not of {size} float32", where=where)
            if about.crc32.get(f"{name}/{key}") != crc32_of(found):
                raise FormatError(f"{name}/{key} is not what was saved", where=where, hint="the checkpoint is damaged")
            states[name][key] = found
    return about, states


def _sizes(name: str, group: Group, where: str) -> dict[str, int]:
    if any(min(shape, default=0) < 0 for shape in group.shapes):
        raise FormatError(f"group {name!r} has a tensor of negative size", where=where)
    try:
        return make_codec(parse_codec(group.codec), group.shapes, name=name).state_sizes()
    except UsageError as error:
        raise FormatError(f"group {name!r}: {error}", where=where) from None


def load_states(
    folder: Path, groups: Mapping[str, Group], *, rank: int, world: int, batch: Batch = "per-rank", drop_residual: bool = False
) -> dict[str, State]:
    """The states of these groups for `rank` of `world`, from what any number of ranks saved into `folder`.

    The same world and groups get their own bits back. `drop_residual`: begin with empty memories where the old ones cannot be kept.
    Raises: FormatError (a file missing or damaged), UsageError (residuals would be lost).
    """
    fresh = {name: make_codec(parse_codec(g.codec), g.shapes, name=name).new_state() for name, g in groups.items()}
    if drop_residual and not state_file(folder, 0).exists():
        return fresh
    about, first = read_states(state_file(folder, 0))
    if about.world == world:
        about, own = (about, first) if rank == 0 else _read_rank(folder, rank, about)
        if about.groups == dict(groups):
            return own
    for name, state in fresh.items():
        if about.groups.get(name) == groups[name]:  # equal on all ranks, or found again by itself
            state |= {key: first[name][key] for key in ("q",) if key in state}
    pending = _pending(folder, about, rank, world)
    _place(groups, fresh, pending, world / about.world if batch == "global" else 1.0, drop_residual)
    return fresh


def _read_rank(folder: Path, rank: int, like: Saved) -> tuple[Saved, dict[str, State]]:
    path = state_file(folder, rank)
    about, states = read_states(path)
    if (about.rank, about.world, about.step) != (rank, like.world, like.step):
        raise FormatError(f"is rank {about.rank} of {about.world} at step {about.step}, expected {rank} of {like.world} at {like.step}",
        where=str(path))
    return about, states


def _pending(folder: Path, like: Saved, rank: int, world: int) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, tensor name) -> float64 sum over the old ranks that this rank takes over."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for old in range(rank, like.world, world):
        about, states = _read_rank(folder, old, like)
        for name, group in about.groups.items():
            for kind in PENDING:
                if kind in states[name]:
                    parts = states[name][kind].split([prod(shape) for shape in group.shapes])
                    for (tensor, _), part in zip(group.tensors, parts, strict=True):
                        found[kind, tensor] = found.get((kind, tensor), 0) + part.double()
    return found


def _place(groups: Mapping[str, Group], states: Mapping[str, State], pending: dict[tuple[str, str], torch.Tensor], factor: float, drop: bool) -> None:
    """Write pending sums into the new states, by tensor name. Raises: UsageError when something would be lost."""
    left = {key for key, value in pending.items() if value.any()}
    for name, group in groups.items():
        parts = {kind: states[name][kind].split([prod(s) for s in group.shapes]) for kind in PENDING if kind in states[name]}
        for kind, pieces in parts.items():
            for (tensor, _), piece in zip(group.tensors, pieces, strict=True):
                value = pending.get((kind, tensor))
                if value is not None and value.numel() == piece.numel():
                    piece.copy_(value * factor)
                    left.discard((kind, tensor))
    if left and not drop:
        raise UsageError(
            f"what was not sent yet of {_few(sorted({tensor for _, tensor in left}))} has no place: the new groups leave it out or keep nothing",
            where="codec states", hint="give these tensors a codec with error feedback, or drop it on purpose (drop_residual)",
        )  # fmt: skip


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
