"""A group's health: its ranks meet, watch each other, and end with the same typed error.

`meet` exchanges addresses and a token through the group's store and connects all pairs; it is the only use of the store, which may die with a rank.
Afterwards a failure is told with `lost` (a wait), `fail` (an exception of this rank) or found by the control thread itself; `agreement` makes one
verdict of it, and `ended` is called with the error, in the control thread.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...errors import (
    GroupFailed,
    LinkLost,
    LinkSlow,
    MeshwrightError,
    MessageDamaged,
    PlanMismatch,
    RankDied,
    RankDiverged,
    RankFailed,
    RankFrozen,
    RunTimeout,
)
from .addresses import own_address
from .agreement import Agreement, Message
from .audit import Audit
from .control import SAMPLES_PER_TIMEOUT, Member, control, release
from .control_frames import PROTOCOL_VERSION, Hello, frame
from .pairs import Note, Pairs
from .verdict import Claim, Verdict, View, rank_list

__all__ = ["GroupHealth", "claim_of", "error_of", "grace_s", "refuse", "store_host"]

MAX_LINGER_S = 2.0  # that a rank which ends the meeting stays, so that the others can read why from a store that may live in its process
AGREE_POLL_S = 0.02  # between two looks at whether the group has failed
_CLASSES: dict[str, type[MeshwrightError]] = {
    kind.code: kind
    for kind in (RankDied, RankFailed, RankFrozen, RankDiverged, LinkLost, LinkSlow, MessageDamaged, PlanMismatch, GroupFailed, RunTimeout)
}


class _Place(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a rank publishes when it comes; `claim`: it cannot come, and why."""

    address: str = ""
    port: int = 0
    claim: Claim | None = None


class _Group(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    group: str
    token: str


def grace_s(timeout_s: float) -> float:
    """How long silent ranks are waited for once something is wrong: a quarter of the deadline, 0.5 s at least, 3 s at most."""
    return min(3.0, max(0.5, timeout_s / 4))


def error_of(verdict: Verdict, names: Sequence[int]) -> MeshwrightError:
    """The error that every rank raises: same class, code, message and data everywhere."""

    def name(rank: int) -> int:
        return names[rank] if 0 <= rank < len(names) else rank

    kind = _CLASSES.get(verdict.code, GroupFailed)
    linked = verdict.source >= 0 and verdict.target >= 0
    data = {
        "rank": name(verdict.rank), "step": verdict.step, "link": f"{name(verdict.source)} -> {name(verdict.target)}" if linked else "",
        "how": verdict.how, "views": dict(verdict.views),
    }  # fmt: skip
    return kind(verdict.message, where=verdict.where, hint=verdict.hint, data=data)


def store_host(store: Any) -> str:
    """Host of the TCP store below any prefixes; '' for other stores."""
    for _ in range(8):
        host = getattr(store, "host", None)
        if isinstance(host, str):
            return host
        below = getattr(store, "underlying_store", None)
        if below is None:
            return ""
        store = below
    return ""


class GroupHealth:
    """`look()`: this rank's view. `ended(error)`: the group is over. `busy()`: a collective is under way."""

    def __init__(
        self, store: Any, rank: int, size: int, names: Sequence[int], timeout_s: float, look: Callable[[], View],
        ended: Callable[[MeshwrightError], None], busy: Callable[[], bool] = lambda: True, audit: Audit | None = None,
    ) -> None:  # fmt: skip
        self._busy, self._audit = busy, audit
        self.store, self.rank, self.size, self.names, self.timeout_s = store, rank, size, tuple(names), timeout_s
        self.error: MeshwrightError | None = None
        self.run = ""
        self._ended, self._look = ended, look
        self._known = threading.Event()
        self._closed = self._left = False
        self.grace_s = grace_s(timeout_s)
        self.agreement = Agreement(rank, size, self.grace_s, look, lambda peer: "?", self.names)
        self._control = control(own_address(store_host(store)))
        self._member: Member | None = None

    # ---- coming together ---------------------------------------------------------------------------------------
    def meet(self, limit_s: float) -> None:
        """Raises: the error that stopped the group, the same at all ranks that live."""
        try:
            self._meet(time.monotonic() + limit_s, limit_s)
        except MeshwrightError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise GroupFailed(
                f"the rendezvous store failed: {error}", where=f"rank {self.names[self.rank]}",
                hint="it lives with rank 0, or with torchrun's agent: has that process died?", data={"rank": 0},
            ) from error  # fmt: skip

    def _meet(self, deadline: float, limit_s: float) -> None:
        if self.rank == 0:
            made = _Group(group=secrets.token_hex(8), token=secrets.token_hex(16))
            self.store.set("group", msgspec.json.encode(made))
        self._come(["group"], deadline, limit_s, 0)
        told = msgspec.json.decode(self.store.get("group"), type=_Group)
        self.run = told.group
        period_s = min(30.0, max(0.1, self.timeout_s / SAMPLES_PER_TIMEOUT))
        member = self._member = Member(told.group, told.token, self.agreement, self._over, self._busy, period_s)
        # Before the address is published: a peer may connect the moment it can be read, and must be known by then.
        self._control.join(member)
        mine = _Place(address=self._control.address, port=self._control.port)
        self.store.set(f"meet/{self.rank}", msgspec.json.encode(mine))
        for peer in range(self.size):
            if peer != self.rank:
                self._come([f"meet/{peer}"], deadline, limit_s, peer)
        for peer in range(self.size):
            place = msgspec.json.decode(self.store.get(f"meet/{peer}"), type=_Place)
            if place.claim is not None:
                self._heard()
                raise error_of(_of_claim(place.claim), self.names)
            # The higher rank connects: one connection per pair, and no two ranks connect to each other at once.
            if peer < self.rank:
                self._connect(member, peer, place, told, deadline)
        while not member.attached.wait(0.02):
            self.check()
            self._stopped()
            if time.monotonic() > deadline:
                away = [r for r in range(self.size) if r != self.rank and r not in member.connections]
                raise self._stop(away[0], "run-timeout", f"no control connection with {rank_list([self.names[r] for r in away])}")
        self._control.call(lambda: setattr(self.agreement, "audit", self._audit))  # there: it wakes the thread, which waits for no clock yet

    def _connect(self, member: Member, peer: int, place: _Place, told: _Group, deadline: float) -> None:
        try:
            connection = socket.create_connection((place.address, place.port), timeout=max(0.1, min(10.0, deadline - time.monotonic())))
        except ConnectionRefusedError as error:
            raise self._stop(peer, "rank-died", f"rank {self.names[peer]} died while the group was made") from error
        except OSError as error:
            text = f"rank {self.names[self.rank]} cannot reach rank {self.names[peer]} at {place.address}: {error}"
            raise self._stop(peer, "link-lost", text, link=True) from error
        hello = Hello(protocol=PROTOCOL_VERSION, group=told.group, token=told.token, rank=self.rank)
        connection.sendall(frame(hello))
        self._control.attach(member, peer, connection)

    def _come(self, keys: list[str], deadline: float, limit_s: float, whose: int) -> None:
        """Wait for keys of the store that rank `whose` sets. Raises: what has ended the group; RunTimeout naming that rank."""
        pause = 0.0005
        while not self.store.check(keys):
            self.check()
            if time.monotonic() > deadline:
                raise self._stop(whose, "run-timeout", f"rank {self.names[whose]} did not come within {limit_s:g} s")
            self._stopped()
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)

    def _stop(self, culprit: int, code: str, text: str, link: bool = False) -> MeshwrightError:
        """End the meeting for everybody, by the store."""
        claim = Claim(code=code, message=text, rank=culprit, peer=self.rank if link else -1, hint="see that rank's output; has it been started?")
        with contextlib.suppress(Exception):
            self.store.set("stop", msgspec.json.encode(claim))
        _linger(self.store, self.rank, self.size)
        return error_of(_of_claim(claim), self.names)

    def _stopped(self) -> None:
        if self.store.check(["stop"]):
            claim = msgspec.json.decode(self.store.get("stop"), type=Claim)
            self._heard()  # only now: whoever set it may hold the store, and leaves once all have heard
            raise error_of(_of_claim(claim), self.names)

    def _heard(self) -> None:
        with contextlib.suppress(Exception):
            self.store.set(f"heard/{self.rank}", "1")

    # ---- failures ----------------------------------------------------------------------------------------------
    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def agree(self, what: tuple[int, int, int], timeout_s: float) -> None:
        """Wait until all ranks are about to call (number, call, bytes). Raises: the error that ended the group; that of a deadline."""
        agreed, deadline = threading.Event(), time.monotonic() + timeout_s
        self._control.call(lambda: self.agreement.ask(time.monotonic(), what, agreed.set))
        while not agreed.wait(AGREE_POLL_S):
            self.check()
            if time.monotonic() > deadline:
                raise self.lost("deadline")

    def pairs(self) -> Pairs:
        """Compares the user's own messages between two ranks; see `pairs`."""

        def tell(peer: int, note: Note) -> None:
            self._control.call(lambda: self.agreement.out.append((peer, Message(note=note))))

        def alarm(claim: Claim) -> None:
            self._control.call(lambda: self.agreement.alarm(time.monotonic(), "diverged", claim))

        found = Pairs(self.rank, self.names, tell, alarm)
        self.agreement.noted = found.hear
        return found

    def lost(self, why: str) -> MeshwrightError:
        """A wait of this rank was lost. Gives the verdict of the group, when there is one."""
        self._control.call(lambda: self.agreement.alarm(time.monotonic(), why))
        return self._verdict()

    def fail(self, claim: Claim) -> MeshwrightError:
        """Something of this rank's own failed."""
        self._control.call(lambda: self.agreement.alarm(time.monotonic(), "", claim))
        return self._verdict()

    def leave(self, state: str, claim: Claim | None = None) -> None:
        """Tell all peers that this process goes, without waiting for what they make of it."""
        if self._closed or self._left or self._member is None:
            return
        # Once: a process that is told to end runs its handler and then its normal end.
        self._left = True
        view = self._look()
        view.state, view.claim, view.final = ("failed" if claim is not None else state), claim, True

        def tell() -> None:
            agreement = self.agreement
            if agreement.verdict is None:
                agreement.out += [(peer, Message(view=view)) for peer in range(self.size) if peer != self.rank]

        self._control.call(tell)
        self._control.flush(1.0)  # on a busy machine the control thread may come late

    def _verdict(self) -> MeshwrightError:
        """Wait for the verdict; the last rank's patience bounds it."""
        # As long as all ranks may take in turn to conclude (`agreement`), and a little more for a busy machine.
        if not self._known.wait(self.grace_s * (2.5 + 0.5 * self.size) + 2.0) or self.error is None:
            return GroupFailed("the ranks did not agree on what failed", where=f"rank {self.names[self.rank]}", data={"rank": self.names[self.rank]})
        return self.error

    def _over(self, verdict: Verdict) -> None:
        self.error = error_of(verdict, self.names)
        # Before the waits are ended: whoever wakes by that must find the error.
        self._known.set()
        self._ended(self.error)

    def close(self) -> None:
        if self._closed:
            return
        if self._member is not None:
            self.leave("closed")
            self._closed = True
            self._control.flush(0.3)
            self._control.leave(self._member)
        self._closed = True
        release(self._control)


def claim_of(error: Exception, rank: int, names: Sequence[int], during: str) -> Claim:
    """What a rank says of its own exception. Typed errors may name another rank and a link: a damaged message is its sender's."""
    name = names[rank]
    if isinstance(error, MeshwrightError):
        code = error.code if error.code in _CLASSES else "rank-failed"
        culprit, peer, step = (error.data.get(k, d) for k, d in (("group_rank", rank), ("group_peer", -1), ("step", -1)))
        return Claim(code=code, message=error.message, rank=culprit, peer=peer, step=step, where=error.where, hint=error.hint)
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return Claim(code="rank-failed", message=f"rank {name} failed in {during}: {text}", rank=rank, hint=f"see the output of rank {name}")


def _linger(store: Any, rank: int, size: int) -> None:
    """Stay until the others have read what was written, for the store may live in this process; but not long."""
    deadline = time.monotonic() + MAX_LINGER_S
    with contextlib.suppress(Exception):
        while time.monotonic() < deadline and not store.check([f"heard/{r}" for r in range(size) if r != rank]):
            time.sleep(0.01)


def refuse(store: Any, rank: int, size: int, error: MeshwrightError) -> None:
    """This rank cannot join a group that others wait for: tell them why."""
    code = error.code if error.code in _CLASSES else "rank-failed"
    claim = Claim(code=code, message=f"rank {rank} could not join: {error}", rank=rank, where=error.where, hint=error.hint)
    with contextlib.suppress(Exception):
        store.set(f"meet/{rank}", msgspec.json.encode(_Place(claim=claim)))
        store.set("stop", msgspec.json.encode(claim))
    _linger(store, rank, size)


def _of_claim(claim: Claim) -> Verdict:
    source, target = (claim.rank, claim.peer) if claim.peer >= 0 else (-1, -1)
    return Verdict(
        code=claim.code, message=claim.message, rank=claim.rank, source=source, target=target, step=claim.step, where=claim.where, hint=claim.hint,
        how="claimed",
    )  # fmt: skip
