"""Which transfers to run at once so that a fabric can be inferred, and again until it stands.

Every host alone to the others (within the budget), every host to all others at once, all others to it at once, perfect matchings in both directions
(the circle method: every pair meets once, in few rounds; a set of nodes behind a trunk is separated by most of them), then, for every trunk that is
inferred, transfers that fill it. What comes out is judged on random traffic that was not used to find it; trials that it does not explain are run
again, and if they were no accident they are used to infer anew. O(n) trials of O(n) transfers beside the pairs alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ...errors import RunError, TimeLimit, UsageError
from ...kernels.stages import counted
from .build import Nodes, provenance_of
from .fair_share import F64, Trial
from .infer import MAX_ERROR_SHARE, UNFINISHED, Inferred, infer_fabric, nodes_of, verify
from .measurements import Measurements
from .rank_order import tournament

__all__ = ["MAX_CAMPAIGN_S", "Network", "probe_fabric"]

MAX_CAMPAIGN_S = 90.0  # of measuring, unless the caller says otherwise
MAX_ROUNDS = 4  # inferences, between which what is not explained is measured again
MAX_ALONE_SHARE = 0.3  # of that time, for pairs alone: the rest is for trials of many at once, which tell who shares what
RETRIAL_TIME_FACTOR = 4.0  # by which a trial that is run again lasts longer: TCP needs a while to fill a link that many share
MAX_RETRIALS = 12  # trials run again in a round, the worst explained ones
MAX_TRANSFERS_PER_HOST = 24  # from or to one host at once; with more, its processors are measured

Flow = tuple[int, int]


class Network(Protocol):
    """What a probe needs: endpoints, round trips, and transfers at once."""

    names: tuple[str, ...]
    host: tuple[str, ...]
    address: tuple[str, ...]
    idle: float

    @property
    def source(self) -> str:
        """How it measures, in words."""
        ...

    def round_trips(self) -> F64:
        """Low percentile between all pairs, seconds, symmetric."""
        ...

    def transfer(self, flows: Sequence[Flow], longer: float = 1.0) -> list[float]:
        """Run all transfers at once, `longer` times as long as usual; payload bytes/s of each. Raises: RunError."""
        ...


@dataclass
class _Campaign:
    network: Network
    budget_s: float
    tolerance: float
    seed: int
    say: Callable[[str], None]
    start_s: float = field(default_factory=time.monotonic)
    slowest_s: float = 0.0
    again: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        n = len(self.network.names)
        self.measured = Measurements(
            names=self.network.names, host=self.network.host, address=self.network.address, rtt_s=np.zeros((n, n)), trials=(), held_out=(),
            source=self.network.source,
        )  # fmt: skip
        self.nodes: Nodes = nodes_of(self.measured)
        self.n = len(self.nodes.hosts)

    # ---- trials -----------------------------------------------------------------------------------------------------
    def left_s(self) -> float:
        return self.start_s + self.budget_s - time.monotonic()

    def run(self, kind: str, flows: Sequence[Flow], longer: float = 1.0) -> Trial:
        begin = time.monotonic()
        rates = self.network.transfer(flows, longer)
        self.slowest_s = max(self.slowest_s, (time.monotonic() - begin) / longer)
        if len(rates) != len(flows):
            raise RunError(f"a trial of {len(flows)} transfers gave {len(rates)} rates", where=kind)
        return Trial(kind, tuple(flows), tuple(float(r) for r in rates))

    def between(self, pairs: Sequence[Flow]) -> list[Flow]:
        """Hosts to their first endpoints."""
        first = self.nodes.firsts
        return [(first[a], first[b]) for a, b in pairs]

    def base(self) -> list[Trial]:
        """What every inference needs."""
        n = self.n
        out: list[tuple[str, list[Flow]]] = []
        for v in range(n) if n > 2 else ():
            others = [u for u in range(n) if u != v]
            some = others
            if len(others) > MAX_TRANSFERS_PER_HOST:
                some = sorted(self.rng.choice(others, MAX_TRANSFERS_PER_HOST, replace=False).tolist())
            out.append(("fan-out", [(v, u) for u in some]))
            out.append(("fan-in", [(u, v) for u in some]))
        seats = self.rng.permutation(n).tolist()
        for pairs in tournament(n):
            out.append(("matching", [f for a, b in pairs for f in ((seats[a], seats[b]), (seats[b], seats[a]))]))
        for _ in range(n // 2 if n > 3 else 0):
            order = self.rng.permutation(n).tolist()
            out.append(("matching", [f for a, b in zip(order[::2], order[1::2], strict=False) for f in ((a, b), (b, a))]))
        return [self.run(kind, self.between(pairs)) for kind, pairs in self._affordable(out)]

    def _affordable(self, planned: list[tuple[str, list[Flow]]]) -> list[tuple[str, list[Flow]]]:
        if planned and len(planned) * self.slowest_s > self.left_s():
            text = f"a probe of {self.n} hosts needs about {len(planned) * self.slowest_s * 1.5 + self.budget_s - self.left_s():.0f} s"
            raise TimeLimit(f"{text}, the limit is {self.budget_s:g} s", hint="--budget, or probe one endpoint per rack first")
        return planned

    def alone(self) -> list[Trial]:
        """Pairs by themselves: a ring first, then all others in random order, as far as their share of the budget goes."""
        ring = [(v, (v + 1) % self.n) for v in range(self.n)] if self.n > 1 else []
        back = [(b, a) for a, b in ring if self.n > 2]
        rest = [(a, b) for a in range(self.n) for b in range(self.n) if a != b and (a, b) not in {*ring, *back}]
        rest = [rest[k] for k in self.rng.permutation(len(rest))]
        out: list[Trial] = []
        limit = self.budget_s * MAX_ALONE_SHARE
        for pair in counted((*ring, *back, *rest), "pairs by themselves"):
            if len(out) >= len(ring) and self.budget_s - self.left_s() > limit:
                self.say(f"{len(out)} of {self.n * (self.n - 1)} pairs measured by themselves; the budget is for transfers at once now")
                break
            out.append(self.run("alone", self.between([pair])))
        return out

    def on_hosts(self) -> list[Trial]:
        """Two endpoints of one host by themselves, and all endpoints of a host to others at once: do they share the host's port?"""
        out: list[Trial] = []
        for host in range(self.n):
            inside = self.nodes.members(host)
            if len(inside) < 2:
                continue
            out.append(self.run("same host", [(inside[0], inside[1])]))
            elsewhere = [i for i in range(len(self.nodes.node)) if self.nodes.node[i] != host]
            if elsewhere:
                there = [elsewhere[k % len(elsewhere)] for k in range(len(inside))]
                out.append(self.run("whole host out", list(zip(inside, there, strict=True))))
                out.append(self.run("whole host in", list(zip(there, inside, strict=True))))
        return out

    def filling(self, found: Inferred, done: set[tuple[int, ...]]) -> list[Trial]:
        """For every inferred trunk that was not filled on purpose yet: everyone behind it with someone beyond it, both ways."""
        out = []
        for trunk in found.trunks:
            hosts = sorted({self.nodes.node[i] for i in trunk.members})
            if tuple(hosts) in done:
                continue
            done.add(tuple(hosts))
            beyond = [int(v) for v in self.rng.permutation([v for v in range(self.n) if v not in hosts])]
            pairs = [(a, beyond[k % len(beyond)]) for k, a in enumerate(hosts)]
            out.append(self.run("trunk", self.between([*pairs, *((b, a) for a, b in pairs)])))
            near = [*hosts, beyond[0]]  # with one more, and (below) one less: is the set right?
            far = beyond[1:] or beyond
            out.append(self.run("trunk and one", self.between([(a, far[k % len(far)]) for k, a in enumerate(near) if a != far[k % len(far)]])))
            if len(hosts) > 1:
                fewer, other = hosts[1:], [*beyond, hosts[0]]
                out.append(self.run("trunk less one", self.between([(a, other[-1 - k % len(other)]) for k, a in enumerate(fewer)])))
        return out

    def unseen(self) -> list[Trial]:
        """Random traffic to judge by: everyone to someone; half of them permutations."""
        count = max(4, min(12, self.n // 2))
        out = []
        for k in range(count):
            if k % 2 == 0:
                order = self.rng.permutation(self.n).tolist()
                pairs = [(order[x], order[(x + 1) % self.n]) for x in range(self.n)]
            else:
                pairs = [(v, int(self.rng.choice([u for u in range(self.n) if u != v]))) for v in range(self.n)]
            out.append(self.run("random", self.between(list(dict.fromkeys(pairs)))))
        return out

    # ---- the course -------------------------------------------------------------------------------------------------
    def infer(self, name: str) -> Inferred:
        return infer_fabric(self.measured, name=name, tolerance=self.tolerance, time_limit_s=max(5.0, min(60.0, self.budget_s)))

    def repeat_unexplained(self, found: Inferred) -> bool:
        """Run trials again, longer, that are not explained; an accident is replaced by the run that is explained better. Whether any was replaced."""
        changed, trials = False, list(self.measured.trials)
        worst = sorted(range(len(trials)), key=lambda k: -found.checks[k].error)[:MAX_RETRIALS]
        for k in worst:
            check = found.checks[k]
            if check.error > self.tolerance and self.left_s() > 0:
                self.again += 1
                once_more = self.run(check.trial.kind, check.trial.flows, RETRIAL_TIME_FACTOR)
                one = replace(self.measured, trials=(once_more,), held_out=(False,))
                if verify(found.fabric, one)[0].error < check.error:
                    trials[k], changed = once_more, True
        self.measured = replace(self.measured, trials=tuple(trials))
        return changed

    def course(self, name: str) -> Inferred:
        self.measured = replace(self.measured, rtt_s=self.network.round_trips())
        first = [*self.on_hosts(), *self.alone()]
        base = self.base() if self.n > 1 else []
        self.measured = self.measured.with_trials([*first, *base], held_out=False)
        self.say(f"{len(self.measured.trials)} trials in {time.monotonic() - self.start_s:.0f} s; inferring")
        found, filled = self.infer(name), set[tuple[int, ...]]()
        for attempt in range(MAX_ROUNDS):
            if found.unexplained(self.tolerance) and self.repeat_unexplained(found):
                found = self.infer(name)
            more = self.filling(found, filled)
            if more:
                self.measured = self.measured.with_trials(more, held_out=False)
                found = self.infer(name)
            if self.n < 3:
                break
            if not any(self.measured.held_out):
                self.measured = self.measured.with_trials(self.unseen(), held_out=True)
                found = self.infer(name)
                if found.unexplained(self.tolerance) and self.repeat_unexplained(found):
                    found = self.infer(name)
            if found.stands(self.tolerance) or attempt == MAX_ROUNDS - 1 or self.left_s() <= 0:
                break
            self.say(f"{len(found.unexplained(self.tolerance))} trials are not explained yet; inferring anew with what was held out")
            self.measured = replace(self.measured, held_out=(False,) * len(self.measured.trials))
            found = self.infer(name)
        return found


def probe_fabric(
    network: Network, *, name: str = "probed", budget_s: float = MAX_CAMPAIGN_S, tolerance: float = MAX_ERROR_SHARE, seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Measurements, Inferred]:  # fmt: skip
    """Measure and infer. `say` hears about progress. What is not explained is in the result; see `fabric_infer.require_explained`.

    Raises: UsageError (fewer than two endpoints, a name twice, a tolerance out of range), TimeLimit (too many hosts for the budget), RunError.
    """
    if len(network.names) < 2 or len(set(network.names)) < len(network.names):
        raise UsageError("a probe needs at least two endpoints with names of their own", where="--probe", hint="name=host:port, several times")
    if not 0 < tolerance < 1:
        raise UsageError(f"must be between 0 and 1, got {tolerance:g}", where="tolerance", hint="0.1 is a tenth")
    if not budget_s > 0:
        raise UsageError(f"must be > 0 s, got {budget_s:g}", where="budget")
    campaign = _Campaign(network, budget_s, tolerance, seed, say)
    found = campaign.course(name)
    seconds = time.monotonic() - campaign.start_s
    again = f", {campaign.again} of them again" if campaign.again else ""
    source = f"{network.source}, {len(campaign.measured.trials)} trials{again} in {seconds:.0f} s"
    measured = replace(campaign.measured, seconds=seconds, idle=network.idle, source=source)
    if UNFINISHED in found.notes:  # the campaign leaves an inference less time than it may take
        return measured, infer_fabric(measured, name=name, tolerance=tolerance)
    return measured, replace(found, fabric=replace(found.fabric, provenance=provenance_of(measured)))
