"""Transfers on links against the plain twin, which books every link as it goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_programs import Case, random_case

from effort import SHARE_OF_EXAMPLES, few
from meshwright.errors import Deadlock
from meshwright.simulate import compile_network, simulate_program
from meshwright.simulate.tables import link_tables, program_tables
from meshwright.testing.engine_twin import Twin
from meshwright.timeline import Timeline


class WatchedTwin(Twin):
    """Also keeps (link, start, end) of everything that passes one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[tuple[int, float, float]] = []
        self.began: dict[int, float] = {}

    def pass_link(self, c: int, hop: int, size: float, tail_before: float, key: Any, *, last: bool) -> float:
        route = self.channels[c].route
        start = max(self.now, self.links[route[hop]].free) if route else self.now
        tail = super().pass_link(c, hop, size, tail_before, key, last=last)
        if route:
            self.seen.append((route[hop], start, tail))
        return tail

    def begin_flow(self, c: int, size: float, released: Any) -> None:
        self.began[c] = self.now
        super().begin_flow(c, size, released)

    def release_fair(self, c: int) -> None:
        before = 0.0
        for link in self.channels[c].route:
            self.seen.append((link, self.began[c] + before, self.now + before))
            before += self.links[link].latency
        super().release_fair(c)


def simulated(case: Case, mode: str) -> Timeline | None:
    try:
        return simulate_program(
            case.program, case.fabric, case.placement, durations_s=case.durations_s, network=mode, transfers=True,  # type: ignore[arg-type]
        )  # fmt: skip
    except Deadlock:
        return None


def booked(case: Case, mode: str) -> tuple[list[tuple[int, float, float]], bool]:
    network = compile_network(case.program, case.fabric, case.placement, mode=mode)  # type: ignore[arg-type]
    t, _ = program_tables(case.program, case.durations_s, case.program.message_bytes(), case.program.channels.depth)
    twin = WatchedTwin(t, link_tables(network))
    twin.run()
    return sorted(twin.seen), bool(np.any(np.bincount(network.route_link, minlength=1) > 1))  # whether two channels pass one link


@pytest.mark.parametrize("mode", ["fair", "exclusive"])
def test_every_message_is_on_its_links_when_the_twin_says(mode: str) -> None:
    exact = 0
    for seed in range(few(400, share=SHARE_OF_EXAMPLES)):
        case = random_case(seed)
        case.fabric = replace(case.fabric, links=tuple(replace(x, burst_bytes=0) for x in case.fabric.links))
        found = simulated(case, mode)
        if found is None:
            continue
        t = found.transfers
        assert t is not None
        rows = sorted(zip(t.link.tolist(), t.start_s.tolist(), t.end_s.tolist(), strict=True))
        truth, shared = booked(case, mode)
        assert [r[0] for r in rows] == [r[0] for r in truth]
        assert all(start <= end for _, start, end in rows)
        if mode == "fair" or not shared:
            exact += len(rows) > 0
            assert rows == [pytest.approx(r, rel=1e-9, abs=1e-9) for r in truth], seed
        busy = np.bincount(t.link, weights=t.size_bytes / t.rate_Bps[t.link], minlength=len(t.links))
        assert {name: pytest.approx(float(busy[i])) for i, name in enumerate(t.links) if name in found.link_busy_s} == found.link_busy_s
    assert exact > few(25, share=SHARE_OF_EXAMPLES)


def test_transfers_only_where_asked() -> None:
    case = next(c for c in map(random_case, range(100)) if simulated(c, "fair") is not None)
    assert simulate_program(case.program, case.fabric, case.placement, durations_s=case.durations_s).transfers is None
    quick = simulate_program(case.program, case.fabric, case.placement, durations_s=case.durations_s, record=False, transfers=True)
    assert quick.transfers is None
