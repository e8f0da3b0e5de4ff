"""Other work in one step of a filled pipeline's cycle: which pieces each rank does, what each must follow, and what it must have been sent.

The contract, from the plan's document (`job.fill`) alone: every placement of the step is one op, called as its item; the pieces of an item follow
one another; an item follows the actions that it waits for on its own rank, and every item it comes after that has pieces in the same step,
whichever rank does them; of those on other ranks that hand something over it has received just that. Times are `check.fill`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ...program.program import Program
from ..program.order import Order
from ..program.wellformed import witness
from ..verdict import Finding

__all__ = ["FillWork"]


class FillWork:
    """Work of step `step` of the cycle. Raises: KeyError, TypeError, ValueError for a document that is none."""

    def __init__(self, document: Mapping[str, Any], step: int) -> None:
        self.step = step
        self.items: dict[str, Mapping[str, Any]] = {str(i["name"]): i for i in document["items"]}
        whole: dict[tuple[str, int], int] = {}
        for p in document["placements"]:
            whole[str(p["item"]), int(p["rank"])] = whole.get((str(p["item"]), int(p["rank"])), 0) + 1
        seen: dict[tuple[str, int], int] = {}
        self.keys: dict[tuple[str, int], list[str]] = {}  # (item, rank) -> its pieces in this step, in order
        for p in document["placements"]:
            at = (str(p["item"]), int(p["rank"]))
            seen[at] = seen.get(at, 0) + 1
            if int(p["step"]) == step:
                self.keys.setdefault(at, []).append(f"fill:{at[0]}" + (f":{seen[at]}/{whole[at]}" if whole[at] > 1 else ""))
        self.item_of = {(rank, key): name for (name, rank), keys in self.keys.items() for key in keys}
        self.ranks_of: dict[str, list[int]] = {}  # item -> the ranks that do pieces of it in this step
        for name, rank in self.keys:
            self.ranks_of.setdefault(name, []).append(rank)
        self.after: dict[tuple[str, int], list[tuple[str, int]]] = {}  # (item, rank) -> those on other ranks that come after it
        for at in self.keys:
            for earlier in self.before(*at):
                self.after.setdefault(earlier, []).append(at)

    def has(self, rank: int, key: str, kind: str) -> bool:
        name = self.item_of.get((rank, key))
        return name is not None and str(self.items[name]["kind"]) == kind

    def compute(self, machine: Any, step: int, rank: int, op: int) -> None:
        """It reads what items on other ranks hand it, and leaves what it hands over itself."""
        p, key = machine.p, machine.p.ops.graph[op]
        name = self.item_of[rank, key]
        pieces = self.keys[name, rank]
        heard = {machine.one("item", *x, name, rank): x for x in self.before(name, rank)}
        expects = {x for x in heard.values() if key == pieces[0] and int(self.items[x[0]].get("message_bytes", 0))}
        for b, first, count in p.ops.reads[op].reshape(-1, 3).tolist():
            root, lo, hi = machine.locate(b, first, count, 0)
            held = set(machine.memory[root][lo:hi])
            if len(held) != 1 or not held <= set(heard):
                machine.wrong(step, f"reads {p.buffers.name[b]}, which does not hold what was to be handed to it", buffer=b)
                return
            expects.discard(heard[held.pop()])
        for other, far in sorted(expects):
            machine.wrong(step, f"has not received what {other!r} of rank {far} hands over")
        gives = {f"fillout:{name}:{n}:{r}": (n, r) for n, r in self.after.get((name, rank), ())} if key == pieces[-1] else {}
        for b, first, count in p.ops.writes[op].reshape(-1, 3).tolist():
            if p.buffers.name[b] not in gives:
                machine.wrong(step, f"writes {p.buffers.name[b]}, which is not its to write", buffer=b)
                return
            root, lo, hi = machine.locate(b, first, count, 0)
            machine.store(root, lo, hi, [machine.one("item", name, rank, *gives[p.buffers.name[b]])] * (hi - lo), step)

    def before(self, name: str, rank: int) -> set[tuple[str, int]]:
        """(item, rank) of this step on other ranks that the item comes after; of one that its own rank does too, that part says when it is done."""
        found = set()
        for other in self.items[name]["after"]:
            places = self.ranks_of.get(str(other), [])
            found |= {(str(other), r) for r in places if rank not in places}
        return found

    def ordered(self, p: Program, order: Order, nodes: Mapping[tuple[int, str], int], pieces: Mapping[tuple[int, str], int]) -> list[Finding]:
        """What happens before what, under every timing."""
        pairs: list[tuple[int, int, str]] = []
        for (name, rank), keys in self.keys.items():
            steps = [pieces[rank, key] for key in keys]
            pairs += [(a, b, f"the piece of {name!r} before it") for a, b in pairwise(steps)]
            for other in self.items[name]["after"]:
                own = self.ranks_of.get(str(other), [])
                # Where the own rank does a part of it (a collective), that part says when it is complete.
                pairs += [(pieces[r, self.keys[other, r][-1]], steps[0], f"{other!r} of rank {r}") for r in own if rank not in own or r == rank]
            if self.step == 0:
                waits = [(int(at), str(action)) for at, action in self.items[name]["actions"] if int(at) == rank]
                missing = [x for x in waits if x not in nodes]
                if missing:
                    text = f"{name!r} waits for {missing[0][1]}, which rank {rank} does not run"
                    return [Finding(check="values", message=text, witness={"rank": rank})]
                pairs += [(nodes[x], steps[0], x[1]) for x in waits]
        if not pairs:
            return []
        one, two = (np.array([x[i] for x in pairs], dtype=np.int64) for i in (0, 1))
        bad = np.flatnonzero(~order.before(order.node(one, 0), order.node(two, 0)))
        return [
            Finding(check="values", message=f"{p.describe(int(two[k]))} may start before {pairs[k][2]} is complete",
                    witness=witness(p, int(two[k]), other_step=int(one[k])))
            for k in bad[:8].tolist()
        ]  # fmt: skip
