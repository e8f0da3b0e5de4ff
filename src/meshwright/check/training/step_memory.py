"""Step plans: every operand is there when it is read, as it was when the step was captured, and bytes and seconds are as claimed.

Every run of a node is an interval from its action to the action that lets its result go; a storage lives as long as the longest of the intervals
that lie in it. Bytes alive are the sum over storages, found by one sweep over starts and ends.
Cost: O(actions + operands), sorted once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...graph.step_graph import StepGraph, StepPlan
from ..verdict import Finding, Verdict

__all__ = ["check_step_plan"]

MAX_FINDINGS = 20  # findings of one step, of all kinds, after which the walk ends


@dataclass(eq=False)  # two allocations of one action may be of one size
class _Place:
    """One allocation: [start, end] in actions; `changed`: nodes that have changed it so far."""

    start: int
    size: int
    end: int = -1
    changed: list[int] = field(default_factory=list)


@dataclass
class _Run:
    """One run of a node: where its result lies, and when it went (-1: held to the end)."""

    node: int
    start: int
    places: dict[int, _Place]
    end: int = -1


def check_step_plan(graph: StepGraph, plan: StepPlan, *, split: int = -1) -> Verdict:
    """Findings name the node and the action. Facts, as recomputed: peak_bytes, peak_at, time_s; forward_bytes and backward_bytes, the most that
    either pass of the micro-batch that runs has made and not let go, with workspaces (fixed bytes and other micro-batches left out); split_bytes,
    by storage, what it has made and holds for action `split` and those after it."""
    walk = _Walk(graph, plan)
    if not walk.actions_exist():
        return Verdict(findings=tuple(walk.found))
    for i in range(len(plan.actions)):
        walk.action(i)
        if len(walk.found) >= MAX_FINDINGS:
            break
    walk.whole()
    facts = {} if walk.found else walk.figures() | ({} if split < 0 else {"split_bytes": walk.crossing(split)})
    return Verdict(findings=tuple(walk.found), facts=facts)


class _Walk:
    def __init__(self, graph: StepGraph, plan: StepPlan) -> None:
        self.graph, self.plan = graph, plan
        self.found: list[Finding] = []
        self.held: dict[int, _Run] = {}
        self.runs: list[_Run] = []
        self.count = [0] * len(graph.nodes)
        self.places: list[_Place] = []
        # What the step does not allocate has a place without bytes: it is counted once, as `fixed_bytes`.
        self.fixed = {s: _Place(0, 0) for s, x in enumerate(graph.storages) if x.kind != "made"}
        self.writers: dict[int, list[int]] = {}
        for i, n in enumerate(graph.nodes):
            for s in n.writes:
                self.writers.setdefault(s, []).append(i)
            if n.phase == "input":
                self.held[i] = _Run(i, -1, {s: self.fixed[s] for s in n.storages})
        self.drawn = -1

    def wrong(self, action: int, node: int, message: str) -> None:
        name = self.graph.nodes[node].name
        self.found.append(Finding(check="step", message=f"action {action} ({name}): {message}", witness={"action": action, "node": name}))

    def actions_exist(self) -> bool:
        nodes, plan = self.graph.nodes, self.plan
        if not 0 <= plan.boundary <= len(plan.actions):
            self.found.append(Finding(check="step", message=f"the backward part begins at action {plan.boundary} of {len(plan.actions)}"))
        for i, a in enumerate(plan.actions):
            if not 0 <= a.node < len(nodes) or not -1 <= a.alternative < len(nodes[a.node].alternatives):
                self.found.append(Finding(check="step", message=f"action {i} names node {a.node}, alternative {a.alternative}: there is none"))
            elif any(not 0 <= x < len(nodes) for x in a.drops):
                self.wrong(i, a.node, "drops a node that does not exist")
        return not self.found

    def action(self, i: int) -> None:
        a = self.plan.actions[i]
        node = self.graph.nodes[a.node]
        if node.phase == "input":
            return self.wrong(i, a.node, "is a placeholder: it is given, not run")
        if (node.phase == "backward") != (i >= self.plan.boundary) and node.phase == "backward":
            self.wrong(i, a.node, "is a backward node in the forward part")
        if a.node in self.held:
            return self.wrong(i, a.node, f"its result is still held from action {self.held[a.node].start}")
        self.count[a.node] += 1
        # In-place changes and gradients must happen once; running again would do them twice.
        if self.count[a.node] > 1 and (node.writes or node.phase == "backward"):
            self.wrong(i, a.node, "runs again, though it " + ("changes a tensor" if node.writes else "is a backward node"))
        if node.random and self.count[a.node] == 1:
            # First runs must draw in the captured order, or every later draw differs.
            if a.node < self.drawn:
                self.wrong(i, a.node, f"draws random numbers after {self.graph.nodes[self.drawn].name}, which draws after it in the step")
            self.drawn = max(self.drawn, a.node)
        inputs = node.inputs if a.alternative < 0 else node.alternatives[a.alternative].inputs
        missing = [x for x in inputs if x not in self.held]
        for x in missing:
            self.wrong(i, a.node, f"reads {self.graph.nodes[x].name}, which is not held")
        if missing:
            return None
        for x in inputs:
            self._unchanged(i, a.node, x)
        self._make(i, inputs)
        self._let_go(i)
        return None

    def _unchanged(self, i: int, reader: int, x: int) -> None:
        """The operand has seen exactly the changes that stand before its reader in the captured step."""
        for s, place in self.held[x].places.items():
            # Running again reads what was there then, not now: the changes since must be the same.
            if s in self.writers and sorted(place.changed) != [w for w in self.writers[s] if w < reader]:
                before = ", ".join(self.graph.nodes[w].name for w in place.changed) or "nothing"
                self.wrong(i, reader, f"reads {self.graph.nodes[x].name} after {before} changed it, which is not so in the captured step")

    def _make(self, i: int, inputs: tuple[int, ...]) -> None:
        a = self.plan.actions[i]
        node = self.graph.nodes[a.node]
        over = node.alternatives[a.alternative].over if a.alternative >= 0 else -1
        if over >= 0:
            self._write_over(i, over, inputs)
        places: dict[int, _Place] = {}
        for s in node.storages:
            if s in node.makes:
                # Writing over an operand takes no new place.
                reused = [p for t, p in self.held[over].places.items() if t not in self.fixed] if over in self.held else []
                places[s] = reused[0] if reused else _Place(i, self.graph.storages[s].size_bytes)
                if not reused:
                    self.places.append(places[s])
            elif s in self.fixed:
                places[s] = self.fixed[s]
            else:
                # A view lies where its base lies, in the run of the base that is held now.
                sources = [self.held[x].places[s] for x in inputs if s in self.held[x].places]
                if not sources:
                    return self.wrong(i, a.node, f"is a view of {self.graph.storages[s].owner}, of which it reads nothing")
                if any(p is not sources[0] for p in sources):
                    return self.wrong(i, a.node, f"reads {self.graph.storages[s].owner} from two runs of it")
                places[s] = sources[0]
        for s in node.writes:
            seen = [self.held[x].places[s] for x in inputs if s in self.held[x].places]
            if seen:
                seen[0].changed.append(a.node)
        if over >= 0:
            # What lay there is gone, under whatever name it was held.
            for x in [x for x, r in self.held.items() if any(p in (*places.values(),) for p in r.places.values())]:
                self._end(x, i)
        run = _Run(a.node, i, places)
        self.held[a.node] = run
        self.runs.append(run)
        return None

    def _write_over(self, i: int, over: int, inputs: tuple[int, ...]) -> None:
        node = self.graph.nodes[self.plan.actions[i].node]
        target = [s for s in self.graph.nodes[over].storages if s not in self.fixed]
        who = self.graph.nodes[over].name
        if over not in self.held or over not in inputs:
            return self.wrong(i, self.plan.actions[i].node, f"writes over {who}, which it does not read")
        if len(target) != 1 or len(node.makes) != 1:
            return self.wrong(i, self.plan.actions[i].node, f"writes over {who}, which is not one storage of the step's own")
        place = self.held[over].places[target[0]]
        if place.size < self.graph.storages[node.makes[0]].size_bytes:
            self.wrong(i, self.plan.actions[i].node, f"writes {self.graph.storages[node.makes[0]].size_bytes} B over {place.size} B of {who}")
        for x in self.graph.results:
            if x in self.held and place in self.held[x].places.values():
                self.wrong(i, self.plan.actions[i].node, f"writes over {self.graph.nodes[x].name}, a result of the step")
        return None

    def _end(self, x: int, i: int) -> None:
        self.held.pop(x).end = i

    def _let_go(self, i: int) -> None:
        a = self.plan.actions[i]
        gone = {r.node for r in self.runs if r.end == i} if a.alternative >= 0 else set()
        for x in a.drops:
            if x in self.held and self.graph.nodes[x].phase != "input":
                if x in self.graph.results:
                    self.wrong(i, a.node, f"drops {self.graph.nodes[x].name}, a result of the step")
                self._end(x, i)
            elif x not in gone:
                self.wrong(i, a.node, f"drops {self.graph.nodes[x].name}, which is not held")

    def whole(self) -> None:
        """What must hold of the step as a whole, if every action does."""
        if self.found:
            return
        nodes, plan = self.graph.nodes, self.plan
        forward = {r.node for r in self.runs if r.start < plan.boundary}
        for x in self.graph.results:
            if x not in self.held:
                self._never(nodes[x].name, "a result of the step, is never made")
            elif nodes[x].phase == "forward" and x not in forward:
                self._never(nodes[x].name, "a result of the forward pass, is made after it")
        for i, n in enumerate(nodes):
            if n.writes and not self.count[i]:
                self._never(n.name, "which changes a tensor, is never run")
        saved = {r.node for r in self.runs if r.start < plan.boundary and (r.end < 0 or r.end >= plan.boundary)}
        if saved != {*plan.saved}:
            odd = sorted(nodes[x].name for x in saved ^ {*plan.saved} if 0 <= x < len(nodes))
            message = f"the plan's saved results are not those held when backward begins: {', '.join(odd[:3])}"
            self.found.append(Finding(check="step", message=message))

    def _never(self, name: str, what: str) -> None:
        self.found.append(Finding(check="step", message=f"{name}, {what}", witness={"node": name}))

    def figures(self) -> dict[str, object]:
        plan, graph = self.plan, self.graph
        change = np.zeros(len(plan.actions) + 1, np.int64)
        for run in self.runs:
            end = len(plan.actions) if run.end < 0 else run.end
            for place in run.places.values():
                # A place lives as long as the last result that lies in it.
                place.end = max(place.end, end)
        for place in self.places:
            change[place.start] += place.size
            # Still there during the action that ends it: operands are freed after, not before.
            change[min(place.end + 1, len(plan.actions))] -= place.size
        # What crosses the boundary is held once more for every other micro-batch in flight.
        kept = sum(p.size for p in self.places if p.start < plan.boundary <= p.end)
        alive = np.cumsum(change)[:-1]
        ways = [graph.nodes[a.node] if a.alternative < 0 else graph.nodes[a.node].alternatives[a.alternative] for a in plan.actions]
        alive = alive + np.array([w.workspace_bytes for w in ways], np.int64)
        halves = {"forward_bytes": alive[: plan.boundary], "backward_bytes": alive[plan.boundary :]}
        passes = {name: int(part.max(initial=0)) for name, part in halves.items()}
        alive = alive + graph.fixed_bytes() + (graph.in_flight - 1) * kept
        time_s = math.fsum(w.time_s for w in ways)
        peak, at = (int(alive.max()), int(alive.argmax())) if len(alive) else (graph.fixed_bytes(), 0)
        self._claims(peak, at, alive, time_s)
        return {"peak_bytes": peak, "peak_at": at, "time_s": time_s, **passes}

    def crossing(self, split: int) -> dict[int, int]:
        """Bytes, by storage, of what is made before action `split` and lies in something that is read from it on."""
        latest: dict[int, _Run] = {}
        places: dict[int, tuple[int, _Place]] = {}
        for run in self.runs:
            a = self.plan.actions[run.start]
            way = self.graph.nodes[a.node]
            for x in way.inputs if a.alternative < 0 else way.alternatives[a.alternative].inputs:
                if run.start >= split and x in latest and latest[x].start < split:
                    places |= {id(p): (s, p) for s, p in latest[x].places.items()}
            latest[run.node] = run
        found: dict[int, int] = {}
        for s, p in places.values():
            found[s] = found.get(s, 0) + p.size
        return found

    def _claims(self, peak: int, at: int, alive: np.ndarray[tuple[int], np.dtype[np.int64]], time_s: float) -> None:
        plan = self.plan
        if plan.peak_bytes != peak:
            message = f"the peak is {peak} B in action {at}, the plan says {plan.peak_bytes} B"
            self.found.append(Finding(check="step", message=message, witness={"peak_bytes": peak, "action": at}))
        elif len(alive) and not (0 <= plan.peak_at < len(alive) and int(alive[plan.peak_at]) == peak):
            self.found.append(Finding(check="step", message=f"the peak is in action {at}, the plan says {plan.peak_at}"))
        if not math.isclose(plan.time_s, time_s, rel_tol=1e-6, abs_tol=1e-12):
            self.found.append(Finding(check="step", message=f"the actions take {time_s} s, the plan says {plan.time_s} s"))
        if plan.budget_bytes is not None and peak > plan.budget_bytes:
            message = f"the peak of {peak} B is above the budget of {plan.budget_bytes} B"
            self.found.append(Finding(check="step", message=message, witness={"peak_bytes": peak, "budget_bytes": plan.budget_bytes}))
        if plan.floor_s is not None and time_s < plan.floor_s * (1 - 1e-9):
            self.found.append(Finding(check="step", message=f"the actions take {time_s} s, less than the claimed floor {plan.floor_s} s"))
        if plan.least_bytes is not None and peak < plan.least_bytes:
            self.found.append(Finding(check="step", message=f"the peak of {peak} B is below the least there can be, {plan.least_bytes} B"))
