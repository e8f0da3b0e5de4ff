"""The links of a lab that stands: what went over them, and changing them while programs run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..fabric.edit import find_part
from ..fabric.fabric import Fabric
from .commands import Command, batches, cut, mend, reshape
from .control import Control
from .scaling import burst_bytes
from .state import LabState, LinkState, read_state, write_state
from .wiring import End, Wiring

__all__ = ["LinkCount", "Links"]


@dataclass(frozen=True, kw_only=True)
class LinkCount:
    """What has left through one direction of a cable since the lab was built.

    `bytes` as the interface counts: payload and one header per super-packet; `wire_bytes` as the shaper counts: with the headers of
    every packet; `drops` packets refused by the shaper (its queue was full, or the link is cut).
    """

    bytes: int
    packets: int
    wire_bytes: int
    drops: int

    def __sub__(self, before: LinkCount) -> LinkCount:
        return LinkCount(
            bytes=self.bytes - before.bytes, packets=self.packets - before.packets, wire_bytes=self.wire_bytes - before.wire_bytes,
            drops=self.drops - before.drops,
        )  # fmt: skip


class Links:
    """The part of a `Lab` that is about its links."""

    folder: Path
    state: LabState
    fabric: Fabric
    wiring: Wiring
    control: Control
    _changing: threading.Lock

    def link_name(self, index: int) -> str:
        """`src->dst`, with `#k` for the k-th of parallel links (from 1) after the first."""
        link = self.fabric.links[index]
        before = sum((x.src, x.dst) == (link.src, link.dst) for x in self.fabric.links[:index])
        return f"{link.src}->{link.dst}" + (f"#{before + 1}" if before else "")

    def counters(self) -> dict[str, LinkCount]:
        """Bytes that left over every link since the lab was built. Raises: RunError."""
        names = [x for x in self.wiring.namespaces if x]
        outputs = self.control.read([[t, "-n", n, "-j", "-s", *what] for n in names for t, what in (("ip", ["link"]), ("tc", ["qdisc"]))])
        found: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        for at, namespace in enumerate(names):
            interfaces = {x["ifname"]: x["stats64"]["tx"] for x in json.loads(outputs[2 * at])}
            for qdisc in json.loads(outputs[2 * at + 1]):
                if qdisc.get("root"):
                    found[namespace, qdisc["dev"]] = (interfaces[qdisc["dev"]], qdisc)
        counts = {}
        for index in range(len(self.fabric.links)):
            end = self.wiring.exit_of[index][1]
            sent, shaper = found[self.wiring.namespaces[end.actor], end.interface]
            counts[self.link_name(index)] = LinkCount(
                bytes=sent["bytes"], packets=sent["packets"], wire_bytes=shaper["bytes"], drops=shaper["drops"]
            )  # fmt: skip
        return counts

    def links_named(self, name: str) -> list[int]:
        """Links that a name stands for: `a->b`, `a<->b`, `a->b#2`, or a device or switch with all its links. Raises: UnknownName."""
        exact = [i for i in range(len(self.fabric.links)) if self.link_name(i) == name and "#" in name]
        return exact or sorted(find_part(self.fabric, name).links)

    def set_rate(self, link: str, rate_Bps: int) -> None:
        """Another rate, live, with a bucket to match. Raises: UnknownName, UsageError, RunError."""
        if rate_Bps < 1:
            raise UsageError(f"must be at least 1 B/s, got {rate_Bps}", where=link, hint="`cut` lets nothing through")

        def slow(end: End, state: LinkState) -> list[Command]:
            state.rate_Bps, state.burst_bytes = rate_Bps, burst_bytes(rate_Bps)
            return list(reshape(self.wiring, end, rate_Bps, state.burst_bytes, is_cut=state.cut))

        self._change(link, slow)

    def cut(self, link: str) -> None:
        """Let nothing through any more, silently. Raises: UnknownName, RunError."""

        def silence(end: End, state: LinkState) -> list[Command]:
            if state.cut:
                return []
            state.cut = True
            return [cut(self.wiring, end)]

        self._change(link, silence)

    def restore(self, link: str) -> None:
        """Undo `cut` and `set_rate`. Raises: UnknownName, RunError."""

        def undo(end: End, state: LinkState) -> list[Command]:
            assert end.link is not None
            link = self.fabric.links[end.link]
            state.rate_Bps, state.burst_bytes = link.rate_Bps, link.burst_bytes
            commands = list(reshape(self.wiring, end, link.rate_Bps, link.burst_bytes, is_cut=state.cut))
            if state.cut:
                commands += mend(self.wiring, end, link.rate_Bps, link.burst_bytes)
            state.cut = False
            return commands

        self._change(link, undo)

    def _change(self, name: str, change: Callable[[End, LinkState], list[Command]]) -> None:
        indices = self.links_named(name)
        with self._changing:
            self.state.links = read_state(self.folder).links  # another process may have changed some
            commands = [c for i in indices for c in change(self.wiring.exit_of[i][1], self.state.links[i])]
            self.control.do(list(batches(commands)))
            write_state(self.folder, self.state)
