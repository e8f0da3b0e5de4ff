"""A network of agents as a probe sees it: round trips of all pairs, and transfers that run at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...errors import RunError
from .fair_share import F64
from .rank_order import LOW_PERCENTILE, Endpoint, order_agent, tournament

__all__ = ["AgentNetwork"]

WARM_S, WINDOW_S = 0.2, 0.3  # of a transfer: until it counts, and while it counts
TAIL_S = 0.08  # that a transfer goes on after its window: those that began a little later still have their rivals
MIN_ROUND_TRIPS = 20  # that a window, and a warm-up, last: TCP opens its window by round trips
ECHOES = 40  # round trips of each pair
BUFFER_BYTES = 192 << 10  # below what Linux grants anyone
WINDOW_FACTOR = 4  # bytes under way over those of the fastest rate in the longest round trip: with fewer, buffers would be the limit


class AgentNetwork:
    """Agents that run (`python -m meshwright.probe.fabric.rank_order_agent`), and their token. Implements `fabric_campaign.Network`.

    warm_s, window_s: of each transfer; longer where round trips are long. one_host: all agents are on one machine, whatever they are called.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], token: str, *, echoes: int = ECHOES, warm_s: float = WARM_S, window_s: float = WINDOW_S,
        limit_s: float = 60.0, one_host: bool = False,
    ) -> None:  # fmt: skip
        self.endpoints, self.token, self.echoes, self.limit_s = tuple(endpoints), token, echoes, limit_s
        self.names = tuple(e.name for e in endpoints)
        self.host = tuple("local" if one_host else e.host or e.name for e in endpoints)
        self.address = tuple(e.address for e in endpoints)
        self.warm_s, self.window_s, self.tail_s = warm_s, window_s, TAIL_S
        self.idle, self.longest_rtt_s, self.fastest_Bps = 1.0, 0.0, 0.0

    @property
    def source(self) -> str:
        return f"{len(self.endpoints)} agents, {self.echoes} echoes a pair, {self.window_s:g} s a transfer"

    def round_trips(self) -> F64:
        n = len(self.endpoints)
        rtt = np.zeros((n, n))

        def way(i: int, j: int) -> None:
            to = self.endpoints[j]
            order = {"do": "probe", "host": to.address, "port": to.port, "echoes": self.echoes, "bursts": 0, "burst_bytes": 1}
            found = order_agent(self.endpoints[i], self.token, order, self.limit_s)
            if "error" in found:
                raise self._unreachable(i, j, str(found["error"]))
            rtt[i, j] = rtt[j, i] = float(np.percentile(found["rtt_s"], LOW_PERCENTILE))

        with ThreadPoolExecutor(max_workers=max(1, n // 2)) as pool:
            for pairs in tournament(n):
                for done in [pool.submit(way, i, j) for i, j in pairs]:
                    done.result()
        self.longest_rtt_s = float(rtt.max())
        longest = MIN_ROUND_TRIPS * self.longest_rtt_s
        self.warm_s, self.window_s = max(self.warm_s, longest), max(self.window_s, longest)
        return rtt

    def transfer(self, flows: Sequence[tuple[int, int]], longer: float = 1.0) -> list[float]:
        facts = {"warm_s": self.warm_s * longer, "window_s": self.window_s * longer, "buffer_bytes": self._buffer_bytes(), "tail_s": self.tail_s}

        def one(flow: tuple[int, int]) -> float:
            i, j = flow
            to = self.endpoints[j]
            found = order_agent(self.endpoints[i], self.token, {"do": "flow", "host": to.address, "port": to.port, **facts}, self.limit_s)
            if "error" in found:
                raise self._unreachable(i, j, str(found["error"]))
            self.idle = min(self.idle, float(found["idle"]))
            rate = float(found["bytes"]) / float(found["seconds"])
            self.fastest_Bps = max(self.fastest_Bps, rate)
            return rate

        with ThreadPoolExecutor(max_workers=len(flows)) as pool:
            return list(pool.map(one, flows))

    def _buffer_bytes(self) -> int:
        """Transfers that each have little under way share a full link evenly and overflow no queue; 0 where the network holds more than that."""
        needed = WINDOW_FACTOR * self.longest_rtt_s * self.fastest_Bps
        return BUFFER_BYTES if 0 < needed <= BUFFER_BYTES else 0

    def _unreachable(self, i: int, j: int, why: str) -> RunError:
        hint = "is the agent running there, and the port open for UDP and TCP?"
        return RunError(f"{self.names[i]} cannot reach {self.names[j]} at {why}", hint=hint, data={"src": self.names[i], "dst": self.names[j]})
