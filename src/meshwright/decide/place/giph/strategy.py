"""GiPH: a trained net chooses moves of one task to one device, on a graph of all choices that it reads anew after every move.

Cite: Hu et al., "GiPH: Generalizable Placement Learning for Adaptive Heterogeneous Computing", MLSys 2023, sections 4.1 to 4.4.
Left open by the paper: from where a search starts in use. Our answer: half from the given placement (else HEFT's), half from random ones.
Deviations: the order is planned too: of the best mapping both orders are judged, first come first served as in the search, and HEFT's with gaps.
No-ops and a second move of one task in a row stay masked for the whole search; the paper lets them be after as many steps as there are tasks.
Invariant: never longer than HEFT, in simulation (`links` shared) or as published (own). Nets know no sizes: one serves any graph and any devices.
Cost: per move one pass over tasks x devices x (degree + 1) edges, a millisecond for 30 tasks on 20 devices. Training: `train.fit_moves`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ....cite import Cite
from ....cost_models.moves import MoveNet
from ....errors import MissingExtra, Unsupported, UsageError
from ..judge import simulated_s
from ..lists import GIPH_CITE, Heft, in_order_of, listed, started, upward_ranks
from ..problem import Placement, PlaceProblem
from .episodes import Episodes, Move, random_start

__all__ = ["Giph"]

STEPS_PER_TASK = 2  # of a search (paper, section 5)
SEARCHES = 8  # side by side, unless the evaluations are given
MAX_PAIRS = 20_000  # of tasks and devices: a move of 1,000 tasks on 20 devices takes 0.1 s
MAX_MOVES = 200  # that are told


@dataclass(frozen=True, kw_only=True)
class Giph:
    """net: trained by `place fit`; evaluations: schedules looked at, 0: 16 for every task; start: heft (the given placement, else HEFT's, and random
    ones), or random (one search from a random one, as published); links: shared (messages share links as in the simulator), or own."""

    name: ClassVar[str] = "giph"
    cite: ClassVar[Cite] = GIPH_CITE
    aliases: ClassVar[tuple[str, ...]] = ()

    net: MoveNet | None = None
    evaluations: int = 0
    start: str = "heft"
    links: str = "shared"

    def plan(self, problem: PlaceProblem, *, rng: np.random.Generator) -> Placement:
        """Raises: Unsupported without a net or for too many pairs; MissingExtra without torch; UsageError for options that are none."""
        if self.evaluations < 0 or self.start not in ("heft", "random") or self.links not in ("shared", "own"):
            raise UsageError("evaluations must be >= 0, start heft or random, links shared or own", where="giph")
        if problem.objective != "makespan":
            raise Unsupported(f"its net learned to make schedules short, not {problem.objective} low", where="giph", hint="use --strategy search")
        if self.net is None:
            raise Unsupported("it needs a trained net", where="giph", hint="train one with `meshwright place fit`, and give it with --net FILE")
        if find_spec("torch") is None:
            raise MissingExtra("torch", extra="torch", needed_for="placement by a trained net")
        if problem.arrays.dur.size > MAX_PAIRS:
            n, m = problem.arrays.dur.shape
            raise Unsupported(f"{n} tasks on {m} devices are too many for moves one by one", where="giph", hint="use --strategy search")
        heft = Heft().plan(problem, rng=rng)
        given = started(problem)
        steps = self._steps(len(problem.graph.tasks))
        known = [] if self.start == "random" else [np.array((given or heft).on)] * -(-len(steps) // 2)
        episodes = Episodes([problem] * len(steps), [*known, *(random_start(problem, rng) for _ in steps[len(known) :])])
        on, moves = self._searched(episodes, steps, rng)
        ranks = in_order_of(problem, upward_ranks(problem)[0])
        found = [problem.placement(self, problem.by_start(_starts(problem, on)), on, evaluations=0)]
        found.append(problem.placement(self, *listed(problem, ranks, on), evaluations=0))
        finalists = [*found, *([given] if given is not None else []), heft]
        times = [p.makespan_s if self.links == "own" else simulated_s(problem, p) for p in finalists]
        best = int(np.argmin(times))
        looked = sum(steps) + len(steps) + len(finalists)
        notes = {"start_s": times[-1], "net": self.net.digest, "moves": _told(problem, moves) if best < len(found) else []}
        return problem.placement(self, finalists[best].sequence, finalists[best].on, evaluations=looked, notes=notes)

    def _steps(self, tasks: int) -> list[int]:
        """Moves of each search: `evaluations` in all, the start of each counted."""
        each = STEPS_PER_TASK * tasks
        if self.start == "random":
            return [max(1, self.evaluations - 1) if self.evaluations else each]
        budget = self.evaluations or SEARCHES * (each + 1)
        searches = max(1, min(SEARCHES, budget // (each + 1)))
        return [max(1, budget // searches - 1)] * searches

    def _searched(self, episodes: Episodes, steps: list[int], rng: np.random.Generator) -> tuple[NDArray[np.int64], list[Move]]:
        """The best mapping that any search saw, and the moves that led there."""
        import torch

        from .net import ScoringNet
        from .train import searched

        assert self.net is not None
        with torch.no_grad():
            searched(ScoringNet.of(self.net), episodes, steps, rng)
        best = min(episodes.searches, key=lambda s: s.best_s)
        return best.best_on, best.moves[: best.best_at]


def _starts(problem: PlaceProblem, on: NDArray[np.int64]) -> NDArray[np.float64]:
    from ....kernels.tasks import first_come

    start, end = np.empty(len(on)), np.empty(len(on))
    first_come(problem.edge_numbers, on, *problem.arrays, start, end)
    return start


def _told(problem: PlaceProblem, moves: list[Move]) -> list[dict[str, Any]]:
    """Moves of one search, in words, those that made the schedule shorter."""
    tasks, devices = problem.graph.tasks, problem.fabric.devices
    dur = problem.arrays.dur
    found = []
    for m in moves:
        if m.after_s >= m.before_s:
            continue
        longer = float(dur[m.task, m.to] - dur[m.task, m.source])
        why = ["was critical" if m.critical else "stood in the way of critical tasks"]
        why += [f"starts {abs(m.start_s):.3g} s {'earlier' if m.start_s < 0 else 'later'}"] if m.start_s else []
        why += [f"takes {abs(longer):.3g} s {'less' if longer < 0 else 'more'}"] if longer else []
        found.append({"task": tasks[m.task].name, "from": devices[m.source].name, "to": devices[m.to].name, "before_s": m.before_s,
                      "after_s": m.after_s, "why": ", ".join(why)})  # fmt: skip
    return found[:MAX_MOVES]
