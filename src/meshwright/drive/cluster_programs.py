"""How fast a gang is on the devices that it got: its plan's program, simulated there, beside the same program on the plan's own devices.

Jobs that name a plan are as fast as their profile says, times the plan's predicted time over the simulated time. Ranks take the job's GPUs in the
order of its parts. Two sets of GPUs with equal devices, joined by equal links in the same way, are simulated once: routes are compared link by link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..cluster.allocation import Parts
from ..cluster.queue import Queue
from ..cluster.servers import Servers
from ..errors import UsageError
from ..fabric.fabric import Fabric
from ..plan.plan import Plan
from .plans import read_plan, simulate_plan

__all__ = ["ProgramSpeeds"]

MAX_GPUS = 256  # of a job whose routes are compared, pair by pair


@dataclass(kw_only=True)
class ProgramSpeeds:
    """`fabric`: whose groups the servers are. `simulated`: how many simulations it took.

    Raises: UsageError for a plan of another number of GPUs than its job, or of more than can be compared; as `read_plan` does."""

    servers: Servers
    queue: Queue
    fabric: Fabric
    simulated: int = 0
    _plans: dict[str, tuple[Plan, float]] = field(default_factory=dict)
    _times: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for job in self.queue.jobs:
            if not job.plan:
                continue
            if job.plan not in self._plans:
                plan = read_plan(job.plan)
                own_s = plan.prediction.time_s if plan.prediction is not None else simulate_plan(plan, record=False).makespan_s
                self._plans[job.plan] = (plan, own_s)
            ranks = self._plans[job.plan][0].main.ranks
            if ranks != job.gpus or ranks > MAX_GPUS or len(self._plans[job.plan][0].placement) != ranks:
                raise UsageError(
                    f"job {job.name[:64]} has {job.gpus} GPUs, its plan is for {ranks} devices", where=job.plan,
                    hint=f"as many, at most {MAX_GPUS}, and no work in switches",
                )  # fmt: skip

    def factor(self, job: int, parts: Parts) -> float:
        """Predicted time over the time on these GPUs; 1 for a job without a plan."""
        name = self.queue.jobs[job].plan
        if not name:
            return 1.0
        gpus = [self.servers.servers[p.server].gpus[g] for p in parts for g in p.gpus]
        plan, own_s = self._plans[name]
        key = (name, *self._shape(gpus))
        if key not in self._times:
            self.simulated += 1
            self._times[key] = simulate_plan(plan, self.fabric, record=False, placement=tuple(gpus)).makespan_s
        return own_s / self._times[key]

    def times(self, read: Callable[[int, Parts], float]) -> Callable[[int, Parts], float]:
        """A speed by profile, times the factor."""
        return lambda job, parts: read(job, parts) * self.factor(job, parts)

    def _shape(self, gpus: list[str]) -> tuple[Any, ...]:
        """Equal for sets of GPUs on which a program takes as long: what each device is, and which links of which kind each route takes."""
        fabric, numbers = self.fabric, dict[int, int]()
        index = [fabric.actor_of[g] for g in gpus]
        found: list[Any] = []
        for i in index:
            d = fabric.devices[i]
            quota = (d.cpu_share, d.cpu_period_s, d.cpu_overrun_s, d.cpu_stretch, d.cpu_cores, tuple(sorted(d.cpu_speeds.items())))
            found.append((d.memory_bandwidth_Bps, tuple(sorted(d.flops.items())), *quota, d.sm))
        kinds: list[Any] = []
        for a in index:
            for b in index:
                if a == b:
                    continue
                for link in fabric.route(a, b) or ():
                    if link not in numbers:
                        numbers[link] = len(numbers)
                        kinds.append(dataclasses.replace(fabric.links[link], src="", dst="", kind=""))
                    found.append(numbers[link])
                found.append(-1)
        return (*found, *kinds)
