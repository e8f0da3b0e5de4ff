"""The stages, devices and times that a pipeline bound's certificate states, and the steps that a device or a micro-batch cannot avoid."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ...bound import fraction_of

__all__ = ["Pipeline", "time_of"]


def time_of(text: Any) -> Fraction:
    value = fraction_of(str(text))
    if value < 0:
        raise ValueError(f"negative time {text}")
    return value


class Pipeline:
    """The stages, devices and times of a certificate. Raises: ValueError, KeyError where they do not fit together."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.stages, self.split = int(data["stages"]), bool(data["split"])
        self.placement = [[int(d) for d in row] for row in data["placement"]]
        self.many = [int(n) for n in data["microbatches"]]
        self.bytes = [int(x) for x in data["activation_bytes"]]
        kinds = ("F", "I", "W") if self.split else ("F", "B")
        self.seconds = {k: [[time_of(x) for x in row] for row in data["seconds"][k]] for k in kinds}
        self.up = [[time_of(x) for x in row] for row in data["up_s"]]
        self.down = [[time_of(x) for x in row] for row in data["down_s"]]
        tables: list[list[Any]] = [*self.seconds.values(), self.placement]
        shapes = [(t, self.stages) for t in tables]
        messages: list[list[Any]] = [self.up, self.down]
        shapes += [(t, self.stages - 1) for t in messages]
        odd = any(len(t) != len(self.many) or any(len(row) != n for row in t) for t, n in shapes)
        if odd or len(self.bytes) != self.stages or min(self.many) < 0:
            raise ValueError("its tables have not one row per copy and one figure per stage")
        if any(not 0 <= d < int(data["devices"]) for row in self.placement for d in row):
            raise ValueError("a stage is on no device")

    def way(self, copy: int) -> list[tuple[Fraction, Fraction]]:
        """(start, end) of a lone micro-batch's actions: F of all stages, then B (or I) from the last to the first, then the first's W."""
        back = self.seconds["I" if self.split else "B"][copy]
        out: list[tuple[Fraction, Fraction]] = []
        now = Fraction(0)
        for s in range(self.stages):
            out.append((now, now + self.seconds["F"][copy][s]))
            now = out[-1][1] + (self.up[copy][s] if s < self.stages - 1 else 0)
        # The backward way starts at the last stage, right after its forward.
        for s in reversed(range(self.stages)):
            out.append((now, now + back[s]))
            now = out[-1][1] + (self.down[copy][s - 1] if s else 0)
        out.append((now, now + (self.seconds["W"][copy][0] if self.split else 0)))
        return out

    def held(self, device: int) -> list[tuple[int, int]]:
        return [(c, s) for c, row in enumerate(self.placement) for s, d in enumerate(row) if d == device and self.many[c]]

    def head(self, copy: int, stage: int) -> Fraction:
        return self.way(copy)[stage][0]

    def tail(self, copy: int, stage: int) -> Fraction:
        way = self.way(copy)
        return way[-1][1] - way[2 * self.stages - 1 - stage][1]

    def entry(self, copy: int, stage: int) -> Fraction:
        way = self.way(copy)
        return way[-1][1] + (self.many[copy] - 1) * self.seconds["F"][copy][stage] if self.many[copy] else Fraction(0)

    def busy(self, device: int, *, weights: bool) -> Fraction:
        held = self.held(device)
        if not held:
            return Fraction(0)
        kinds = [k for k in self.seconds if k != "W" or weights]
        work = sum(self.many[c] * self.seconds[k][c][s] for c, s in held for k in kinds)
        tail = Fraction(0) if self.split and weights else min(self.tail(c, s) for c, s in held)
        return min(self.head(c, s) for c, s in held) + work + tail

    def idle(self, device: int, cap_bytes: int) -> Fraction:
        """All work of a device, and what it must idle: before its first B or I, after its last F, after its last B or I."""
        held = self.held(device)
        if not held or cap_bytes < 0:
            raise ValueError("no stage, or a cap below 0")
        ways = {(c, s): self.way(c) for c, s in held}
        back = 2 * self.stages - 1
        end = {x: ways[x][-1][1] for x in held}
        no_w = {x: Fraction(0) for x in held}
        f = {x: ways[x][x[1]][1] - ways[x][x[1]][0] for x in held}
        b = {x: ways[x][back - x[1]][1] - ways[x][back - x[1]][0] for x in held}
        w = {(c, s): self.seconds["W"][c][s] for c, s in held} if self.split else no_w
        work = sum(self.many[x[0]] * (f[x] + b[x] + w[x]) for x in held)
        head = min(ways[x][x[1]][0] for x in held)
        # until the first B or I there are forwards only, of as much as fits; after the last F (or B, I) only what fits is left to do
        start = max(head, min(ways[x][back - x[1]][0] for x in held) - self._fitting(f, cap_bytes))
        behind_b = max(Fraction(0), min(end[x] - ways[x][back - x[1]][1] for x in held) - self._fitting(w, cap_bytes))
        behind_f = min(end[x] - ways[x][x[1]][1] for x in held) - self._fitting({x: b[x] + w[x] for x in held}, cap_bytes)
        total = sum(self.many[c] * self.bytes[s] for c, s in held)
        if cap_bytes and total > cap_bytes:
            return work + start + max(behind_b, behind_f)
        return work + max(start + behind_b, head + behind_b, head + behind_f)

    def _fitting(self, seconds: Mapping[tuple[int, int], Fraction], cap_bytes: int) -> Fraction:
        """At least the most seconds that micro-batches within the cap add up to: any price of a byte bounds it (duality), the best is taken."""
        sizes = {self.bytes[s] for _, s in seconds}
        if not cap_bytes:
            return sum((self.many[c] * v for (c, _), v in seconds.items()), Fraction(0))
        cap = cap_bytes // max(sizes) * max(sizes) if len(sizes) == 1 and max(sizes) else cap_bytes
        prices = {Fraction(0), *(v / self.bytes[s] for (_, s), v in seconds.items() if self.bytes[s])}
        return min(p * cap + sum(self.many[c] * max(Fraction(0), v - p * self.bytes[s]) for (c, s), v in seconds.items()) for p in prices)

    def memory(self, device: int, cap_bytes: int) -> Fraction:
        held = self.held(device)
        if not held or cap_bytes <= 0:
            raise ValueError("no stage, or no cap")
        # Bytes x seconds that activations must be held at the least, over a cap, take at least their quotient in time.
        area = Fraction(0)
        for c, s in held:
            way = self.way(c)
            own_weight = self.seconds["W"][c][s] if self.split else Fraction(0)
            area += self.many[c] * self.bytes[s] * (way[2 * self.stages - 1 - s][1] - way[s][0] + own_weight)
        tail = Fraction(0) if self.split else min(self.tail(c, s) for c, s in held)
        return min(self.head(c, s) for c, s in held) + area / cap_bytes + tail
