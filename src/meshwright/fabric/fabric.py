"""The fabric: devices, switches and the directed links between them.

A `Fabric` is plain data with exact rates (integer bytes per second). Actors are numbered devices first, then switches:
actor `a < len(devices)` is a device. Files are read by `meshwright.io.fabric.toml`, presets live in
`meshwright.fabric.presets`; nothing here touches a file.

Routing is part of what a fabric *is*: between two actors messages follow the path with the fewest links among those
that pass only through switches, falling back to paths through devices where the fabric has no other; ties go to the
widest path, then to the smallest link numbers. In one key, smallest first: (devices passed through, links, -rate of the
narrowest link, link numbers in order). The checker, the simulator and the planners all use this definition.

A fabric that is built is well formed: names are unique, links join two different actors that exist, rates are positive
whole numbers, latencies finite; anything else raises UsageError naming the entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import Disconnected, UnknownName, UsageError
from ..notebook_repr import repr_html
from .route import Router

__all__ = ["Device", "Fabric", "Link", "Provenance", "Switch"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One processor that computes. `flops` maps a dtype name (`"fp32"`, `"bf16"`, ...) to peak operations per second; `runs` kinds of tasks of one's
    own (`"camera"`, `"decoder"`, ...) to the operations per second of theirs that this device does."""

    name: str
    kind: str = "gpu"  # "gpu" | "cpu"
    group: str = ""  # the server it sits in
    memory_bytes: int = 0  # 0 = unknown, no limit
    memory_bandwidth_Bps: int = 0
    flops: Mapping[str, int] = field(default_factory=dict)
    cpu_share: float = 0.0  # share of one core this device may use; 0 = a whole device of its own
    cpu_period_s: float = 0.0  # of the quota that keeps the share: it may be used up at once, then the device stands still; 0 = evenly slower
    cpu_overrun_s: float = 0.0  # that it runs on past its quota until the kernel notices; the next periods pay for it
    cpu_stretch: float = 1.0  # seconds per second of its processor time while it runs, where other programs use its core too
    cpu_cores: float = 0.0  # of the machine that all devices with this figure are on: while more of them run, they share these; 0 = a core of its own
    # By kind of work, `compute` and `memory`: how fast each of 1, 2, ... busy cores of that machine is, by one alone; beyond the last as the last.
    cpu_speeds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sm: int = 0  # ten times the compute capability of an NVIDIA GPU, 90 = Hopper; 0 = unknown
    runs: Mapping[str, int] = field(default_factory=dict)
    watts: float = 0.0  # drawn while it computes, above what it draws when idle; 0 = unknown

    def rate_of(self, kind: str = "") -> int:
        """Operations per second for tasks of this kind, 0 where it cannot run them; without a kind the highest of its rates."""
        if not kind:
            return max((*self.flops.values(), *self.runs.values()), default=0)
        return self.runs.get(kind) or self.flops.get(kind, 0)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A node that forwards. `multicast` and `aggregate` say what it can do with data in flight; `aggregate_bytes`: its memory for sums that are not
    complete, each held twice, as ranks may be a turn apart (0 = not stated)."""

    name: str
    group: str = ""
    multicast: bool = False
    aggregate: bool = False
    aggregate_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a cable or bundle. `latency_s` is the wire's; `library_latency_s` what a runtime adds per message."""

    src: str
    dst: str
    rate_Bps: int
    latency_s: float = 0.0
    library_latency_s: float = 0.0
    kind: str = "NET"  # NV<k> | PIX | PXB | PHB | NODE | SYS | NET | XGMI<k> | LO; shown by `fabric show`
    burst_bytes: int = 0  # token bucket of a shaped link; 0 = none
    joules_per_byte: float = 0.0  # of what is sent over it; 0 = nothing


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a number came from: `what` names the field or group of links, `source` the publication, constant or run."""

    what: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Fabric:
    name: str
    devices: tuple[Device, ...]
    switches: tuple[Switch, ...] = ()
    links: tuple[Link, ...] = ()
    provenance: tuple[Provenance, ...] = ()
    _repr_html_ = repr_html

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for kind, names in (("devices", [d.name for d in self.devices]), ("switches", [s.name for s in self.switches])):
            for index, name in enumerate(names):
                if not name or name in seen:
                    raise UsageError(f"{name!r} is taken" if name else "is empty", where=f"{self.name}: {kind}[{index}].name")
                seen.add(name)
        for index, link in enumerate(self.links):
            wrong = _wrong_with(link, seen)
            if wrong:
                raise UsageError(wrong[1], where=f"{self.name}: links[{index}].{wrong[0]}")

    # ---- names and numbers -------------------------------------------------------------------------------------
    @cached_property
    def actor_names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.devices) + tuple(s.name for s in self.switches)

    @cached_property
    def actor_of(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.actor_names)}

    def device(self, name: str) -> Device:
        index = self.actor_of.get(name, len(self.devices))
        if index >= len(self.devices):
            raise UnknownName(f"fabric {self.name!r} has no device {name!r}", hint=f"its devices: {_some(d.name for d in self.devices)}")
        return self.devices[index]

    @cached_property
    def link_ends(self) -> tuple[tuple[int, int], ...]:
        """(source actor, destination actor) of every link, in link order."""
        return tuple((self.actor_of[x.src], self.actor_of[x.dst]) for x in self.links)

    @cached_property
    def out_links(self) -> tuple[tuple[int, ...], ...]:
        """Links that leave each actor, in link order."""
        out: list[list[int]] = [[] for _ in self.actor_names]
        for index, (src, _) in enumerate(self.link_ends):
            out[src].append(index)
        return tuple(map(tuple, out))

    @cached_property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Server name -> its device numbers, in device order."""
        found: dict[str, list[int]] = {}
        for index, device in enumerate(self.devices):
            found.setdefault(device.group, []).append(index)
        return {name: tuple(members) for name, members in found.items()}

    @cached_property
    def in_links(self) -> tuple[tuple[int, ...], ...]:
        """Links that arrive at each actor, in link order."""
        into: list[list[int]] = [[] for _ in self.actor_names]
        for index, (_, dst) in enumerate(self.link_ends):
            into[dst].append(index)
        return tuple(map(tuple, into))

    # ---- routing (the definition is in the module's docstring, the search in meshwright.fabric.route) ------------
    @cached_property
    def _router(self) -> Router:
        return Router(len(self.devices), self.link_ends, self.out_links, self.in_links, [x.rate_Bps for x in self.links])

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Links from actor `src` to actor `dst` in order; empty when they are the same actor.

        Raises: Disconnected when there is no path.
        """
        if src == dst:
            return ()
        path = self._router.route(src, dst)
        if path is None:
            names = self.actor_names
            raise Disconnected(
                f"no path from {names[src]} to {names[dst]} in fabric {self.name!r}",
                hint="see `meshwright fabric show`",
                data={"src": names[src], "dst": names[dst], "reachable": [names[a] for a in self.reachable(src)][:64]},
            )
        return path

    def message_costs(self, src: int, dst: int) -> tuple[float, float]:
        """(seconds, seconds per byte) of a message that shares no link: every link's latency, the library's once, the narrowest link's rate. Zero
        within a device. Raises: Disconnected."""
        route = [self.links[x] for x in self.route(src, dst)]
        if not route:
            return 0.0, 0.0
        return sum(x.latency_s for x in route) + max(x.library_latency_s for x in route), 1 / min(x.rate_Bps for x in route)

    def reachable(self, src: int) -> tuple[int, ...]:
        """Actors that can be reached from `src`, itself included, in actor order."""
        return tuple(sorted(self._router.reach(src, forward=True)))

    def require_connected(self) -> None:
        """Raise Disconnected, naming a cut, unless every device reaches every other."""
        if not self.devices:
            return
        everyone = set(range(len(self.devices)))
        missing = everyone - self._router.reach(0, forward=True)
        src = 0
        if not missing:  # device 0 reaches all; so a device that does not reach device 0 is the only thing that can be wrong
            deaf = everyone - self._router.reach(0, forward=False)
            if not deaf:
                return
            src = min(deaf)
            missing = everyone - self._router.reach(src, forward=True)
        names = self.actor_names
        raise Disconnected(
            f"fabric {self.name!r} is not connected: no path from {names[src]} to {names[min(missing)]}",
            where=self.name,
            hint="add links, or name a connected part with --devices; see `meshwright fabric show`",
            data={"from": [names[i] for i in sorted(everyone - missing)][:64], "to": [names[i] for i in sorted(missing)][:64]},
        )

    # ---- parts -------------------------------------------------------------------------------------------------
    def subset(self, devices: Sequence[int | str]) -> Fabric:
        """The fabric with only these devices, in fabric order; switches and the links between what remains are kept."""
        chosen: set[int] = set()
        for item in devices:
            index = self.actor_of.get(item, -1) if isinstance(item, str) else item
            if not 0 <= index < len(self.devices):
                known = f"devices are 0-{len(self.devices) - 1}: {_some(d.name for d in self.devices)}"
                raise UsageError(f"fabric {self.name!r} has no device {item!r}", hint=known)
            chosen.add(index)
        if not chosen:
            raise UsageError("a subset needs at least one device", hint="e.g. --devices 0-3")
        kept = tuple(d for i, d in enumerate(self.devices) if i in chosen)
        names = {d.name for d in kept} | {s.name for s in self.switches}
        links = tuple(x for x in self.links if x.src in names and x.dst in names)
        return replace(self, devices=kept, links=links)


def _wrong_with(link: Link, actors: set[str]) -> tuple[str, str] | None:
    """(field, message) of the first thing that is wrong with a link."""
    for end, name in (("src", link.src), ("dst", link.dst)):
        if name not in actors:
            return end, f"no device or switch is called {name!r}"
    if link.src == link.dst:
        return "dst", f"a link must join two different actors, got {link.src!r} twice"
    if type(link.rate_Bps) is not int or link.rate_Bps <= 0:
        return "rate_Bps", f"must be a whole number > 0, got {link.rate_Bps!r}"
    for field_name, value in (("latency_s", link.latency_s), ("library_latency_s", link.library_latency_s)):
        if not (math.isfinite(value) and value >= 0):
            return field_name, f"must be finite and >= 0, got {value!r}"
    return None


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f", ... ({len(listed)} in all)" if len(listed) > limit else "")
