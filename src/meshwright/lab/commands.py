"""The commands that build a lab, in order: what `--dry-run` prints and what the holder runs.

They are meant for a process that is alone in new mount, network and PID namespaces (`PREAMBLE`), so that no name, address or
setting of the machine is touched and everything disappears with that process. Shapers: one token bucket per direction, at the
end through which it leaves. `handle 1:` is the bucket; its queue (`parent 1:1`) is exchanged to cut a link.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from .impair import UNIMPAIRED
from .routes import FIRST_ROUTE_TABLE, Routes
from .wiring import Cable, End, Wiring

__all__ = ["PREAMBLE", "Command", "batches", "build", "cut", "limit_bytes", "mend", "relays", "reshape", "shape", "shell_text"]

QUEUE_S = 0.2  # of its link's rate that a shaper queues before it drops
MIN_QUEUE_BYTES = 64 * 1024  # of a queue, so that a slow link still holds a whole segment
PASS_ALL = "30gbit"
# Namespaces inherit the machine's. BBR's model of a path stands still for 0.2 s at times and loses its way where messages come in bursts; reno, which
# every kernel has, does nothing of its own while no packet is lost, like the networks to be rehearsed.
TCP_SETTINGS = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")

PREAMBLE = (
    "unshare --mount --net --pid --uts --fork --kill-child --mount-proc --propagation slave bash   # all below is typed inside",
    "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns",
)


@dataclass(frozen=True)
class Command:
    """One line for `ip`, `tc` or `sysctl`, in a namespace or ("" ) in the lab's own."""

    tool: str
    namespace: str
    words: tuple[str, ...]

    def shell(self) -> str:
        text = shlex.join(self.words)
        if self.tool == "sysctl":
            return f"ip netns exec {self.namespace} sysctl -qw {text}"
        return f"{self.tool} -n {self.namespace} {text}" if self.namespace else f"{self.tool} {text}"


def _command(tool: str, namespace: str, text: str) -> Command:
    return Command(tool, namespace, tuple(text.split()))


def build(wiring: Wiring, routes: Routes | None, *, ipv6: bool = True) -> list[Command]:
    """All commands. `routes` is needed when the wiring is routed; `ipv6` says whether the kernel speaks it (it is kept silent)."""
    made = [_command("ip", "", f"netns add {name}") for name in wiring.namespaces if name]
    for cable in wiring.cables:
        made += _cable(wiring, cable)
    for actor, name in enumerate(wiring.namespaces):
        if name:
            made += _namespace(wiring, actor, name, ipv6)
    if routes is not None:
        made += _routing(wiring, routes)
    for actor in range(len(wiring.namespaces)):  # by namespace, so that one batch shapes all its ends
        for cable in wiring.cables_of[actor]:
            made += shape(wiring, cable.end_of(actor))
    return made


def _cable(wiring: Wiring, cable: Cable) -> Iterator[Command]:
    a, b = cable.ends
    if not cable.relayed:
        near = f"name {a.interface} netns {wiring.namespaces[a.actor]} address {a.mac} mtu {wiring.mtu}"
        far = f"name {b.interface} netns {wiring.namespaces[b.actor]} address {b.mac} mtu {wiring.mtu}"
        yield _command("ip", "", f"link add {near} type veth peer {far}")
        return
    for end in cable.ends:
        yield _command("ip", wiring.namespaces[end.actor], f"tuntap add dev {end.interface} mode tap vnet_hdr")
        yield _command("ip", wiring.namespaces[end.actor], f"link set {end.interface} address {end.mac} mtu {wiring.mtu}")


def relays(wiring: Wiring, seed: int = 0) -> list[list[str]]:
    """The processes that carry relayed cables, as commands; none if there is no such cable."""
    jobs = [
        {
            "ends": [[wiring.namespaces[end.actor], end.interface] for end in cable.ends],
            "delay_s": [end.impairment.delay_s for end in cable.ends],
            "loss": [end.impairment.loss for end in cable.ends],
            "seed": seed,
        }
        for cable in wiring.cables
        if cable.relayed
    ]
    return [[sys.executable, "-m", "meshwright.lab.relay", json.dumps(jobs)]] if jobs else []


def _namespace(wiring: Wiring, actor: int, name: str, ipv6: bool) -> Iterator[Command]:
    device = actor < len(wiring.fabric.devices)
    if device:  # settings first and together: a batch is one process
        for setting in TCP_SETTINGS:
            yield _command("sysctl", name, setting)
    if wiring.style == "routed":
        interfaces = [cable.end_of(actor).interface.replace(".", "/") for cable in wiring.cables_of[actor]]
        yield _command("sysctl", name, "net.ipv4.ip_forward=1")
        for interface in ("all", "default", *interfaces):
            yield _command("sysctl", name, f"net.ipv4.conf.{interface}.rp_filter=0")
    yield _command("ip", name, "link set lo up")
    if wiring.style == "bridged" and not device:
        number = actor - len(wiring.fabric.devices)
        yield _command("ip", name, f"link add br0 address 02:4e:00:00:{number >> 8:02x}:{number & 255:02x} mtu {wiring.mtu} type bridge")
        yield from _set_up(name, "br0", ipv6)
        yield _command("ip", name, f"addr add {wiring.address(actor)}/15 dev br0")
    elif wiring.style == "routed" and device:  # "dummy" is not in every kernel, "bridge" is where this tool can be used at all
        yield _command("ip", name, f"link add id0 mtu {wiring.mtu} type bridge")
        yield from _set_up(name, "id0", ipv6)
        yield _command("ip", name, f"addr add {wiring.address(actor)}/32 dev id0")
    for cable in wiring.cables_of[actor]:
        end, far = cable.end_of(actor), cable.other(actor)
        if device:
            yield _command("ip", name, f"link set {end.interface} gso_max_size {end.segment_bytes}")
        yield from _set_up(name, end.interface, ipv6)
        if wiring.style == "routed":
            yield _command("ip", name, f"addr add {end.address}/30 dev {end.interface}")
            yield _command("ip", name, f"neigh add {far.address} lladdr {far.mac} dev {end.interface} nud permanent")
        elif device:
            yield _command("ip", name, f"addr add {wiring.address(actor)}/15 dev {end.interface}")
            for other in range(len(wiring.fabric.devices)):
                if other != actor:
                    mac = wiring.cables_of[other][0].end_of(other).mac
                    yield _command("ip", name, f"neigh add {wiring.address(other)} lladdr {mac} dev {end.interface} nud permanent")
        else:
            yield _command("ip", name, f"link set {end.interface} master br0")


def _set_up(name: str, interface: str, ipv6: bool) -> Iterator[Command]:
    if ipv6:  # before the interface is up, or it has an address and speaks
        yield _command("ip", name, f"link set {interface} addrgenmode none")
    yield _command("ip", name, f"link set {interface} up")


def _routing(wiring: Wiring, routes: Routes) -> Iterator[Command]:
    devices = len(wiring.fabric.devices)

    def route(actor: int, dst: int, link: int) -> str:
        cable, end = wiring.exit_of[link]
        source = f" src {wiring.address(actor)}" if actor < devices else ""
        return f"route add {wiring.address(dst)}/32 via {cable.other(actor).address} dev {end.interface}{source}"

    for hop in routes.main:
        yield _command("ip", wiring.namespaces[hop.actor], route(hop.actor, hop.dst, hop.link))
    tables: dict[tuple[int, int, int], int] = {}
    used: dict[int, int] = {}
    for hop in routes.special:
        name, key = wiring.namespaces[hop.actor], (hop.actor, hop.dst, hop.link)
        if key not in tables:
            tables[key] = FIRST_ROUTE_TABLE + used.get(hop.actor, 0)
            used[hop.actor] = used.get(hop.actor, 0) + 1
            yield _command("ip", name, f"{route(hop.actor, hop.dst, hop.link)} table {tables[key]}")
        assert hop.src is not None
        yield _command("ip", name, f"rule add from {wiring.address(hop.src)} to {wiring.address(hop.dst)} lookup {tables[key]}")


# ---- shapers -----------------------------------------------------------------------------------------------------------
def limit_bytes(rate_Bps: int, burst_bytes: int) -> int:
    """What a shaper queues before it drops: 0.2 s, beyond its bucket."""
    return burst_bytes + max(MIN_QUEUE_BYTES, int(rate_Bps * QUEUE_S))


def _bucket(rate_Bps: int, burst_bytes: int) -> str:
    # "bps" is bytes per second in tc
    return f"tbf rate {rate_Bps}bps burst {burst_bytes}b limit {limit_bytes(rate_Bps, burst_bytes)}b"


def shape(wiring: Wiring, end: End) -> Iterator[Command]:
    """The token bucket of one direction; a direction that does not exist passes nothing."""
    name = wiring.namespaces[end.actor]
    if end.link is None:
        yield _command("tc", name, f"qdisc add dev {end.interface} root blackhole")
        return
    link = wiring.fabric.links[end.link]
    yield _command("tc", name, f"qdisc add dev {end.interface} root handle 1: {_bucket(link.rate_Bps, link.burst_bytes)}")
    if wiring.acks_first or (wiring.method == "netem" and end.impairment != UNIMPAIRED):
        yield from _queue(wiring, end, link.rate_Bps, link.burst_bytes)


def _queue(wiring: Wiring, end: End, rate_Bps: int, burst_bytes: int) -> Iterator[Command]:
    """What waits for the bucket: netem where packets are late or lost, else two queues, TCP's pure acknowledgements before everything else.

    Without that, the acknowledgements of one direction wait behind the data of the other, which costs full-duplex transfers up to 30 %:
    an artefact of TCP over deep queues that the networks to be rehearsed (InfiniBand, NVLink) do not have.
    """
    name, at = wiring.namespaces[end.actor], f"dev {end.interface}"
    if wiring.method == "netem" and end.impairment != UNIMPAIRED:
        yield _command("tc", name, f"qdisc replace {at} parent 1:1 handle 2: {_netem(wiring, end, rate_Bps, burst_bytes)}")
        return
    limit = limit_bytes(rate_Bps, burst_bytes)
    if not wiring.acks_first:
        yield _command("tc", name, f"qdisc replace {at} parent 1:1 handle 2: bfifo limit {limit}")
        return
    yield _command("tc", name, f"qdisc replace {at} parent 1:1 handle 2: htb default 2")
    for number in (1, 2):  # rates that never limit: only the priorities matter
        rank = f"rate {PASS_ALL} burst 1mb cburst 1mb quantum 60000 prio {number - 1}"
        yield _command("tc", name, f"class add {at} parent 2: classid 2:{number} htb {rank}")
        yield _command("tc", name, f"qdisc add {at} parent 2:{number} handle 2{number}: bfifo limit {limit}")
    # TCP, 52 bytes in all (no data, time stamps), flags ACK alone
    pure = "match u8 0x06 0xff at 9 match u16 0x0034 0xffff at 2 match u8 0x10 0xff at 33"
    yield _command("tc", name, f"filter add {at} parent 2: protocol ip prio 1 u32 {pure} flowid 2:1")


def _netem(wiring: Wiring, end: End, rate_Bps: int, burst_bytes: int) -> str:
    # netem's queue is counted in packets and must also hold what is under way
    packets = 1000 + 2 * int(limit_bytes(rate_Bps, burst_bytes) + rate_Bps * end.impairment.delay_s) // wiring.mtu
    delay = f" delay {end.impairment.delay_s * 1e6:.0f}us" if end.impairment.delay_s else ""
    loss = f" loss {end.impairment.loss:.6%}" if end.impairment.loss else ""
    return f"netem{delay}{loss} limit {packets}"


def reshape(wiring: Wiring, end: End, rate_Bps: int, burst_bytes: int, *, is_cut: bool = False) -> Iterator[Command]:
    """Another rate, live; what is queued stays queued, counters go on."""
    name, limit = wiring.namespaces[end.actor], limit_bytes(rate_Bps, burst_bytes)
    yield _command("tc", name, f"qdisc change dev {end.interface} root handle 1: {_bucket(rate_Bps, burst_bytes)}")
    if wiring.acks_first and not is_cut and not (wiring.method == "netem" and end.impairment != UNIMPAIRED):
        for number in (1, 2):
            yield _command("tc", name, f"qdisc change dev {end.interface} parent 2:{number} handle 2{number}: bfifo limit {limit}")


def cut(wiring: Wiring, end: End) -> Command:
    """Nothing leaves through this end any more, silently, and what was queued is lost."""
    return _command("tc", wiring.namespaces[end.actor], f"qdisc replace dev {end.interface} parent 1:1 handle 3: blackhole")


def mend(wiring: Wiring, end: End, rate_Bps: int, burst_bytes: int) -> Iterator[Command]:
    """Undo `cut`."""
    return _queue(wiring, end, rate_Bps, burst_bytes)


# ---- how they are run --------------------------------------------------------------------------------------------------
def batches(commands: Iterable[Command]) -> Iterator[tuple[str, str, list[tuple[str, ...]]]]:
    """Runs of neighbours for one tool in one namespace: (tool, namespace, lines)."""
    for (tool, namespace), run in groupby(commands, key=lambda c: (c.tool, c.namespace)):
        yield tool, namespace, [c.words for c in run]


def shell_text(commands: Iterable[Command], helpers: Iterable[Sequence[str]] = ()) -> str:
    """What a person can paste into a root shell."""
    return "\n".join([*PREAMBLE, *(c.shell() for c in commands), *(f"{shlex.join(argv)} &" for argv in helpers)])
