"""A rank's gradient groups that go through a codec: what `encode`, `advance` and `decode` steps do, and their memory in checkpoints.

The gradients of a training program are shares of the mean: the loss is divided by replicas and micro-batches. A codec sends this replica's own mean,
so that what it keeps is as large as in any other data-parallel run, and the mean over replicas is taken once, by the codec's `finish`. A replica is
every rank that holds the same: copies of a stage, which have some of the micro-batches each, are replicas as well.
Checkpoints hold it as `codecs.saved` does, a file per rank beside the parameters', read by any number of replicas: new replica r goes on with
the sum of what the old replicas r, r + new, ... had not sent, in whatever stages and tensor-parallel parts these held it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ...codec.codec import parse_codec
from ...errors import Unsupported
from ...io.shard_file import digest_of, require_digest
from ...plan.plan import TrainingLayout
from ...plan.shards import part_ranges
from ..codecs import At, Payload
from ..codecs.saved import Found, Group, Part, Piece, load_states, read_states, save_states
from ..executor.memory import RankMemory
from ..traffic.group import GroupExchange
from .segments import RankModule

__all__ = ["STEPS", "CompressedGroups"]

STEPS = ("encode", "advance", "decode")
Action = Callable[[], None]


class CompressedGroups:
    """By name of the group (`@0`). `alone`: messages are left out (where steps are timed), so every slot is taken to hold this rank's payload."""

    def __init__(self, layout: TrainingLayout, rank: int, module: RankModule, *, alone: bool = False) -> None:
        pipeline, data, tensor = layout.coordinates(rank)
        mates = layout.mates(pipeline)
        self.world, self.replica = len(mates) * layout.data, mates.index(pipeline) * layout.data + data
        self.rank, self.alone, self.step = rank, alone, 0
        self.module, self.layout = module, layout
        self.groups: dict[str, GroupExchange] = {}
        for number, bucket in enumerate(layout.buckets_of(pipeline)):
            if bucket.codec:
                name = f"gradients@{number}"
                if name not in module.gradients:
                    raise Unsupported(f"the plan sends {name} through a codec, and rank {rank} has no such gradients", hint="make the plan again")
                held = sorted((p for p in module.trained() if p.gradient == name), key=lambda p: p.offset)
                flat = module.gradients[name][: sum(p.numel for p in held)]
                self.groups[f"@{number}"] = GroupExchange(
                    number, parse_codec(bucket.codec), [p.name for p in held], [tuple(p.tensor.shape) for p in held], flat.dtype, "refuse", flat
                )  # fmt: skip
        families = layout.families()
        home = next(i for i, family in enumerate(families) if pipeline in family)
        names = [n for g in self.groups.values() for n in g.names]
        pieces = {n: _piece(p.full_shape, layout, n, tensor) for n in names if (p := module.parameters[n]).shard is not None}
        self.part = Part(number=home * layout.tensor + tensor, of=len(families) * layout.tensor, pieces=pieces)

    def compile(self, name: str, group: str, memory: RankMemory) -> Action:
        """The action of a step of the group `codec<stage>@<number>`. Raises: Unsupported for a step without a group."""
        key = "@" + group.partition("@")[2]
        if key not in self.groups:
            raise self._odd(name, group)
        g = self.groups[key]
        sizes = [size.upper for size in g.spec.rounds(g.shapes) if size.upper]
        if g.spec.aggregation == "all-gather":
            sent = memory.by_name.get(f"sent{key}", -1)
            if sent < 0 or name == "advance":
                raise self._odd(name, group)
            slots = memory.make(sent).view(torch.uint8).chunk(self.world)
            if len(slots) != self.world or slots[-1].numel() < sizes[0]:
                raise Unsupported(f"the plan's slots have no room for {g.spec.text}'s payloads", where=f"sent{key}", hint="make the plan again")
            return self._encode(g, slots[self.replica]) if name == "encode" else self._decode_all(g, slots, sizes[0])
        sums = [self.module.sums.get(f"sum{k}{key}") for k in range(len(sizes))]
        found = [s for s, size in zip(sums, sizes, strict=True) if s is not None and s.numel() * s.itemsize >= size]
        if len(found) != len(sizes) or (name == "advance" and len(found) < 2):
            raise self._odd(name, group)
        return {"encode": self._encode_into, "advance": self._advance, "decode": self._decode}[name](g, found)

    def _odd(self, name: str, group: str) -> Unsupported:
        return Unsupported(
            f"rank {self.rank} cannot execute {name!r} of {group!r}",
            hint="program and layout of the plan are of different plans: make it again",
        )  # fmt: skip

    @property
    def at(self) -> At:
        return At(step=self.step, rank=self.replica, world=self.world)

    def _encoded(self, g: GroupExchange) -> Payload:
        g.flat *= self.world
        g.encode(self.at)
        assert g.payload is not None
        return g.payload

    # ---- gathered ----------------------------------------------------------------------------------------------
    def _encode(self, g: GroupExchange, slot: torch.Tensor) -> Action:
        def encode() -> None:
            payload = self._encoded(g)
            slot[: payload.size_bytes].copy_(payload.wire)

        return encode

    def _decode_all(self, g: GroupExchange, slots: tuple[torch.Tensor, ...], size_bytes: int) -> Action:
        def decode() -> None:
            g.received = [slots[self.replica if self.alone else r][:size_bytes] for r in range(self.world)]
            self._mean(g)

        return decode

    def _mean(self, g: GroupExchange) -> None:
        g.decode(self.world)
        g.begin()

    # ---- summed ------------------------------------------------------------------------------------------------
    def _encode_into(self, g: GroupExchange, sums: list[torch.Tensor]) -> Action:
        def encode() -> None:
            g.payload = _within(self._encoded(g), sums[0])

        return encode

    def _advance(self, g: GroupExchange, sums: list[torch.Tensor]) -> Action:
        def advance() -> None:
            assert g.payload is not None
            following = g.codec.advance(g.payload, g.state, self.at)
            assert following is not None, "a codec with two rounds has a second one"
            g.payload = _within(following, sums[1])

        return advance

    def _decode(self, g: GroupExchange, sums: list[torch.Tensor]) -> Action:
        def decode() -> None:
            payload = g.payload
            assert payload is not None
            while (following := g.codec.advance(payload, g.state, self.at)) is not None:  # rounds in which nothing is sent
                payload = following
            g.received = payload
            self._mean(g)

        return decode

    def tensors(self) -> list[torch.Tensor]:
        """What lives between steps."""
        return [t for g in self.groups.values() for t in g.state.values()]

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def save(self, folder: Path, step: int) -> dict[str, str]:
        """Write this rank's file; gives its name and digest, nothing where no rank of the plan keeps anything."""
        if not any(parse_codec(b.codec).feedback for b in self.layout.buckets if b.codec) and not self.tensors():
            return {}
        states = {name: g.state for name, g in self.groups.items()}
        path = save_states(folder, self._described(), states, step=step, rank=self.replica, world=self.world, part=self.part)
        return {path.name: digest_of(path)}

    def load(self, folder: Path, digests: Mapping[str, str], *, drop_residual: bool) -> None:
        """Go on with what the ranks of the checkpoint had not sent; with this rank's own where their number is the same.

        Raises: FormatError for a damaged file; UsageError where a residual has no place, unless it may be dropped.
        """
        if not digests:
            return

        def read(path: Path) -> Found:
            require_digest(path, digests.get(path.name, ""))
            return read_states(path)

        mine = {n for g in self.groups.values() for n in g.names}
        others = {n for b in self.layout.buckets if b.codec and parse_codec(b.codec).feedback for n in b.params} - mine
        found = load_states(
            folder, self._described(), rank=self.replica, world=self.world, part=self.part, drop_residual=drop_residual, elsewhere=others, read=read,
        )  # fmt: skip
        for name, g in self.groups.items():
            for key, value in found[name].items():
                g.state[key].copy_(value)

    def _described(self) -> dict[str, Group]:
        return {name: g.described() for name, g in self.groups.items()}


def _within(payload: Payload, flat: torch.Tensor) -> Payload:
    """The payload with its numbers in `flat`, where they are summed."""
    part = flat[: payload.summand.numel()]
    part.copy_(payload.summand)
    return replace(payload, wire=part.view(torch.uint8), parts=(part,))


def _piece(shape: tuple[int, ...], layout: TrainingLayout, name: str, tensor: int) -> Piece:
    """What a tensor index holds of a parameter that is split."""
    cut = next(s for s in layout.shards if s.param == name)
    return Piece(tuple(shape), cut.axis, part_ranges(shape[cut.axis], cut, tensor, layout.tensor))
