"""A communication sketch: what a designer tells a planner about a cluster of alike boxes before it searches.

The fields are those of TACCL's public sketch files (Shah et al., NSDI 2023, section 3); files are read by `meshwright.io.msccl.taccl_sketch`.
GPU numbers are local to a box; rank `box · gpus_per_box + local` where symmetry offsets speak of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import UnknownName, UsageError

__all__ = ["PUBLISHED_SKETCHES", "Sketch", "sketch_of"]

INTRANODE = ("none", "switch", "minmax", "maxmin")
CONNECTIONS = ("direct-map", "fully-connected")
HYPEREDGES = ("uc-min", "uc-max")
MAX_GPUS, MAX_CHUNKUP, MAX_NODES, MAX_OFFSETS = 1024, 64, 1024, 64


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """One sketch; plain tuples, so that it can be an option of a plan.

    nnodes: boxes it is written for.
    intranode: none = the box's links as they are; switch = only links between GPUs of one entry of `switches`; minmax, maxmin = as none,
        and the busiest link of a box should carry little, or the idlest much.
    switches, hyperedges: GPUs on each switch and whether few or many of its connections should be used (uc-min, uc-max).
    connections: `direct-map` (GPU i to GPU i of the other boxes), `fully-connected`, or (sender, receivers) pairs; empty = within boxes only.
    senders: (sender, GPUs whose data it carries out of the box) pairs; empty = no such rule.
    enforce_ordering: a sender's own chunks leave the box before those it forwards.
    symmetry: (offset, group size) pairs: rank r is like rank (r mod group + offset) mod group + (r div group) · group.
    chunkup: chunks that every input block is cut into.
    heuristic: number of the ordering heuristic in the public tool; kept, not used.
    Raises: UsageError naming the field.
    """

    nnodes: int = 1
    intranode: str = "none"
    switches: tuple[tuple[int, ...], ...] = ()
    hyperedges: tuple[str, ...] = ()
    connections: str | tuple[tuple[int, tuple[int, ...]], ...] = ()
    senders: tuple[tuple[int, tuple[int, ...]], ...] = ()
    enforce_ordering: bool = False
    symmetry: tuple[tuple[int, int], ...] = ()
    chunkup: int = 1
    heuristic: int = 0

    def __post_init__(self) -> None:
        for name, value in (("nnodes", self.nnodes), ("chunkup", self.chunkup)):
            most = MAX_NODES if name == "nnodes" else MAX_CHUNKUP
            if type(value) is not int or not 1 <= value <= most:
                raise UsageError(f"must be 1..{most}, got {value!r}", where=f"sketch.{name}")
        if self.intranode not in INTRANODE:
            raise UsageError(f"no such strategy: {self.intranode!r}", where="sketch.intranode", hint=", ".join(INTRANODE))
        if isinstance(self.connections, str) and self.connections not in CONNECTIONS:
            raise UsageError(f"no such connection: {self.connections!r}", where="sketch.connections", hint=", ".join(CONNECTIONS))
        if (self.intranode == "switch") != bool(self.switches):
            raise UsageError("strategy 'switch' and a list of switches belong together", where="sketch.switches")
        if self.hyperedges and len(self.hyperedges) != len(self.switches):
            raise UsageError(f"{len(self.hyperedges)} strategies for {len(self.switches)} switches", where="sketch.hyperedges", hint="one each")
        for index, wish in enumerate(self.hyperedges):
            if wish not in HYPEREDGES:
                raise UsageError(f"no such strategy: {wish!r}", where=f"sketch.hyperedges[{index}]", hint=", ".join(HYPEREDGES))
        for index, gpus in enumerate(self.switches):
            _gpus(gpus, f"sketch.switches[{index}]")
        for name, pairs in (("connections", () if isinstance(self.connections, str) else self.connections), ("senders", self.senders)):
            _gpus([key for key, _ in pairs], f"sketch.{name}")
            for key, gpus in pairs:
                _gpus(gpus, f"sketch.{name}.{key}")
        self._check_senders()
        if len(self.symmetry) > MAX_OFFSETS:
            raise UsageError(f"{len(self.symmetry)} offsets; at most {MAX_OFFSETS}", where="sketch.symmetry")
        for index, (offset, group) in enumerate(self.symmetry):
            if type(offset) is not int or type(group) is not int or not 0 < offset < group <= MAX_GPUS * MAX_NODES:
                raise UsageError(f"needs 0 < offset < group, got [{offset}, {group}]", where=f"sketch.symmetry[{index}]")

    def _check_senders(self) -> None:
        carried: dict[int, int] = {}
        for sender, gpus in self.senders:
            if not isinstance(self.connections, str) and sender not in dict(self.connections):
                raise UsageError(f"GPU {sender} carries data out, but the connections give it no receiver", where=f"sketch.senders.{sender}")
            for gpu in gpus:
                if gpu in carried:
                    text = f"GPU {gpu} belongs to senders {carried[gpu]} and {sender}"
                    raise UsageError(text, where=f"sketch.senders.{sender}", hint="name it once")
                carried[gpu] = sender


def _gpus(gpus: Sequence[int], where: str) -> None:
    if not gpus and where.count(".") == 2:
        raise UsageError("names no GPU", where=where)
    if len(set(gpus)) < len(gpus):
        raise UsageError(f"names GPU {next(g for i, g in enumerate(gpus) if g in gpus[:i])} twice", where=where)
    for gpu in gpus:
        if type(gpu) is not int or not 0 <= gpu < MAX_GPUS:
            raise UsageError(f"must be GPU numbers 0..{MAX_GPUS - 1}, got {gpu!r}", where=where)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list | tuple) else value


def sketch_of(value: Sketch | Mapping[str, Any] | str | None) -> Sketch | None:
    """A sketch from an option: itself, the plain data of one, or the name of a published one.

    Raises: UnknownName for a name or field that does not exist; UsageError for data that is no sketch.
    """
    if value is None or isinstance(value, Sketch):
        return value
    if isinstance(value, str):
        if value not in PUBLISHED_SKETCHES:
            raise UnknownName(f"no published sketch {value!r}", hint=f"there are: {', '.join(PUBLISHED_SKETCHES)}")
        return PUBLISHED_SKETCHES[value]
    known = [f.name for f in fields(Sketch)]
    for name in value:
        if name not in known:
            raise UnknownName(f"a sketch has no field {name!r}", where="sketch", hint=f"fields: {', '.join(known)}")
    try:
        return Sketch(**{name: _tuples(x) for name, x in value.items()})
    except (TypeError, ValueError) as error:
        raise UsageError(f"is no sketch: {str(error)[:120]}", where="sketch", hint=f"fields: {', '.join(known)}") from None


_ODD_TO_EVEN = tuple((2 * j + 1, (2 * j,)) for j in range(8))
PUBLISHED_SKETCHES: Mapping[str, Sketch] = {
    # Shah et al., NSDI 2023, section 7.1: one InfiniBand card per NDv2 box, reached by GPUs 0 (sends) and 1 (receives).
    "ndv2-sk-1:2": Sketch(nnodes=2, connections=((0, (1,)),), symmetry=((8, 16),)),
    "ndv2-sk-1:4": Sketch(nnodes=4, connections=((0, (1,)),), symmetry=((8, 32),)),
    "ndv2-sk-2:2": Sketch(nnodes=2, connections="fully-connected", symmetry=((8, 16),)),
    "ndv2-sk-2:4": Sketch(nnodes=4, connections="fully-connected", symmetry=((8, 32),)),
    "ndv2-sk-3:2": Sketch(nnodes=2, connections="direct-map", symmetry=((8, 16),)),
    "ndv2-sk-1:1": Sketch(),
    "ndv2-sk-6:1": Sketch(chunkup=6),
    # One card per pair of DGX-2 GPUs: the odd one sends, the even one receives (large sizes) ...
    "dgx2-sk-1:2": Sketch(
        nnodes=2, intranode="switch", switches=(tuple(range(16)),), hyperedges=("uc-min",), connections=_ODD_TO_EVEN,
        senders=tuple((s, (s - 1, s)) for s, _ in _ODD_TO_EVEN), enforce_ordering=True, symmetry=((2, 16), (16, 32)), chunkup=2,
    ),
    # ... or every GPU sends to its twin (small sizes).
    "dgx2-sk-2:2": Sketch(
        nnodes=2, intranode="switch", switches=(tuple(range(16)),), hyperedges=("uc-max",), connections="direct-map",
        senders=tuple((g, (g,)) for g in range(16)), symmetry=((2, 16), (16, 32)),
    ),
    "dgx2-sk-1:1": Sketch(intranode="switch", switches=(tuple(range(16)),), hyperedges=("uc-min",), symmetry=((2, 16),)),
    "dgx2-sk-2:1": Sketch(intranode="switch", switches=(tuple(range(16)),), hyperedges=("uc-min",), symmetry=((2, 16),), chunkup=2),
}  # fmt: skip
