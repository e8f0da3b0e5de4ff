"""What the ranks of a group say after something went wrong, and the one rule that turns it into one cause.

The rule is a pure function. The health threads of real ranks, the deterministic twin and `run doctor` all use it; they differ only in where the
views come from. Ranks are numbers of the group; texts name global ranks (`names`).

Order of suspicion: what a rank says about itself (an exception, a damaged message), a rank that died, one that answers nobody though its machine
does, a broken link, a rank that left, another program at the same place of the sequence, another call there, and last whatever is found by following
who waits for whom: it ends at a rank that waits for nobody (it has not come, it is busy), or at a message that was sent and is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from .record_file import call_text

__all__ = [
    "CRAWLS", "CUT", "DEAD", "LEFT", "NO_PROGRAM", "SILENT", "UNKNOWN", "UP", "Claim", "Verdict", "View", "first_cause", "place_text", "rank_list",
]  # fmt: skip

# What a rank knows about its connection to another one.
UP, DEAD, SILENT, CUT, CRAWLS, UNKNOWN = "u", "d", "s", "c", "w", "?"
LEFT = ("exited", "terminated", "closed")
NO_PROGRAM = -1  # in a history: of a call whose plan is not there yet


class Claim(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a rank says that it knows for certain. `rank` is at fault; `peer`, if not -1, is the other end of the link."""

    code: str
    message: str
    rank: int
    peer: int = -1
    step: int = -1
    where: str = ""
    hint: str = ""


class View(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One rank's own state. `number`: of the collective that it is in, or has last been in; `links`: one letter per rank of the group.

    `why`: how its wait was lost ("deadline", "closed"); `needs`: what the wait needs of `peer`; `open`: what is under way here (a send of step s
    is s, a posted receive of it -1 - s); `taken`: the last sends that the transport took off this rank's hands, which is before they arrive.
    `state`: idle, planning, walking, builtin, failed, exited, terminated, closed.
    """

    rank: int
    state: str = "idle"
    number: int = 0
    asked: int = 0
    history: list[tuple[int, int, int, int]] = []  # (number, call, bytes, program)
    step: int = -1
    peer: int = -1
    receives: bool = False
    waiting: bool = False
    waited_s: float = 0.0
    why: str = ""
    needs: int | None = None
    open: list[int] = []
    taken: list[int] = []
    links: str = ""
    text: str = ""  # the step in words
    claim: Claim | None = None
    final: bool = False  # the links are as far as they will be known


class Verdict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`source` -> `target`: the link, -1 where none is at fault or known; `how`: how it was found out, one word."""

    code: str
    message: str
    rank: int
    source: int = -1
    target: int = -1
    step: int = -1
    where: str = ""
    hint: str = ""
    how: str = ""
    views: dict[str, str] = {}


def first_cause(views: Mapping[int, View], size: int, names: Sequence[int] = ()) -> Verdict:
    """The cause as far as `views` tell it. Depends on nothing else, so equal views give equal verdicts."""
    names = names or range(size)
    rule = _Rule(views, size, names)
    # From what is known for certain to what is concluded: a death makes its peers wait, so waits are followed only when nothing else is found.
    for find in (rule.claimed, rule.died, rule.frozen, rule.cut, rule.crawling, rule.left, rule.mismatch, rule.waits):
        if (found := find()) is not None:
            break
    else:
        found = rule.nothing()
    found.views = {str(names[r]): _one_line(v, names) for r, v in sorted(views.items())}
    return found


def place_text(view: View, names: Sequence[int]) -> str:
    """`collective 118 (all-reduce sum float32 4 MiB), step 7: waits for a message from rank 5`."""
    if not view.number:
        return "before the first collective" if view.state != "planning" else "planning"
    last = next((h for h in reversed(view.history) if h[0] == view.number), None)
    what = f" ({call_text(last[1], last[2])})" if last else ""
    text = f"collective {view.number}{what}"
    if view.state == "planning":
        return f"{text}, waits for its plan"
    if view.waiting:
        verb = "waits for a message from" if view.receives else "waits for its message to be taken by"
        text += f", step {view.step}: {verb} rank {names[view.peer]}"
    elif view.state == "walking":
        text += f", after step {view.step}" if view.step >= 0 else ", at its start"
    return text


def rank_list(ranks: Sequence[int]) -> str:
    """`ranks 0-2,4` or `rank 3`."""
    rows = sorted(ranks)
    parts: list[str] = []
    i = 0
    while i < len(rows):
        j = i
        while j + 1 < len(rows) and rows[j + 1] == rows[j] + 1:
            j += 1
        parts.append(str(rows[i]) if i == j else f"{rows[i]}-{rows[j]}")
        i = j + 1
    return f"rank{'s' if len(rows) > 1 else ''} {','.join(parts)}"


def _one_line(view: View, names: Sequence[int]) -> str:
    words = [view.state if view.state not in ("walking", "idle") else "", place_text(view, names)]
    if view.why:
        words.append(f"lost it: {view.why}")
    if set(view.links) - {UP, UNKNOWN}:
        words.append(f"links {view.links}")
    return "; ".join(w for w in words if w)


class _Rule:
    def __init__(self, views: Mapping[int, View], size: int, names: Sequence[int]) -> None:
        self.views, self.size, self.names = dict(sorted(views.items())), size, names
        self.missing = [r for r in range(size) if r not in views]

    # ---- small words -------------------------------------------------------------------------------------------
    def name(self, rank: int) -> str:
        return f"rank {self.names[rank]}"

    def link(self, seen_by: int, rank: int) -> str:
        links = self.views[seen_by].links
        return links[rank] if rank < len(links) else UNKNOWN

    def waiters(self, rank: int) -> list[View]:
        """Who waits for `rank`, the longest first."""
        found = [v for v in self.views.values() if v.waiting and v.peer == rank and v.rank != rank]
        return sorted(found, key=lambda v: (not v.why, -v.number, v.rank))

    def make(self, code: str, rank: int, what: str, *, how: str, hint: str = "", waits: bool = True) -> Verdict:
        """A verdict on `rank`: who waits for it gives step and link."""
        found = Verdict(code=code, message=f"{self.name(rank)} {what}", rank=rank, how=how, hint=hint)
        waiting = self.waiters(rank)
        own = self.views.get(rank)
        if waits and waiting:
            first = waiting[0]
            found.step, found.where = first.step, first.text or self.name(first.rank)
            found.source, found.target = (rank, first.rank) if first.receives else (first.rank, rank)
            found.message += f"; {self.name(first.rank)} waits for it in {place_text(first, self.names).partition(': ')[0]}"
        elif own is not None and own.waiting:
            found.step, found.where = own.step, own.text or self.name(rank)
            found.source, found.target = (own.peer, rank) if own.receives else (rank, own.peer)
        else:
            found.where = self.name(rank)
        return found

    # ---- the rules, in order -----------------------------------------------------------------------------------
    def claimed(self) -> Verdict | None:
        claims = [v.claim for v in self.views.values() if v.claim is not None]
        if not claims:
            return None
        first = min(claims, key=lambda c: (c.code == "rank-failed", c.rank))  # a damaged message explains an exception, not the reverse
        found = self.make(first.code, first.rank, "", how="claimed", hint=first.hint, waits=first.peer < 0)
        found.message = first.message
        found.where = first.where or found.where
        if first.step >= 0:
            found.step = first.step
        if first.peer >= 0:
            found.source, found.target = first.rank, first.peer
        return found

    def died(self) -> Verdict | None:
        # Only ranks that sent no view: one that said what failed and then ended is a claim, not a death.
        dead = [r for r in self.missing if any(self.link(v, r) == DEAD for v in self.views)]
        if dead:
            waited = [r for r in dead if self.waiters(r)]
            others = f" (so did {rank_list([self.names[r] for r in dead if r != (waited or dead)[0]])})" if len(dead) > 1 else ""
            hint = "killed? the kernel kills when memory runs out: see `dmesg`"
            return self.make("rank-died", (waited or dead)[0], f"died{others}", how="connection closed", hint=hint)
        return None

    def frozen(self) -> Verdict | None:
        found = [r for r in self.missing if any(self.link(v, r) == SILENT for v in self.views)]
        if not found:
            return None
        waited = [r for r in found if self.waiters(r)]
        hint = "stopped (SIGSTOP, a debugger, a suspended machine) or hung in foreign code that holds the interpreter"
        return self.make("rank-frozen", (waited or found)[0], "is frozen: its machine answers, it does not", how="no answer", hint=hint)

    def cut(self) -> Verdict | None:
        pairs = [(a, b) for a in self.views for b in range(self.size) if self.link(a, b) == CUT]
        if not pairs:
            return None
        # One rank that nobody reaches is the likelier fault than all of its links at once.
        alone = [r for r in self.missing if all(self.link(v, r) in (CUT, UNKNOWN) for v in self.views)]
        lost = [v for v in self.views.values() if v.waiting and (v.rank, v.peer) in pairs]
        lost.sort(key=lambda v: (not v.why, v.rank))
        if lost:
            view = lost[0]
            source, target = (view.peer, view.rank) if view.receives else (view.rank, view.peer)
            step, where = view.step, view.text
        else:
            source, target = pairs[0][1], pairs[0][0]
            step, where = -1, self.name(target)
        low, high = min(source, target), max(source, target)
        message = f"the link between {self.name(low)} and {self.name(high)} is cut: nothing arrives"
        rank = source
        if len(alone) == 1 and self.size > 2:
            rank = alone[0]
            message = f"{self.name(rank)} cannot be reached by anyone: its links or its machine are down"
        elif self.missing and self.size > 2:
            message += f"; {rank_list([self.names[r] for r in self.missing])} cannot be reached"
        hint = "`meshwright fabric probe` measures every link"
        return Verdict(
            code="link-lost", message=message, rank=rank, source=source, target=target, step=step, where=where, how="nothing arrives", hint=hint
        )

    def crawling(self) -> Verdict | None:
        """A rank of which nothing is heard, over a link that moves some bytes."""
        pairs = [(a, b) for a in self.views for b in self.missing if self.link(a, b) == CRAWLS]
        if not pairs:
            return None
        waiting = [self.views[a] for a, b in pairs if self.views[a].waiting and self.views[a].peer == b]
        if waiting:
            return self.slow(min(waiting, key=lambda v: (not v.why, v.rank)))
        target, source = pairs[0]
        what = f"the link from {self.name(source)} to {self.name(target)} is too slow: nothing was heard of {self.name(source)}"
        return Verdict(code="link-slow", message=what, rank=source, source=source, target=target, where=self.name(target), how="under way")

    def mismatch(self) -> Verdict | None:
        """The first collective that ranks know under different names."""
        tables = {r: {n: (call, size, name) for n, call, size, name in v.history} for r, v in self.views.items()}
        numbers = sorted({n for t in tables.values() for n in t})
        for number in numbers:
            here = {r: t[number] for r, t in tables.items() if number in t}
            if len(set(here.values())) < 2:
                continue
            calls = {r: (c, s) for r, (c, s, _) in here.items()}
            # Another call comes before another program: ranks that call different things have different programs anyway.
            if len(set(calls.values())) > 1:
                return self.diverged(number, calls, tables)
            programs = {r: p for r, (_, _, p) in here.items() if p != NO_PROGRAM}
            if len(set(programs.values())) < 2:
                continue
            rank = _odd(programs)
            what = f"runs another program than the others in collective {number} ({call_text(*calls[rank])})"
            hint = "give all ranks the same plan files, fabric and versions"
            return self.make("plan-mismatch", rank, what, how="program", hint=hint, waits=False)
        return None

    def diverged(self, number: int, calls: Mapping[int, tuple[int, int]], tables: Mapping[int, Mapping[int, tuple[int, int, int]]]) -> Verdict:
        rank = _odd(calls)
        usual = Counter(c for r, c in calls.items() if r != rank).most_common(1)[0][0]
        what = f"calls {call_text(*calls[rank])} as collective {number} where the others call {call_text(*usual)}"
        if len(calls) < self.size and len(set(Counter(calls.values()).values())) == 1:  # as many for either: who comes last would decide
            other = rank_list([self.names[r] for r, c in calls.items() if c == usual])
            what = what.replace("the others call", f"{other} calls", 1) + f"; no other rank has called {number} yet, so either may be right"
        following = {t[number + 1][:2] for r, t in tables.items() if r != rank and number + 1 in t and t[number][:2] == usual}
        own = tables[rank].get(number + 1, (0, 0, 0))[:2]
        if following == {calls[rank]}:
            what += "; it swapped the two" if own == usual else f": it left out collective {number}"
        elif own == usual:
            what += ": one too many"
        hint = "all ranks of a group must call the same collectives in the same order; a branch that one rank took?"
        return self.make("rank-diverged", rank, what, how="sequence", hint=hint, waits=False)

    def under_way(self, view: View) -> bool:
        """Both ends have posted the message that `view` waits for, or its sender is done with it, and somebody's time is up."""
        peer = self.views.get(view.peer)
        if peer is None or view.needs is None or not any(v.why == "deadline" for v in self.views.values()):
            return False
        same = peer.number == view.number  # steps of another collective have the same numbers
        if same and view.needs in peer.open:
            return True
        # The peer has no such send open any more, so its transport took the message: it is between the two.
        sent = view.receives and (peer.number > view.number or (same and (view.needs in peer.taken or peer.state == "idle")))
        return sent and view.waited_s >= 0.25 * max(v.waited_s for v in self.views.values())  # not one that is just arriving

    def departed(self, peer: View) -> Verdict:
        what = {"exited": "has ended", "terminated": "was told to end (SIGTERM)", "closed": "has destroyed the group"}[peer.state]
        hint = "every rank must stay in the group until all have finished"
        return self.make("rank-died" if peer.state != "closed" else "group-failed", peer.rank, what, how=peer.state, hint=hint)

    def left(self) -> Verdict | None:
        """A rank that went in good order, and that somebody misses."""
        gone = [v for v in self.views.values() if v.state in LEFT]
        missed = [v for v in gone if self.waiters(v.rank)] or (gone if any(v.why == "closed" for v in self.views.values()) else [])
        return self.departed(missed[0]) if missed else None

    def waits(self) -> Verdict | None:
        """Follow who waits for whom, from the wait that was lost, or the oldest."""
        starts = [v for v in self.views.values() if v.waiting]
        if not starts:
            return self.builtin()
        # The wait that was lost is the one that somebody complained of; waits in later collectives may only follow from earlier ones.
        at = min(starts, key=lambda v: (not v.why, v.number, -round(v.waited_s, 3), v.rank))
        seen: list[View] = []
        while True:
            # Every step follows one waiting rank to another, so the walk ends: at a rank that does not wait, or where it has been.
            if at in seen:
                return self.circle(seen[seen.index(at) :])
            seen.append(at)
            peer = self.views.get(at.peer)
            if peer is None:
                return self.make("rank-died", at.peer, "does not answer", how="no answer")
            if peer.state in LEFT:
                return self.departed(peer)
            if peer.number < at.number and not peer.waiting and peer.state in ("idle", "planning"):
                what = f"has not come to collective {at.number}; it has called {peer.asked}"
                hint = "it computes, loads data or took another branch; raise the group's timeout if it is only slow"
                return self.make("run-timeout", peer.rank, what, how="not there", hint=hint)
            if peer.state == "planning" and not peer.waiting:
                hint = "planning has a limit of its own: MESHWRIGHT_STRATEGIES names fewer candidates, a plan file needs none"
                return self.make("run-timeout", peer.rank, f"is still planning collective {peer.number}", how="planning", hint=hint)
            if self.under_way(at):
                return self.slow(at)
            if peer.waiting and peer.number <= at.number:
                at = peer
                continue
            if peer.state == "walking" and peer.number <= at.number:
                what = f"is busy with its own work in {place_text(peer, self.names)}"
                return self.make("run-timeout", peer.rank, what, how="busy", hint="raise the group's timeout if its machine is only slow")
            return self.broken(at)

    def builtin(self) -> Verdict | None:
        """A collective of the built-in backend was given up: who has not called it?"""
        inside = [v for v in self.views.values() if v.state == "builtin"]
        if not inside:
            return None
        number = max(v.asked for v in inside)
        late = [v for v in self.views.values() if v.asked < number]
        if late:
            known = {h[0]: h[1:3] for v in inside for h in v.history}
            called = f" ({call_text(*known[number])})" if number in known else ""
            what = f"has not come to collective {number}{called}, which the built-in backend runs; it has called {late[0].asked}"
            if late[1:]:
                what += f"; nor has {rank_list([self.names[v.rank] for v in late[1:]])}"
            return self.make("run-timeout", late[0].rank, what, how="not there")
        first = min(inside, key=lambda v: (not v.why, v.rank))
        return self.make("group-failed", first.rank, f"lost collective {number} in the built-in backend ({first.why})", how=first.why)

    def circle(self, ring: Sequence[View]) -> Verdict:
        moving = [v for v in ring if self.under_way(v)]
        view = max(moving or ring, key=lambda v: (v.waited_s, -v.rank))
        if moving:
            return self.slow(view)
        words = ", ".join(f"{self.names[v.rank]} for {self.names[v.peer]}" for v in ring)
        found = self.make("run-timeout", view.rank, f"waits in a circle ({words})", how="circle", waits=False)
        return found

    def slow(self, view: View) -> Verdict:
        source, target = (view.peer, view.rank) if view.receives else (view.rank, view.peer)
        what = f"the link from {self.name(source)} to {self.name(target)} is too slow: a message has been under way for {view.waited_s:.3g} s"
        return Verdict(
            code="link-slow", message=f"{what} in {place_text(view, self.names).partition(': ')[0]}", rank=source, source=source, target=target,
            step=view.step, where=view.text, how="under way", hint="`meshwright fabric probe` measures every link; raise the group's timeout",
        )  # fmt: skip

    def broken(self, view: View) -> Verdict:
        source, target = (view.peer, view.rank) if view.receives else (view.rank, view.peer)
        how = "closed" if view.why == "closed" else "not delivered"
        return Verdict(
            code="link-lost", message=f"the connection from {self.name(source)} to {self.name(target)} broke ({how}); both ranks live", rank=source,
            source=source, target=target, step=view.step, where=view.text, how=how,
        )  # fmt: skip

    def nothing(self) -> Verdict:
        rank = min(self.missing, default=min(self.views, default=0))
        return Verdict(code="group-failed", message="the group failed and no rank knows why", rank=rank, where=self.name(rank), how="unknown")


def _odd(table: Mapping[int, object]) -> int:
    """The lowest rank that is not with the majority; without one, with the lowest rank."""
    counts = Counter(table.values())
    most = max(counts.values())
    # Of equally common values that of the lowest rank: equal views must give equal verdicts at every rank.
    usual = next(value for _, value in sorted(table.items()) if counts[value] == most)
    return min(r for r, value in table.items() if value != usual)
