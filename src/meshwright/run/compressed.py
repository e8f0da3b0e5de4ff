"""A rank's gradient groups that go through a codec: what `encode` and `decode` steps do, and their memory in checkpoints.

The gradients of a training program are shares of the mean: the loss is divided by replicas and micro-batches. A codec sends this replica's own mean,
so that what it keeps is as large as in any other data-parallel run, and the mean over replicas is taken once, by the codec's `finish`.
Left open by the papers: what a checkpoint holds. Our answer: `traffic.state`, one file per rank beside the parameters', read by any number of
replicas: new replica r goes on with the sum of what the old replicas r, r + new, ... had not sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..codec import parse_codec
from ..errors import FormatError, Unsupported
from ..io.atomic import write_bytes
from ..plan import TrainingLayout
from .codecs import At
from .memory import RankMemory
from .segments import RankModule
from .traffic.group import GroupExchange
from .traffic.state import load_groups, saved_groups

__all__ = ["CompressedGroups", "residual_file"]


def residual_file(rank: int) -> str:
    return f"residual-{rank:03d}.safetensors"


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
        from safetensors.torch import save

        if not self.tensors():
            return ""
        found = saved_groups(list(self.groups.values()), step=step, rank=self.replica, world=self.world)
        tensors = {f"{kind}:{a}:{b}": t for kind in ("elements", "groups") for a, inner in found[kind].items() for b, t in inner.items()}
        facts = {k: v for k, v in found.items() if k not in ("elements", "groups")}
        data = save({k: v.contiguous() for k, v in tensors.items()}, metadata={"meshwright": json.dumps(facts)})
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / residual_file(self.rank), data)
        return hashlib.sha256(data).hexdigest()

    def load(self, folder: Path, digests: Mapping[str, str], *, drop_residual: bool) -> None:
        """Go on with what the ranks of the checkpoint had not sent; this rank's own file alone where their number is the same.

        Raises: FormatError for a damaged file; PlanMismatch where a residual has no place, unless it may be dropped.
        """
        if not digests:
            return
        own = residual_file(self.rank)
        same = len(digests) == self.world and own in digests and bool(self.groups)
        saved = [_read(folder / name, digest) for name, digest in sorted(digests.items()) if not same or name == own]
        load_groups(list(self.groups.values()), saved, self.replica, self.world, drop_residual=drop_residual)


def _read(path: Path, digest: str) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors import safe_open as opened

    try:
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise FormatError("is not the file that the checkpoint's index names (its digest differs)", where=str(path), hint="the checkpoint is damaged")
    try:
        with opened(str(path), "pt") as file:
            facts = json.loads((file.metadata() or {}).get("meshwright", "{}"))
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        found: dict[str, Any] = {**facts, "elements": {}, "groups": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(":")
            a, b = rest.split(":", 1) if kind == "elements" else rest.rsplit(":", 1)
            found[kind].setdefault(a, {})[b] = tensor
        int(found["rank"]), int(found["world"]), int(found["step"])
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"is no state of codecs: {error}", where=str(path)) from None
    return found
