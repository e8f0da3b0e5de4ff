"""NCCL's tuner as a function: what it expects every algorithm and protocol to take on a fabric, and which it would choose.

A prediction of NCCL's choice by NCCL's own model, not of the time a run takes: the model's constants were fitted by its authors to their
machines. What the fabric does not say is assumed, and every assumption is listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....errors import Unsupported, UsageError
from ....fabric.fabric import Device, Fabric
from . import tables as table
from .tables import ALGORITHMS, ARCHITECTURES, PROTOCOLS

__all__ = ["Channels", "NcclTopology", "Option", "changes", "choices", "parse_list", "predict", "topology_of"]

OPS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Result of a graph search: `count` channels of `intra_GBps` inside a node and `inter_GBps` between nodes."""

    count: int
    intra_GBps: float
    inter_GBps: float


@dataclass(frozen=True, kw_only=True)
class NcclTopology:
    """What the tuner knows. `cpu`: "intel" | "amd" | "other"; `close`: NICs within PXB (LL128 is allowed); `nvls`: None = not available."""

    ranks: int
    nodes: int
    arch: str
    intra: str  # "nvlink" | "pci"
    cpu: str
    close: bool
    ring: Channels
    nvls: Channels | None = None
    net_latency_us: float = 0.0
    assumptions: tuple[str, ...] = ()

    @property
    def scale(self) -> int:
        """Column of the tables: 1 node, 2 nodes, more."""
        return min(self.nodes, 3) - 1


@dataclass(frozen=True, kw_only=True)
class Option:
    """One cell of the tuner's table. `why`: "" or the reason why it is not available (then times are None)."""

    algorithm: str
    protocol: str
    time_us: float | None = None
    latency_us: float | None = None
    bandwidth_GBps: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm, "protocol": self.protocol, "time_us": self.time_us, "latency_us": self.latency_us,
            "bandwidth_GBps": self.bandwidth_GBps, "why": self.why,
        }  # fmt: skip


# ---- the fabric as NCCL sees it --------------------------------------------------------------------------------------------
def topology_of(fabric: Fabric, ranks: Sequence[str], *, arch: str | None = None, cpu: str = "intel") -> NcclTopology:
    """Nodes are the fabric's servers. Channels follow the graph search: the speed per channel that gives the most in all, fastest first.

    Raises: Unsupported (processors, or links between AMD GPUs, whose library has a model of its own; servers without a link out),
    UsageError (unknown `arch` or `cpu`).
    """
    if arch is not None and arch not in ARCHITECTURES:
        raise UsageError(f"no architecture {arch!r}", where="nccl", hint=f"one of {', '.join(ARCHITECTURES)}")
    if cpu not in ("intel", "amd", "other"):
        raise UsageError(f"cpu must be intel, amd or other, got {cpu!r}", where="nccl")
    devices = [fabric.device(name) for name in ranks]
    assumptions = [f"{cpu} processors" if cpu != "other" else "processors that are neither Intel nor AMD"]
    if any(d.kind != "gpu" for d in devices):
        raise Unsupported("NCCL runs on GPUs, some of these devices are processors", hint="use another strategy")
    kinds = {x.kind for x in fabric.links}
    if any(kind.startswith("XGMI") for kind in kinds):
        raise Unsupported("AMD GPUs run RCCL, which has a tuner of its own", hint="use another strategy")
    chosen = arch or _architecture(devices)
    if chosen is None:
        chosen = "ampere"
        assumptions.append("the GPUs state no figures that tell their architecture: Ampere assumed")
    servers: dict[str, list[str]] = {}
    for name, device in zip(ranks, devices, strict=True):
        servers.setdefault(device.group, []).append(name)
    sizes = {len(members) for members in servers.values()}
    if len(sizes) > 1:
        assumptions.append("servers hold different numbers of ranks: the model takes the mean")
    nvlink = all(_has_nvlink(fabric, name) for name in ranks) and max(sizes) > 1
    intra = min(_intra_GBps(fabric, members, chosen, nvlink) for members in servers.values())
    ports = [_ports(fabric, group) for group in servers] if len(servers) > 1 else []
    if any(not p for p in ports):
        group = next(g for g, p in zip(servers, ports, strict=True) if not p)
        raise Unsupported(f"server {group!r} has no link to the others", hint="name devices of one server, or another fabric")
    found = _search(chosen, intra, min(ports, key=sum) if ports else None, alone=max(sizes) == 1)
    assumptions.append("channels by the speeds that NCCL tries, not by its search over paths")
    close = all(x.kind not in ("PHB", "NODE", "SYS") for x in fabric.links)
    topology = NcclTopology(
        ranks=len(ranks), nodes=len(servers), arch=chosen, intra="nvlink" if nvlink or max(sizes) == 1 else "pci", cpu=cpu, close=close, ring=found
    )
    if _multicast(fabric, servers) and table.NVLS_CHANNELS[chosen] and max(sizes) > 1:
        channels = table.NVLS_CHANNELS[chosen]
        inter = sum(min(ports, key=sum)) / channels if ports else 0.0
        speeds = table.SPEEDS_INTRA[chosen]
        topology = replace(
            topology,
            nvls=Channels(count=channels, intra_GBps=_fitting(speeds, intra / channels), inter_GBps=_fitting(table.SPEEDS_INTER[chosen], inter)),
        )
    return replace(topology, assumptions=tuple(assumptions))


def _architecture(devices: Sequence[Device]) -> str | None:
    """By compute capability, else by peak rates per dtype; None when they do not tell. Mixed groups take the oldest, as NCCL does."""
    found: list[int] = []
    for d in devices:
        if d.sm:
            found.append(sum(d.sm >= least for least in table.LEAST_SM[1:]))
            continue
        half = max(d.flops.get("bf16", 0), d.flops.get("fp16", 0))
        if "fp8" in d.flops:
            found.append(3 if half > 1.5e15 else 2)
        elif "bf16" in d.flops:
            found.append(1)
        elif "fp16" in d.flops:
            found.append(0)
        else:
            return None
    return ARCHITECTURES[min(found)]


def _has_nvlink(fabric: Fabric, name: str) -> bool:
    return any(fabric.links[x].kind.startswith("NV") for x in fabric.out_links[fabric.actor_of[name]])


def _intra_GBps(fabric: Fabric, members: Sequence[str], arch: str, nvlink: bool) -> float:
    """What the weakest GPU of a server can send to the others, as NCCL counts it."""
    if len(members) == 1:
        return float("inf")
    out = []
    for name in members:
        links = [fabric.links[x] for x in fabric.out_links[fabric.actor_of[name]]]
        if nvlink:
            out.append(sum(x.rate_Bps for x in links if x.kind.startswith("NV")) * table.NVLINK_SHARE[arch])
        else:
            actor = fabric.actor_of[name]
            out.append(min(min(fabric.links[x].rate_Bps for x in fabric.route(actor, fabric.actor_of[m])) for m in members if m != name))
    return min(out) / 1e9


def _ports(fabric: Fabric, group: str) -> list[float]:
    """GB/s that every link out of the server can be fed with: its own rate, or what the route from the nearest GPU to it lets through."""
    gpus = [d.name for d in fabric.devices if d.group == group]
    inside = {*gpus} | {s.name for s in fabric.switches if s.group == group and group}
    leaving: dict[str, list[int]] = {}
    for x in fabric.links:
        if x.src in inside and x.dst not in inside:
            leaving.setdefault(x.src, []).append(x.rate_Bps)
    ports = []
    for src, rates in leaving.items():
        # Of the nearest GPU: from another one the route may lead out of the server and back in through the port itself.
        ways = [[fabric.links[x].rate_Bps for x in fabric.route(fabric.actor_of[g], fabric.actor_of[src])] for g in gpus]
        nearest = min(map(len, ways))
        fed = max(min(way, default=sum(rates)) for way in ways if len(way) == nearest)
        share = min(1.0, fed / sum(rates))  # the ports of one card share its way
        ports += [rate * share / 1e9 for rate in rates]
    return sorted(ports, reverse=True)


def _multicast(fabric: Fabric, servers: dict[str, list[str]]) -> bool:
    """Every server has a switch that multiplies and adds."""
    able = {s.name for s in fabric.switches if s.multicast and s.aggregate}
    return all(all(any(fabric.links[x].dst in able for x in fabric.out_links[fabric.actor_of[m]]) for m in members) for members in servers.values())


def _fitting(speeds: Sequence[float], limit: float) -> float:
    """The largest listed speed within the limit, or the limit itself when all are larger."""
    return next((s for s in speeds if s <= limit * (1 + 1e-9)), limit)


def _search(arch: str, intra: float, ports: Sequence[float] | None, *, alone: bool) -> Channels:
    """Channels x speed as large as possible, fewer and faster channels first; then doubled where NCCL doubles them."""
    speeds = table.SPEEDS_INTRA[arch] if ports is None else table.SPEEDS_INTER[arch]
    best = (0.0, 0, 0.0)
    for speed in speeds:
        inside = table.MAX_CHANNELS if alone else int(intra / speed + 1e-9)
        count = min(inside, table.MAX_CHANNELS, sum(int(p / speed + 1e-9) for p in ports) if ports is not None else table.MAX_CHANNELS)
        if count * speed > best[0] + 1e-9:
            best = (count * speed, count, speed)
    _, count, speed = best
    if not count:  # slower than anything NCCL tries: one channel at what there is
        count, speed = 1, min(intra, sum(ports) if ports is not None else intra)
    # NCCL makes two channels of a fast one (`ncclTopoDupChannels`); from Hopper on only where they are few or very fast.
    if speed >= 25 and not (arch in ("hopper", "blackwell") and speed < 50 and count > 4):
        doubled = min(2 * count, table.MAX_CHANNELS)
        # Twice the channels at half the speed.
        speed /= -(-doubled // count)
        count = doubled
    return Channels(count=count, intra_GBps=speed, inter_GBps=speed)


# ---- the tuner -------------------------------------------------------------------------------------------------------------
def _log2(value: int) -> int:
    return max(value, 1).bit_length() - 1


def _unavailable(t: NcclTopology, op: str, algorithm: str, protocol: str) -> str:
    """Why the tuner does not consider this cell; "" if it does."""
    allowed = {"all-reduce": ("tree", "ring", "nvls", "nvlstree"), "broadcast": ("ring",), "reduce": ("ring",)}.get(op, ("ring", "nvls", "pat"))
    if algorithm not in allowed:
        return f"no {op}"
    if algorithm in ("nvls", "nvlstree", "pat") and protocol != "Simple":
        return "Simple only"
    if algorithm in ("nvls", "nvlstree") and t.nvls is None:
        return "needs NVSwitches with multicast and Hopper or later"
    if algorithm == "nvls" and t.nodes > 1:
        return "between nodes it needs CollNet, which is off by default"
    if algorithm == "nvlstree" and t.nodes == 1:
        return "several nodes only"
    if algorithm == "pat" and t.nodes != t.ranks:
        return "one rank per node only"
    if protocol == "LL128" and not t.close:
        return "a NIC or GPU lies beyond the processor"
    if protocol == "LL128" and t.intra != "nvlink":
        return "needs NVLink inside the node"
    return ""


def _bus_GBps(t: NcclTopology, op: str, algorithm: str, protocol: str) -> float:
    ppn, scale = t.ranks / t.nodes, t.scale
    channels = t.ring
    # Up to two nodes the tuner counts a channel's speed inside the node, as NCCL's `nNodes <= 2` does.
    speed = channels.intra_GBps if t.nodes <= 2 else channels.inter_GBps
    if algorithm in ("nvls", "nvlstree"):
        assert t.nvls is not None
        channels = t.nvls
        inside = channels.intra_GBps * table.NVLS_EFFICIENCY[t.arch] * (channels.count - 1) / channels.count
        inside *= 2.0 if op == "all-reduce" else (ppn - 1) / ppn
        speed = inside
        if algorithm == "nvlstree":
            speed = min(inside, channels.inter_GBps * (2 if t.nodes <= 2 else 1), table.NVLS_TREE_LIMIT[t.arch][scale])
    bus = channels.count * speed
    ll_row = t.arch if t.nodes == 1 else "ampere" if t.cpu == "amd" else "volta"
    if algorithm == "ring" and protocol == "LL":
        bus = min(table.LL_LIMIT[ll_row][scale], bus * 0.5)
    if algorithm == "ring" and protocol == "LL128":
        bus = min(bus * 0.92, channels.count * table.LL128_RING[t.arch][scale])
    if algorithm == "tree":
        bus = min(bus * 0.92, channels.count * table.TREE_LIMIT[t.arch][scale])
        if protocol == "LL":
            bus = min(bus / 3.8, table.LL_LIMIT[ll_row][scale])
        if protocol == "LL128":
            bus = min(bus * (7 / 9 if t.nodes == 1 else 120 / 128), channels.count * table.LL128_TREE[t.arch][scale])
        if t.nodes > 1 and t.arch in ("hopper", "blackwell"):  # from Hopper on all of a node's traffic goes through one GPU of the tree
            bus *= 0.85
    return bus * 0.75 if algorithm == "pat" else bus


def _latency_us(t: NcclTopology, op: str, algorithm: str, protocol: str) -> float:
    p = PROTOCOLS.index(protocol)
    n, nodes, simple = t.ranks, t.nodes, protocol == "Simple"
    hardware = table.HARDWARE_LATENCY
    base, intra = table.BASE_LATENCY[algorithm][p], hardware[t.intra][algorithm][p]
    inter = hardware["net"]["tree" if n == nodes else algorithm][p] + t.net_latency_us * (2 if simple else 1)
    if algorithm == "ring" and op in ("broadcast", "reduce"):
        return base + (intra if nodes == 1 else hardware["net"]["ring"][p])
    if algorithm == "ring":
        steps = 2 * (n - 1) if op == "all-reduce" else n - 1
        # Of a ring's steps so many cross between nodes; the others stay inside.
        across = 0 if nodes == 1 else 2 * (nodes - 1) if op == "all-reduce" else nodes - 1
        post = (2.0 if t.cpu == "amd" else 1.0) * (3 if simple else 1) if nodes > 1 else 0.0
        return base + (steps - across) * max(intra, post) + across * inter
    if algorithm == "tree":
        return base + 2 * ((n // nodes - 1) * intra + _log2(nodes) * inter)
    if algorithm == "nvls":
        return intra + (inter if nodes > 1 else 0.0)
    if algorithm == "nvlstree":
        return base + intra + 2 * _log2(nodes) * inter
    return base + _log2(nodes) * inter / 3.5 + n * 2.8


def _cell(t: NcclTopology, op: str, size_bytes: int, algorithm: str, protocol: str) -> Option:
    why = _unavailable(t, op, algorithm, protocol)
    if why:
        return Option(algorithm=algorithm, protocol=protocol, why=why)
    n = t.ranks
    steps = {"all-reduce": 2 * (n - 1), "all-gather": n - 1, "reduce-scatter": n - 1}.get(op, n)
    bandwidth = _bus_GBps(t, op, algorithm, protocol)
    # From bus bandwidth to algorithm bandwidth: a ring moves steps / n of the message per rank.
    if algorithm == "ring" or (op == "all-reduce" and algorithm in ("nvls", "nvlstree")):
        bandwidth *= n / steps
    elif op == "all-reduce":
        bandwidth *= 0.5
    latency = _latency_us(t, op, algorithm, protocol)
    # The correction table has an entry per power of two from 64 bytes on.
    size_class = _log2(size_bytes >> 6) if size_bytes >= 64 else 0
    corrected = bandwidth
    if algorithm == "tree" and size_class < 23:
        corrected *= table.TREE_CORRECTION[protocol][size_class]
    if algorithm == "nvlstree" and size_class < 23 and t.arch == "blackwell" and t.cpu != "other":
        corrected *= table.TREE_CORRECTION[protocol][size_class]
    channels = max(t.ring.count, t.nvls.count if t.nvls else 0)
    if algorithm == "ring" and protocol == "Simple" and t.nodes > 1 and op == "all-reduce" and size_bytes // (channels * n) >= 64:
        latency *= 1.9 if t.arch == "volta" else 1.4
    time_us = latency + size_bytes / (1000 * corrected)
    return Option(algorithm=algorithm, protocol=protocol, time_us=time_us, latency_us=latency, bandwidth_GBps=corrected)


def parse_list(text: str | None, known: Sequence[str], what: str) -> tuple[str, ...]:
    """The names that a NCCL_ALGO or NCCL_PROTO value allows: `ring,tree`, `^LL128`; None = all. Raises: UsageError."""
    if text is None:
        return tuple(known)
    names = [x.strip().lower() for x in text.removeprefix("^").split(",")]
    unknown = [x for x in names if x not in {k.lower() for k in known}]
    if unknown:
        raise UsageError(f"no {what} {unknown[0]!r}", where="nccl", hint=f"one of {', '.join(known)}, or ^ to leave some out")
    listed = tuple(k for k in known if (k.lower() in names) != text.startswith("^"))
    if not listed:
        raise UsageError(f"{text!r} leaves no {what}", where="nccl")
    return listed


def predict(
    t: NcclTopology, op: str, size_bytes: int, *, algorithms: Sequence[str] = ALGORITHMS, protocols: Sequence[str] = PROTOCOLS
) -> list[Option]:
    """Every cell of the tuner's table, the chosen one first, those not available last. When the user's lists leave nothing, the ring stays.

    Raises: Unsupported for operations that NCCL does with sends and receives.
    """
    if op not in OPS:
        raise Unsupported(f"NCCL does {op} with grouped sends and receives; its tuner has no choice there", hint="use --strategy direct")
    cells = []
    for algorithm in ALGORITHMS:
        for protocol in PROTOCOLS:
            cell = _cell(t, op, size_bytes, algorithm, protocol)
            out = [name for name, listed in ((algorithm, algorithms), (protocol, protocols)) if name not in listed]
            cells.append(replace(cell, time_us=None, why=f"{out[0]} is switched off") if out and not cell.why else cell)
    if all(c.time_us is None for c in cells):
        cells = [_cell(t, op, size_bytes, c.algorithm, c.protocol) if c.algorithm == "ring" else c for c in cells]
    return sorted(cells, key=lambda c: (c.time_us is None, c.time_us or 0.0))


def choices(t: NcclTopology, op: str, sizes: Sequence[int], **more: Any) -> list[tuple[int, Option]]:
    """(size, chosen cell) per size."""
    return [(size, predict(t, op, size, **more)[0]) for size in sizes]


def changes(t: NcclTopology, op: str, size_bytes: int, **more: Any) -> list[str]:
    """What would change the choice: the nearest smaller and larger sizes with another one, and the runner-up's distance."""
    table_ = predict(t, op, size_bytes, **more)
    best = table_[0]

    def name(option: Option) -> str:
        return f"{option.algorithm}/{option.protocol}"

    found = []
    if len(table_) > 1 and table_[1].time_us is not None and best.time_us:
        found.append(f"{name(table_[1])} is {100 * (table_[1].time_us / best.time_us - 1):.1f} % slower in its model")
    for word, factor in (("below", 0.5), ("above", 2.0)):
        size = size_bytes
        while 4 <= size * factor <= 1 << 36:
            last, size = size, int(size * factor)
            other = predict(t, op, size, **more)[0]
            if name(other) != name(best):
                low, high = sorted((last, size))
                while high - low > max(1, low // 1000):
                    middle = (low + high) // 2
                    at_best = name(predict(t, op, middle, **more)[0]) == name(best)
                    low, high = (low, middle) if at_best == (word == "below") else (middle, high)
                border = high if word == "above" else low
                beyond = predict(t, op, border, **more)[0]
                found.append(f"{'from' if word == 'above' else 'up to'} {border} B it takes {name(beyond)}")
                break
    return found
