"""Fault schedules for the twin: programs of many kinds, a fault at any step of any rank, and what must become of it.

Two collectives follow each other, so that a fault at the end of the first is found in the second. The invariants: no hang; a rank that finishes has
the right result; ranks that fail all raise the same error, which names what was planted, within the deadline and the grace.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from virtual_ranks import calls, inputs, wanted

from meshwright.cost import Transport
from meshwright.decide.collective import NAMES, CollectiveProblem
from meshwright.errors import MeshwrightError
from meshwright.io.fabric.name import load_fabric
from meshwright.program.hash import program_hash
from meshwright.run.group.call import Session
from meshwright.run.group.rank_code import compile_rank, form_of
from meshwright.testing.group_twin import Fault, Outcome, VirtualCall, VirtualWorld

TIMEOUT_S, GRACE_S, COLLECTIVES = 1.0, 0.25, 2
ROOTED = ("broadcast", "reduce", "scatter", "gather")
KINDS = ("kill", "freeze", "pause", "cut", "slow", "corrupt", "exception", "exit", "late", "plan", "diverge", "skip")
EXPECTED = {
    "kill": "rank-died", "freeze": "rank-frozen", "pause": "rank-frozen", "cut": "link-lost", "slow": "link-slow", "corrupt": "message-damaged",
    "exception": "rank-failed", "exit": "rank-died", "late": "run-timeout", "plan": "plan-mismatch", "diverge": "rank-diverged",
    "skip": "run-timeout",
}  # fmt: skip


@dataclass
class Cell:
    """One program at one length: compiled once, run many times."""

    strategy: str
    op: str
    ranks: int
    elements: int
    root: int
    name: int
    sessions: list[list[Session]] = field(default_factory=list)  # [collective][rank]
    waits: list[int] = field(default_factory=list)


@cache
def cell(strategy: str, op: str, fabric: str, elements: int) -> Cell | None:
    found = load_fabric(fabric)
    ranks = len(found.devices)
    root = 1 % ranks if op in ROOTED else 0
    problem = CollectiveProblem.on(
        found, op, 512 * ranks, root=root, transport=Transport(per_message_s=1e-5, per_byte_s=2.5e-10, per_step_s=1e-6), effort_s=5.0
    )
    try:
        program = NAMES[strategy]().plan(problem, rng=np.random.default_rng(0)).program
        form = form_of(program)
        if len(form.unrolled.steps) > 60 * ranks:
            return None
        codes = [compile_rank(form, r, elements) for r in range(ranks)]
    except MeshwrightError:
        return None
    made = Cell(strategy, op, ranks, elements, root, int(program_hash(program)[:15], 16))
    made.sessions = [[Session(c, op, root, elements, torch.int64, torch.device("cpu")) for c in codes] for _ in range(COLLECTIVES)]
    outcomes, _ = run(made, 0, ())
    made.waits = [o.waits for o in outcomes]
    return made


SHAPES = ("star:2", "star:3", "ring:4", "line:3", "two-islands:2", "star:5")
STRATEGIES = ("ring", "forestcoll", "double-tree", "halving-doubling", "direct", "rooted-tree", "hierarchical", "bruck", "joint")
OPS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "scatter", "gather")


def cells(most: int = 10_000) -> list[Cell]:
    """Every program that can be made, shuffled (always alike), up to `most`."""
    every = [(s, o, f, e) for s in STRATEGIES for o in OPS for f in SHAPES for e in (1, 7, 64)]
    random.Random(5).shuffle(every)
    out: list[Cell] = []
    for key in every:
        if (made := cell(*key)) is not None:
            out.append(made)
            if len(out) == most:
                break
    return out


def add(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(b)


def prepare(
    made: Cell, seed: int, faults: tuple[Fault, ...], *, twist: str = "", culprit: int = -1, checks: bool = False
) -> tuple[VirtualWorld, list[list[torch.Tensor]], list[list[Any]]]:
    rng = np.random.default_rng(seed)
    asked: list[list[VirtualCall]] = [[] for _ in range(made.ranks)]
    given_all, calls_all = [], []
    combine = add if made.op in ("all-reduce", "reduce", "reduce-scatter") else None
    for k in range(COLLECTIVES):
        given = inputs(made.op, made.ranks, made.elements, rng, torch.int64)
        own = calls(made.op, given, made.elements, made.root)
        given_all.append(given)
        calls_all.append(own)
        for rank in range(made.ranks):
            asked[rank].append(VirtualCall(own[rank], made.sessions[k][rank], made.name, combine))
    if twist == "plan":
        asked[culprit][1].name ^= 1
    elif twist == "diverge":
        asked[culprit][1].combine = None if combine else add  # another operation at the same place
    elif twist == "skip":
        asked[culprit].pop()
    world = VirtualWorld(asked, seed=seed, faults=faults, timeout_s=TIMEOUT_S, grace_s=GRACE_S, checks=checks)
    return world, given_all, calls_all


def world(made: Cell, seed: int) -> VirtualWorld:
    """A healthy world before its first event."""
    return prepare(made, seed, ())[0]


def run(made: Cell, seed: int, faults: tuple[Fault, ...], *, twist: str = "", culprit: int = -1, checks: bool = False) -> tuple[list[Outcome], Any]:
    """Run `COLLECTIVES` collectives; whoever finished one must have the right result. `twist`: what `culprit` does in the second instead."""
    world, given_all, calls_all = prepare(made, seed, faults, twist=twist, culprit=culprit, checks=checks)
    outcomes = world.run()
    for k in range(COLLECTIVES):
        for rank, outcome in enumerate(outcomes):
            call = calls_all[k][rank]
            if outcome.finished > k and call.target is not None and not (twist and k):
                want = wanted(made.op, given_all[k], made.elements, made.root, rank)
                assert want is None or torch.equal(call.target, want), (made.strategy, made.op, rank, k)
    return outcomes, world


def schedule(made: Cell, seed: int) -> tuple[str, Fault | None, int]:
    """A fault, by seed: (kind, fault, culprit)."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    rank = rng.randrange(made.ranks)
    peer = rng.choice([r for r in range(made.ranks) if r != rank])
    at = rng.randint(1, made.waits[rank])
    if kind in ("plan", "diverge", "skip"):
        return kind, None, rank
    pause_s = rng.choice([0.2, 5.0]) if kind == "pause" else 0.0
    return kind, Fault(kind, rank, at, peer=peer, factor=1e-9, pause_s=pause_s), rank


def check_case(made: Cell, seed: int) -> tuple[str, str, float]:
    """Run one fault and check it: (kind, code of the error or '' where it had no effect, seconds until the last rank knew)."""
    kind, fault, culprit = schedule(made, seed)
    twist = kind if fault is None else ""
    outcomes, world = run(made, seed, (fault,) if fault else (), twist=twist, culprit=culprit, checks=kind == "corrupt")
    what = (made.strategy, made.op, made.ranks, made.elements, seed, kind, fault)
    gone = {r for r, o in enumerate(outcomes) if o.state == "killed" or world.ranks[r].frozen}
    rest = [o for r, o in enumerate(outcomes) if r not in gone]
    failed = [o for o in rest if o.error is not None]
    ends = ("done", "failed") if failed or kind != "late" else ("done", "busy")  # nobody needs the late one
    assert all(o.state in ends for o in rest), (what, [o.state for o in outcomes])
    if not failed:
        finished = [o.finished for r, o in enumerate(outcomes) if r not in gone]
        allowed = COLLECTIVES - 1 if twist == "skip" else COLLECTIVES
        assert kind == "late" or all(f >= allowed for f in finished), (what, finished)
        return kind, "", 0.0
    errors = {(o.error.code, o.error.message, str(o.error.data), o.error.where) for o in failed if o.error is not None}
    if kind in ("cut", "slow") and made.ranks == 2:  # nobody is left whom both can reach
        errors = {(code, "", "", "") for code, _, _, _ in errors}
        rest = [o for o in rest if o.finished < COLLECTIVES]
        failed = [o for o in failed if o in rest]
    assert len(errors) == 1 and len(failed) == len(rest), (what, errors, [o.state for o in outcomes])
    error = failed[0].error
    assert error is not None
    named(kind, fault, culprit, made.ranks, error, what)
    # A rank that has finished everything waits for nothing: it hears of the error when the slow link lets it.
    counted = [o for r, o in enumerate(outcomes) if not (kind == "pause" and r == culprit)]
    last = max((o.error_s for o in counted if o.error is not None and o.finished < COLLECTIVES), default=0.0)
    since = world.fault_s if world.fault_s is not None else 0.0
    assert last - since <= TIMEOUT_S + 2.5 * GRACE_S, (what, last - since, error)
    return kind, error.code, last - since


def named(kind: str, fault: Fault | None, culprit: int, ranks: int, error: MeshwrightError, what: Any) -> None:
    assert error.code == EXPECTED[kind], (what, error, error.data)
    if kind in ("cut", "slow", "corrupt"):
        assert fault is not None
        source, target = (int(x) for x in error.data["link"].split(" -> "))
        ends = (fault.rank, fault.peer)
        either = kind == "cut" or (kind == "slow" and ranks == 2)
        assert (source, target) == ends or (either and (target, source) == ends), (what, error, error.data)
    elif not (kind in ("plan", "diverge") and ranks == 2):  # one word against another
        assert error.data["rank"] == culprit, (what, error, error.data)


def campaign(number: int, first: int = 0, most_cells: int = 10_000) -> Iterator[tuple[str, str, float]]:
    every = cells(most_cells)
    for seed in range(first, first + number):
        yield check_case(every[seed % len(every)], seed)
