"""A rank's gradient groups that go through a codec: what `encode` and `decode` steps do, and their memory in checkpoints.

The gradients of a training program are shares of the mean: the loss is divided by replicas and micro-batches. A codec sends this replica's own mean,
so that what it keeps is as large as in any other data-parallel run, and the mean over replicas is taken once, by the codec's `finish`.
Checkpoints hold it as `codecs.saved` does, a file per rank beside the parameters', read by any number of replicas: new replica r goes on with
the sum of what the old replicas r, r + new, ... had not sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..codec import parse_codec
from ..errors import FormatError, Unsupported
from ..plan import TrainingLayout
from .codecs import At
from .codecs.saved import Group, load_states, save_states, state_file
from .memory import RankMemory
from .segments import RankModule
from .traffic.group import GroupExchange

__all__ = ["CompressedGroups"]


class CompressedGroups:
    """By name of the group (`@0`). `alone`: messages are left out (where steps are timed), so every slot is taken to hold this rank's payload."""

    def __init__(self, layout: TrainingLayout, rank: int, module: RankModule, *, alone: bool = False) -> None:
        stage, self.replica, _ = layout.coordinates(rank)
        self.world, self.rank, self.alone, self.step = layout.data, rank, alone, 0
        self.module = module
        self.groups: dict[str, GroupExchange] = {}
        for number, bucket in enumerate(layout.buckets_of(stage)):
            if bucket.codec:
                name = f"gradients@{number}"
                if name not in module.gradients:
                    raise Unsupported(f"the plan sends {name} through a codec, and rank {rank} has no such gradients", hint="make the plan again")
                held = sorted((p for p in module.trained() if p.gradient == name), key=lambda p: p.offset)
                flat = module.gradients[name][: sum(p.numel for p in held)]
                self.groups[f"@{number}"] = GroupExchange(
                    number, parse_codec(bucket.codec), [p.name for p in held], [tuple(p.tensor.shape) for p in held], flat.dtype, "refuse", flat
                )  # fmt: skip

    def compile(self, name: str, group: str, memory: RankMemory) -> Callable[[], None]:
        """The action of an `encode` or `decode` step of the group `codec<stage>@<number>`. Raises: Unsupported for a step without a group."""
        key = "@" + group.partition("@")[2]
        sent = memory.by_name.get(f"sent{key}", -1)
        if key not in self.groups or sent < 0:
            raise Unsupported(f"rank {self.rank} cannot execute {name!r} of {group!r}", hint="the plan's program and layout do not belong together")
        g, slots = self.groups[key], memory.make(sent).view(torch.uint8).chunk(self.world)
        (size,) = g.spec.rounds(g.shapes)
        if not size.exact or g.spec.aggregation != "all-gather" or len(slots) != self.world or slots[-1].numel() < size.upper:
            raise Unsupported(f"the plan's slots have no room for {g.spec.text}'s payloads", where=f"sent{key}", hint="make the plan again")
        return self._encode(g, slots[self.replica]) if name == "encode" else self._decode(g, slots, size.upper)

    def _encode(self, g: GroupExchange, slot: torch.Tensor) -> Callable[[], None]:
        def encode() -> None:
            g.flat *= self.world
            g.encode(At(step=self.step, rank=self.replica, world=self.world))
            assert g.payload is not None
            slot[: g.payload.size_bytes].copy_(g.payload.wire)

        return encode

    def _decode(self, g: GroupExchange, slots: tuple[torch.Tensor, ...], size_bytes: int) -> Callable[[], None]:
        def decode() -> None:
            g.received = [slots[self.replica if self.alone else r][:size_bytes] for r in range(self.world)]
            g.decode(self.world)

        return decode

    def tensors(self) -> list[torch.Tensor]:
        """What lives between steps."""
        return [t for g in self.groups.values() for t in g.state.values()]

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def save(self, folder: Path, step: int) -> str:
        """Write this rank's file; gives its digest, empty where nothing is kept."""
        if not self.tensors():
            return ""
        states = {name: g.state for name, g in self.groups.items()}
        path = save_states(folder, self._described(), states, step=step, rank=self.replica, world=self.world)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def load(self, folder: Path, digests: Mapping[str, str], *, drop_residual: bool) -> None:
        """Go on with what the ranks of the checkpoint had not sent; with this rank's own where their number is the same.

        Raises: FormatError for a damaged file; UsageError where a residual has no place, unless it may be dropped.
        """
        if not digests:
            return
        taken = [self.replica] if len(digests) == self.world else range(self.replica, len(digests), self.world)
        for path in {state_file(folder, r) for r in (0, *taken)}:
            _require_digest(path, digests.get(path.name, ""))
        found = load_states(folder, self._described(), rank=self.replica, world=self.world, drop_residual=drop_residual)
        for name, g in self.groups.items():
            for key, value in found[name].items():
                g.state[key].copy_(value)

    def _described(self) -> dict[str, Group]:
        return {name: Group(codec=g.spec.text, tensors=tuple(zip(g.names, g.shapes, strict=True))) for name, g in self.groups.items()}


def _require_digest(path: Path, digest: str) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise FormatError("is not the file that the checkpoint's index names (its digest differs)", where=str(path), hint="the checkpoint is damaged")
