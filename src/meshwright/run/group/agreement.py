"""How ranks agree on what went wrong: one round per group, as a state machine without sockets, threads or clocks.

It is told what happened (`alarm`, `receive`, `closed`, `tick`) with the time, and fills `out` with messages for peers. Real connections drive it in
`control`, the deterministic twin drives it in virtual time. Nothing depends on a store or on a particular rank being alive.

A rank that loses a wait, fails by itself or sees a connection end without a farewell sends its view to all; whoever hears of it does so too. After
half the grace a rank asks the others for whom it has not heard, and they relay, so one cut link hides nobody. After the grace, links from which
nothing came are judged (does the peer's machine still take bytes?), views become final, and the lowest rank that is fit applies the rule to all of
them. Its verdict is passed on by everyone. Should it fall silent, the next fit rank takes over after half a grace. A rank that was stopped
meanwhile finds the verdict in its connections when it goes on: whoever drives this handles all that has arrived before it calls `tick`.

Two verdicts are possible only if a second rank fails while the first failure is being judged; every rank keeps the first that it hears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from .audit import Audit, Told
from .pairs import Note
from .verdict import DEAD, LEFT, UNKNOWN, UP, Claim, Verdict, View, first_cause

__all__ = ["Agreement", "Message"]


Asked = tuple[int, int, int]
MAX_ASKED = 64  # calls of which not all ranks have come, kept at rank 0


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`view`: somebody's view; `need`: ranks that the sender has not heard; `verdict`: the end; `told`: of its calls, while all is well;
    `asks`: (number, call, bytes) that the sender is about to begin, if all do; `agreed`: they do;
    `note`: of a message of the user's own (`pairs`)."""

    view: View | None = None
    need: list[int] = []
    verdict: Verdict | None = None
    told: Told | None = None
    asks: Asked | None = None
    agreed: Asked | None = None
    note: Note | None = None


class Agreement:
    """`look()`: this rank's own view now; `judge(peer)`: SILENT or CUT for a peer from which nothing came. `next_s`: when `tick` is due."""

    def __init__(
        self, rank: int, size: int, grace_s: float, look: Callable[[], View], judge: Callable[[int], str], names: Sequence[int] = ()
    ) -> None:  # fmt: skip
        self.rank, self.size, self.grace_s, self.look, self.judge = rank, size, grace_s, look, judge
        self.names = tuple(names) or tuple(range(size))
        self.audit: Audit | None = None
        self.noted: Callable[[int, Note], None] = lambda peer, note: None
        self.links = [UNKNOWN] * size
        self.views: dict[int, View] = {}
        self.verdict: Verdict | None = None
        self.out: list[tuple[int, Message]] = []
        self.alarmed_s = math.inf
        self.next_s = math.inf
        self._why = ""
        self._relay: set[tuple[int, int]] = set()
        self._asked: dict[int, dict[int, Asked]] = {}  # number of a call -> rank -> what it is about to call
        self._waits: dict[Asked, Callable[[], None]] = {}
        self._needed = self._complete = self._differ = False

    # ---- what happens ------------------------------------------------------------------------------------------
    def alarm(self, now_s: float, why: str = "", claim: Claim | None = None) -> None:
        """Something is wrong here: a lost wait (`why`), a failure of its own (`claim`), or somebody else's alarm."""
        if self.verdict is not None:
            return
        self._why = self._why or why
        if self.alarmed_s == math.inf:
            self.alarmed_s = now_s
            self.next_s = now_s + self.grace_s / 2
        # Told of an alarm that it knows: without this, every answer would make another one.
        elif not why and claim is None:
            return
        self._own(claim=claim)
        self._settle(now_s)

    def receive(self, now_s: float, peer: int, message: Message) -> None:
        if message.told is not None:  # no answer to an alarm: it may have been sent before the peer froze
            if self.audit is not None:
                self.audit.hear(peer, message.told)
            return
        if message.note is not None:
            self.noted(peer, message.note)
            return
        if message.asks is not None:
            self._hear(now_s, peer, message.asks)
            return
        if message.agreed is not None:
            self._agree(message.agreed)
            return
        self.links[peer] = UP
        if message.verdict is not None:
            self._end(message.verdict, peer)
            return
        if self.verdict is not None:
            if message.view is not None and message.view.state not in LEFT:
                self._send(peer, Message(verdict=self.verdict))  # it has not heard yet
            return
        for missing in message.need:
            if missing != self.rank and 0 <= missing < self.size:
                # Both ways and from now on: either may change its view later, and the two may not hear each other.
                self._relay |= {(peer, missing), (missing, peer)}
                for source, target in ((missing, peer), (peer, missing)):
                    if source in self.views and target != self.rank:
                        self._send(target, Message(view=self.views[source]))
        view = message.view
        if view is not None and view.rank != self.rank and 0 <= view.rank < self.size:
            self._learn(now_s, view)
        if self.alarmed_s != math.inf:
            self._settle(now_s)

    def closed(self, now_s: float, peer: int) -> None:
        """The connection to `peer` has ended."""
        # The end of a connection is seen once by reading and perhaps again by writing.
        if self.links[peer] == DEAD:
            return
        self.links[peer] = DEAD
        if self.verdict is None and not self._farewell(peer):
            self.alarm(now_s)
            self._settle(now_s)

    def ask(self, now_s: float, what: Asked, agreed: Callable[[], None]) -> None:
        """This rank is about to call `what`; `agreed()` when all are."""
        self._waits[what] = agreed
        if self.rank:
            self._send(0, Message(asks=what))
        else:
            self._hear(now_s, 0, what)

    def _hear(self, now_s: float, peer: int, what: Asked) -> None:
        said = self._asked.setdefault(what[0], {})
        said[peer] = what
        if len(set(said.values())) > 1:
            if len(said) == self.size:
                self.alarm(now_s, "diverged")
            elif self.calm and not self._differ:  # of two that differ, a third says which is the odd one: it gets a moment
                self._differ, self.next_s = True, now_s + self.grace_s / 2
        elif len(said) == self.size:
            del self._asked[what[0]]
            for rank in range(1, self.size):
                self._send(rank, Message(agreed=what))
            self._agree(what)
        while len(self._asked) > MAX_ASKED:
            self._asked.pop(next(iter(self._asked)))

    def _agree(self, what: Asked) -> None:
        self._waits.pop(what, lambda: None)()

    @property
    def calm(self) -> bool:
        """Nothing is wrong, as far as this rank knows."""
        return self.verdict is None and self.alarmed_s == math.inf

    @property
    def due_s(self) -> float:
        """When this rank has something to do, unless something arrives."""
        return min(self.next_s, self.audit.next_s) if self.audit is not None and self.calm else self.next_s

    def look_around(self, now_s: float) -> None:
        """Tell the next rank of the ring what was called here, and compare what the one before it has told."""
        audit = self.audit
        if audit is None or not self.calm or self.size < 2:
            return
        told = audit.due(now_s)
        if told is not None:
            self._send((self.rank + 1) % self.size, Message(told=told))
        found = audit.differs()
        if found is not None:
            peer, number = found
            # Views hold the last few calls, of which the rule finds the first that differs; a claim says what is known beyond them.
            known = audit.call(number) is not None or audit.last() < number
            claim = None if known else audit.claim(self.rank, peer, number, lambda r: f"rank {self.names[r]}")
            self.alarm(now_s, "diverged", claim)

    def tick(self, now_s: float) -> None:
        if now_s < self.next_s or self.verdict is not None:
            return
        if self._differ and self.calm:
            self.alarm(now_s, "diverged")
            return
        if self._complete:
            self._conclude()
            return
        unheard = self._unheard()
        if not self._needed:
            self._needed = True
            if unheard:
                self._own()
                for peer in range(self.size):
                    if self.links[peer] == UP:
                        self._send(peer, Message(need=unheard))
        if now_s < self.alarmed_s + self.grace_s:
            self.next_s = self.alarmed_s + self.grace_s
            return
        # Whoever has said nothing within the grace is judged by its kernel, once: views are final after this.
        for peer in unheard:
            self.links[peer] = self.judge(peer)
        if not self.views[self.rank].final:
            self._own(final=True)
        self.next_s = self.alarmed_s + self._patience_s()
        self._settle(now_s)
        if now_s >= self.alarmed_s + self._patience_s():
            self._conclude()

    # ---- inside ------------------------------------------------------------------------------------------------
    def _own(self, *, claim: Claim | None = None, final: bool = False) -> None:
        """This rank's view, anew, to everybody. What it waited for when the alarm came stays: an abort would hide it."""
        before = self.views.get(self.rank)
        # The first look counts: the abort that follows ends the waits that it shows.
        view = self.look() if before is None else before
        if claim is None and before is not None:
            claim = before.claim
        view = msgspec.structs.replace(
            view, links="".join(self.links), final=final or (before is not None and before.final), why=self._why or view.why,
            claim=claim, state="failed" if claim is not None else view.state,
        )  # fmt: skip
        self.views[self.rank] = view
        for peer in range(self.size):
            if peer != self.rank and self.links[peer] != DEAD:
                self._send(peer, Message(view=view))

    def _learn(self, now_s: float, view: View) -> None:
        before = self.views.get(view.rank)
        if before is not None and ((before.final and not view.final) or (before.claim is not None and view.claim is None)):
            return
        self.views[view.rank] = view
        for source, target in self._relay:
            if source == view.rank and target != self.rank:
                self._send(target, Message(view=view))
        if view.state not in LEFT or view.claim is not None:
            self.alarm(now_s)

    def _farewell(self, peer: int) -> bool:
        view = self.views.get(peer)
        return view is not None and (view.state in LEFT or view.claim is not None)

    def _unheard(self) -> list[int]:
        return [p for p in range(self.size) if p != self.rank and self.links[p] not in (UP, DEAD)]

    def _settle(self, now_s: float) -> None:
        """Views become final when every link is known; the first fit rank concludes when all views are final."""
        if self.verdict is not None or self.alarmed_s == math.inf:
            return
        own = self.views[self.rank]
        if not own.final and not self._unheard():
            self._own(final=True)
        if not self._fit() or self._fit()[0] != self.rank or not self.views[self.rank].final:
            return
        if all(self._accounted(r) for r in range(self.size)):
            self._complete, self.next_s = True, now_s  # not here: a verdict may lie unread in another connection

    def _accounted(self, rank: int) -> bool:
        view = self.views.get(rank)
        if view is None:
            return self.links[rank] != UNKNOWN and self.links[rank] != UP
        return view.final or view.state in LEFT or view.claim is not None or self.links[rank] == DEAD

    def _fit(self) -> list[int]:
        """Ranks that can conclude: those that were heard, stay, and have no failure of their own; all that were heard where there are none."""
        fit = [r for r, v in sorted(self.views.items()) if v.state not in LEFT and v.claim is None and self.links[r] != DEAD]
        return fit or sorted(self.views)

    def _patience_s(self) -> float:
        fit = self._fit()
        place = fit.index(self.rank) if self.rank in fit else len(fit)
        # Half a grace apart, so a verdict has time to arrive before the next rank makes its own.
        return self.grace_s * (1.5 + 0.5 * place)

    def _conclude(self) -> None:
        try:
            found = first_cause(self.views, self.size, self.names)
        except Exception as error:  # a view that makes no sense must not keep everybody waiting
            text = f"the ranks' views contradict each other: {type(error).__name__}: {error}"
            found = Verdict(code="group-failed", message=text, rank=self.rank, how="unknown")
        self._end(found, self.rank)

    def _end(self, verdict: Verdict, source: int) -> None:
        if self.verdict is not None:
            return
        self.verdict, self.next_s = verdict, math.inf
        for peer in range(self.size):
            if peer not in (self.rank, source) and self.links[peer] != DEAD:
                self._send(peer, Message(verdict=verdict))

    def _send(self, peer: int, message: Message) -> None:
        self.out.append((peer, message))


