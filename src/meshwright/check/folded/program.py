"""Folded collectives that are too big to write out: proved on the stored lanes (`orbits`), or where that does not apply class by class, every
member's part being the image of one that is written out.

1. Lanes tied by channels and waits form components; members' images of a component are components. One of each class is written out
   (`program.fold_part`) and checked like any program: form, deadlock, races inside it, and the value of every cell that it writes.
2. Different components share no cell that one of them writes. Every access at a representative is at hand, and every rank is the image of a
   representative, so it is enough to look there.
3. The contract is the image of itself under every member, so what holds for one instance of a class holds for all.
4. Every cell of every output is written by some component, or holds the right input from the start; again representatives suffice.

The proof holds for collectives without computing steps, aliases and rings of slots; anything else is left open.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import Unsupported
from ...program.fold_part import Lifted, part
from ...program.program import Program
from ..program.deadlock import check_deadlock
from ..program.order import Order, accesses
from ..program.races import check_races, turns_needed
from ..program.values import Machine
from ..program.wellformed import check_wellformed, witness
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .claim import Claim, wrong_cell
from .orbits import check_orbits

__all__ = ["check_folded"]

PROVED = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "reduce")
MAX_COMPONENT_LANES = 200_000  # lanes that hang together and are written out at once: memory and time grow with them
Ints = NDArray[np.int64]


def check_folded(p: Program) -> list[Finding]:
    """Findings; empty when the folded program keeps its contract. Raises: Unsupported where this proof does not apply."""
    if len(p.contracts) != 1 or p.contracts[0].op not in PROVED or p.contracts[0].ranks:
        raise Unsupported(f"only {', '.join(PROVED)} of all ranks are proved folded")
    if p.contracts[0].reproducible == "tree":
        raise Unsupported("folds of numbered contributions are proved written out only")
    if np.any(p.buffers.window > 0) or np.any(np.diff(p.buffers.last.ptr) > 0):
        raise Unsupported("buffers that are used again are not proved folded")
    lifted = Lifted(p)
    claim = Claim(p, lifted, p.contracts[0])
    claim.require_symmetry()
    try:
        return check_orbits(p, claim)
    except Unsupported:  # lanes that are proved as a whole only where ranks and components are written out
        if claim.c.op == "all-to-all" or lifted.fold.fixed:
            raise
    instance = np.full(len(p.lanes), -1, np.int64)  # of every stored lane: class · members + offset
    written: list[set[tuple[int, int]]] = []
    found: list[Finding] = []
    k = len(lifted.everyone)
    for lane in range(len(p.lanes)):
        if instance[lane] >= 0:
            continue
        # One component for each class: the lanes it holds are named with it, so their images are not written out again.
        nodes = lifted.component(lane, MAX_COMPONENT_LANES)
        if nodes is None:
            raise Unsupported(f"more than {MAX_COMPONENT_LANES} lanes depend on each other")
        _number(instance, nodes, len(written), k)
        cells, wrong = _check_component(part(lifted, nodes), claim)
        found += wrong
        written.append(cells)
        if len(found) >= MAX_FINDINGS_OF_A_KIND:
            return found
    return found or _shared_cells(p, instance) or claim.uncovered(written)


def _number(instance: Ints, nodes: list[tuple[int, int]], number: int, k: int) -> None:
    """Name the instance that each stored lane (its member 0) lies in. An orbit that comes back to itself must be one whole."""
    by_lane: dict[int, list[int]] = {}
    for lane, member in nodes:
        by_lane.setdefault(lane, []).append(member)
    for lane, found in by_lane.items():
        # Member m of the component is its image under m; a lane that it holds under some members only would lie in several of them.
        if len(found) not in (1, k):
            raise Unsupported("some members of the fold map a connected part of the program to itself, and others do not")
        instance[lane] = number * k + (found[0] if len(found) == 1 else 0)


def _check_component(plain: Program, claim: Claim) -> tuple[set[tuple[int, int]], list[Finding]]:
    """(rank, chunk) that the component writes, and what is wrong with it."""
    found = check_wellformed(plain) or check_deadlock(plain)
    if found:
        return set(), found
    order = Order(plain, iterations=turns_needed(plain))
    found = check_races(plain, order)
    if found:
        return set(), found
    grain = np.zeros(len(plain.buffers), np.int64)
    grain[list(claim.buffers)] = plain.buffers.chunk_bytes[list(claim.buffers)]
    machine = Machine(plain, order, nothing_is_zero=False, grain=grain)
    a = accesses(plain)
    touched = {(b, c + i) for b, c, n in set(zip(a.buffer.tolist(), a.chunk.tolist(), a.count.tolist(), strict=True)) for i in range(n)}
    # Cells that the component does not write hold inputs or nothing known; what other components write there is excluded by step 2.
    for buffer, chunk in touched:
        machine.memory[buffer][chunk] = claim.initial(buffer, chunk)
    machine.run()
    cells: set[tuple[int, int]] = set()
    for buffer, chunk in sorted(touched):
        step = machine.writer[buffer][chunk]
        rank = int(plain.buffers.actor[buffer])
        if step < 0 or not claim.is_output(rank, buffer, chunk):
            continue
        cells.add((rank, chunk))
        have, want = machine.memory[buffer][chunk], claim.wanted(rank, chunk)
        if have != want and len(found) < MAX_FINDINGS_OF_A_KIND:
            found.append(wrong_cell(plain, rank, buffer, chunk, have, want, step))
    return cells, found


def _shared_cells(p: Program, instance: Ints) -> list[Finding]:
    """Cells at representatives that two components touch, one of them writing."""
    a = accesses(p)
    lane = p.lane_of_step()[a.step]
    span = int(p.buffers.chunks.max(initial=1)) + 1
    # One row per cell; who = the instance of the component that touches it.
    step = np.repeat(np.arange(len(a.step)), a.count)
    inner = np.arange(len(step)) - np.repeat(np.cumsum(a.count) - a.count, a.count)
    cell = a.buffer[step] * span + a.chunk[step] + inner
    who, write = instance[lane[step]], a.write[step]
    by = np.lexsort((who, cell))
    cell, who, write, step = cell[by], who[by], write[by], step[by]
    first = np.concatenate([[True], cell[1:] != cell[:-1]]) if len(cell) else np.zeros(0, bool)
    group = np.cumsum(first) - 1
    mixed = np.zeros(int(group[-1]) + 1 if len(group) else 0, bool)
    # Sorted by instance within a cell, two instances show as two unlike neighbours.
    differ = np.flatnonzero(~first & (who != np.concatenate([[-1], who[:-1]])))
    mixed[group[differ]] = True
    wrote = np.zeros(len(mixed), bool)
    np.logical_or.at(wrote, group, write)
    found = []
    for g in np.flatnonzero(mixed & wrote)[:MAX_FINDINGS_OF_A_KIND].tolist():
        rows = np.flatnonzero(group == g)
        one = int(a.step[step[rows[np.argmax(write[rows])]]])
        other = int(a.step[step[rows[np.argmax(who[rows] != who[rows[np.argmax(write[rows])]])]]])
        chunk = int(cell[rows[0]] % span)
        text = f"{p.describe(one)} writes and {p.describe(other)} touches chunk {chunk}, and nothing orders them"
        found.append(Finding(check="races", message=text, witness=witness(p, one, chunk=chunk, other_step=other)))
    return found
