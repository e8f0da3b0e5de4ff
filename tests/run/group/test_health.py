"""Control connections with real sockets: ranks as threads, each with a listener of its own."""

from __future__ import annotations

import json
import math
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.errors import (
    FormatError,
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
)  # fmt: skip
from meshwright.run.group import control as control_module
from meshwright.run.group import health as health_module
from meshwright.run.group.addresses import own_address, transferred
from meshwright.run.group.agreement import DEAD, Agreement
from meshwright.run.group.control import MAX_SAMPLES, Control, Member, _Connection
from meshwright.run.group.control_frames import MAX_FRAME_BYTES, PROTOCOL_VERSION, Hello, frame
from meshwright.run.group.health import GroupHealth, claim_of, error_of, grace_s, refuse
from meshwright.run.group.verdict import CRAWLS, CUT, SILENT, Claim, Verdict, View, first_cause
from meshwright.run.group.work import PlannedWork

pytestmark = pytest.mark.timeout(250)


@pytest.fixture(autouse=True)
def listeners(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Control]]:
    """A control thread per rank, though they share a process; all must have ended afterwards."""
    made: list[Control] = []

    def alone(address: str) -> Control:
        found = Control(address)
        found.users = 1
        made.append(found)
        return found

    monkeypatch.setattr(health_module, "control", alone)
    yield made
    for each in made:
        assert not each._thread.is_alive(), "a control thread was left"


class Ranks:
    """`size` healths that have met. The deadline is long, so that silence which is judged is no busy machine's: the grace is a quarter of it."""

    def __init__(self, size: int, timeout_s: float = 12.0, absent: tuple[int, ...] = ()) -> None:
        self.store = dist.HashStore()
        self.ended: dict[int, MeshwrightError] = {}
        self.raised: dict[int, BaseException] = {}
        self.views = {r: View(rank=r, number=4, asked=4) for r in range(size)}
        self.all: dict[int, GroupHealth] = {}
        threads = [threading.Thread(target=self._meet, args=(r, size, timeout_s)) for r in range(size) if r not in absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _meet(self, rank: int, size: int, timeout_s: float) -> None:
        def ended(error: MeshwrightError) -> None:
            self.ended[rank] = error

        health = GroupHealth(dist.PrefixStore("g", self.store), rank, size, range(10, 10 + size), timeout_s, lambda: self.views[rank], ended)
        try:
            health.meet(timeout_s)
            self.all[rank] = health
        except MeshwrightError as error:
            self.raised[rank] = error

    def wait(self, ranks: list[int], limit_s: float = 60.0) -> list[MeshwrightError]:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(r not in self.ended for r in ranks):
            time.sleep(0.005)
        return [self.ended[r] for r in ranks]

    def die(self, rank: int) -> None:
        """Close its connections as the kernel does for a killed process."""
        health = self.all[rank]
        assert health._member is not None
        member = health._member
        health._control.call(lambda: [health._control._drop(c, quiet=True) for c in list(member.connections.values())])  # type: ignore[func-returns-value]

    def seen(self, rank: int, peer: int) -> Agreement:
        """What a rank makes of the end of its connection to a peer, once it has seen it."""
        member = self.all[rank]._member
        assert member is not None
        while peer in member.connections:
            time.sleep(0.005)
        self.all[rank]._control.flush(60.0)
        return member.agreement

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for health in self.all.values():
            health.close()


def alike(errors: list[MeshwrightError]) -> MeshwrightError:
    assert len({(type(e), e.message, e.where, str(e.data)) for e in errors}) == 1
    return errors[0]


def test_a_dead_rank_is_named_by_all_at_once() -> None:
    with Ranks(4) as ranks:
        ranks.views[0] = View(rank=0, state="walking", number=5, asked=5, step=7, peer=2, receives=True, waiting=True, text="step 7 of rank 0")
        ranks.die(2)
        error = alike(ranks.wait([0, 1, 3]))
        assert isinstance(error, RankDied) and error.data["rank"] == 12 and error.data["link"] == "12 -> 10" and error.data["step"] == 7
        assert error.where == "step 7 of rank 0" and set(error.data["views"]) == {"10", "11", "13"}
        with pytest.raises(RankDied):
            ranks.all[1].check()


def test_a_failure_of_its_own_reaches_all_and_comes_back() -> None:
    with Ranks(3) as ranks:
        found = ranks.all[1].fail(claim_of(ValueError("planted\nhere"), 1, (10, 11, 12), "collective 5"))
        error = alike([found, *ranks.wait([0, 1, 2])])
        assert isinstance(error, RankFailed) and error.message == "rank 11 failed in collective 5: ValueError: planted here"


def test_a_deadline_names_who_has_not_come() -> None:
    with Ranks(3) as ranks:
        ranks.views[0] = View(rank=0, state="walking", number=5, asked=5, step=3, peer=1, receives=True, waiting=True, waited_s=2.0)
        found = ranks.all[0].lost("deadline")
        error = alike([found, *ranks.wait([1, 2])])
        assert isinstance(error, RunTimeout) and error.data["rank"] == 11 and "has not come to collective 5" in error.message


def test_a_farewell_is_no_alarm_until_somebody_misses_the_rank() -> None:
    with Ranks(3) as ranks:
        ranks.all[2].leave("exited")
        ranks.die(2)
        for rank in (0, 1):
            agreement = ranks.seen(rank, 2)
            assert agreement.links[2] == DEAD and agreement.alarmed_s == math.inf
        assert not ranks.ended
        ranks.views[0] = View(rank=0, state="walking", number=5, asked=5, peer=2, receives=True, waiting=True, why="")
        found = ranks.all[0].lost("closed")
        error = alike([found, *ranks.wait([1])])
        assert isinstance(error, RankDied) and "rank 12 has ended" in error.message


def test_a_silent_rank_is_frozen() -> None:
    """Its kernel takes what is sent; nobody reads it."""
    with Ranks(3) as ranks:
        blocked = threading.Event()
        ranks.all[1]._control.call(lambda: blocked.wait(60) and None)
        ranks.views[0] = View(rank=0, state="walking", number=5, asked=5, peer=1, receives=True, waiting=True)
        found = ranks.all[0].lost("deadline")
        error = alike([found, *ranks.wait([2])])
        assert isinstance(error, RankFrozen) and error.data["rank"] == 11
        blocked.set()
        assert alike(ranks.wait([1, 0])) is not None, "it goes on, and hears the same"


def test_a_rank_that_never_comes(listeners: list[Control]) -> None:
    ranks = Ranks(3, timeout_s=8.0, absent=(1,))
    assert {type(e) for e in ranks.raised.values()} == {RunTimeout} and len(ranks.raised) == 2
    assert {str(e) for e in ranks.raised.values()} == {str(ranks.raised[0])} and "rank 11 did not come" in str(ranks.raised[0])


def test_a_rank_that_cannot_join_says_why() -> None:
    ranks = Ranks.__new__(Ranks)
    store = dist.HashStore()
    health_module.MAX_LINGER_S, before = 0.0, health_module.MAX_LINGER_S
    refuse(dist.PrefixStore("g", store), 1, 2, FormatError("is not a plan", where="plan.json"))
    health_module.MAX_LINGER_S = before
    ranks.store, ranks.ended, ranks.raised, ranks.views, ranks.all = store, {}, {}, {r: View(rank=r) for r in range(2)}, {}
    ranks._meet(0, 2, 5.0)
    assert isinstance(ranks.raised[0], RankFailed) and "rank 1 could not join: plan.json: is not a plan" in str(ranks.raised[0])


def test_a_rank_that_died_while_meeting(listeners: list[Control]) -> None:
    store = dist.HashStore()
    own = dist.PrefixStore("g", store)
    own.set("group", json.dumps({"group": "g", "token": "t"}))
    health = GroupHealth(own, 1, 2, (0, 1), 50.0, lambda: View(rank=1), lambda e: None)
    with socket.socket() as silent, pytest.raises(RankDied, match="rank 0 died while the group was made"):
        silent.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        own.set("meet/0", json.dumps({"address": "127.0.0.1", "port": silent.getsockname()[1]}))
        health.meet(50.0)


def test_a_store_that_dies(listeners: list[Control], monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))
    health = GroupHealth(dist.PrefixStore("g", client), 1, 2, (0, 1), 20.0, lambda: View(rank=1), lambda e: None)
    killer = threading.Timer(0.3, lambda: holder.clear())
    holder = [store]
    del store
    killer.start()
    with pytest.raises(MeshwrightError, match=r"rendezvous store failed|did not come"):
        health.meet(8.0)


# ---- strangers -----------------------------------------------------------------------------------------------------------
def strangers(port: int, group: str) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(1)
    yield "nothing", b""
    yield "noise", rng.randbytes(300)
    yield "a huge frame", struct.pack("!I", MAX_FRAME_BYTES + 1) + b"x" * 100
    yield "an early big frame", struct.pack("!I", 5000) + b"x" * 5000
    yield "a wrong token", frame(Hello(protocol=PROTOCOL_VERSION, group=group, token="guess", rank=1))
    yield "another version", frame(Hello(protocol=99, group=group, token="guess", rank=1))
    yield "another group", frame(Hello(protocol=PROTOCOL_VERSION, group="other", token="guess", rank=1))
    yield "nested", struct.pack("!I", 900) + b"[" * 900
    yield "HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(30):
        body = rng.randbytes(rng.randint(1, 200))
        yield "random body", struct.pack("!I", len(body)) + body


def test_strangers_change_nothing() -> None:
    with Ranks(3) as ranks:
        member = ranks.all[0]._member
        assert member is not None
        control = ranks.all[0]._control
        for what, data in strangers(control.port, member.group):
            with socket.create_connection((control.address, control.port), timeout=60) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(60)
                assert connection.recv(100) == b"", what  # no answer to anybody
        with socket.create_connection((control.address, control.port), timeout=60) as twin:  # the right token, but rank 1 is here already
            twin.sendall(frame(Hello(protocol=PROTOCOL_VERSION, group=member.group, token=member.token, rank=1)))
            twin.settimeout(60)
            assert twin.recv(100) == b""
        assert not ranks.ended and len(member.connections) == 2
        assert ranks.all[2].fail(Claim(code="rank-failed", message="planted", rank=2)).message == "planted"
        assert alike(ranks.wait([0, 1, 2])).message == "planted"


def test_a_peer_that_breaks_the_protocol_is_dropped() -> None:
    with Ranks(3) as ranks:
        member = ranks.all[1]._member
        assert member is not None
        ranks.all[1]._control.call(lambda: member.connections[0].socket.send(struct.pack("!I", 5) + b"[[[[["))  # type: ignore[arg-type, return-value]
        errors = ranks.wait([0])
        assert errors[0].data["rank"] in (10, 11)


def test_a_mistake_in_one_call_does_not_end_the_thread(capfd: pytest.CaptureFixture[str]) -> None:
    with Ranks(2) as ranks:
        ranks.all[0]._control.call(lambda: 1 // 0 and None)
        assert ranks.all[1].fail(Claim(code="rank-failed", message="planted", rank=1)).message == "planted"
        assert alike(ranks.wait([0, 1])).message == "planted"
    assert "ZeroDivisionError" in capfd.readouterr().err


# ---- small parts -----------------------------------------------------------------------------------------------------------
def test_bytes_of_a_connection_are_seen() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_connection(server.getsockname()) as out:
        into, _ = server.accept()
        with into:
            before = transferred({"127.0.0.2"})["127.0.0.2"]
            out.sendall(b"x" * 10_000)
            assert into.recv(10_000, socket.MSG_WAITALL)
            assert transferred({"127.0.0.2"})["127.0.0.2"] - before >= 10_000
            assert transferred({"127.0.0.9"}) == {"127.0.0.9": 0}


@pytest.mark.parametrize(("still", "said"), [(MAX_SAMPLES - 1, CRAWLS), (MAX_SAMPLES, CUT)])
def test_a_slow_link_may_stall_for_a_while(still: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes move, then none for some samples, while nobody takes what this rank sends."""
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_connection(server.getsockname()) as out:
        agreement = Agreement(0, 2, 0.5, lambda: View(rank=0), lambda _: CUT)
        member = Member("group", "token", agreement, lambda _: None, lambda: True, 1.0)
        connection = member.connections[1] = _Connection(out, member, 1)
        connection.out += b"not taken"
        seen = 0

        def moving(hosts: set[str]) -> dict[str, int]:
            return dict.fromkeys(hosts, seen)

        monkeypatch.setattr(control_module, "transferred", moving)
        for k in range(10):
            seen += k < 10 - still
            member.sample(float(2 * k))
        assert member.judge(1) == said


def test_the_address_that_peers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address("") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert own_address("127.0.0.1").count(".") == 3
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert own_address("localhost") == "127.0.0.1"


def test_only_the_first_end_of_a_work_counts() -> None:
    work = PlannedWork([1], "a collective")
    future = work.get_future()
    work.finish(RankDied("rank 1 died"))
    work.finish()
    with pytest.raises(RankDied):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        future.wait()
    assert work.is_completed() and not work.is_success()


def test_grace_follows_the_deadline() -> None:
    assert [grace_s(t) for t in (0.1, 4.0, 1800.0)] == [0.5, 1.0, 3.0]


@pytest.mark.parametrize(
    "kind", [RankDied, RankFailed, RankFrozen, RankDiverged, LinkLost, LinkSlow, MessageDamaged, PlanMismatch, GroupFailed, RunTimeout]
)  # fmt: skip
def test_a_verdict_becomes_the_error_of_its_code(kind: type[MeshwrightError]) -> None:
    verdict = Verdict(code=kind.code, message="told", rank=1, source=1, target=0, step=4, where="here", hint="do", how="seen", views={"7": "idle"})
    error = error_of(verdict, (7, 9))
    assert type(error) is kind and str(error) == "here: told" and error.hint == "do"
    assert error.data == {"rank": 9, "step": 4, "link": "9 -> 7", "how": "seen", "views": {"7": "idle"}}


def test_unknown_codes_are_group_failures() -> None:
    assert error_of(Verdict(code="usage", message="x", rank=0), (3,)).code == "group-failed"
    assert isinstance(error_of(Verdict(code="link-slow", message="x", rank=0, source=0, target=1), (3, 4)), LinkSlow)


def test_a_leader_that_falls_silent_is_replaced() -> None:
    """Rank 0 says that it is there and then nothing more: rank 1 concludes after its patience."""
    clock = [0.0]
    agreement = Agreement(1, 3, 1.0, lambda: View(rank=1), lambda peer: SILENT)
    agreement.alarm(0.0, "closed")
    agreement.receive(0.1, 0, health_module.Message(view=View(rank=0)))
    agreement.receive(0.1, 2, health_module.Message(view=View(rank=2, final=True)))
    while agreement.verdict is None and clock[0] < 10:
        clock[0] = max(clock[0] + 0.01, min(agreement.next_s, 20.0))
        agreement.tick(clock[0])
    assert agreement.verdict is not None and 1.5 <= clock[0] <= 2.5
    assert all(message.verdict is not None for _, message in agreement.out[-2:])


def test_views_without_sense_end_the_round_all_the_same() -> None:
    agreement = Agreement(0, 2, 1.0, lambda: View(rank=0, state="walking", number=1, waiting=True, peer=99, why="deadline"), lambda peer: SILENT)
    agreement.alarm(0.0, "deadline")
    agreement.receive(0.1, 1, health_module.Message(view=View(rank=1, final=True)))
    agreement.tick(0.1)
    assert agreement.verdict is not None and agreement.verdict.code == "group-failed"


def test_a_collective_of_the_built_in_backend_names_who_has_not_called_it() -> None:
    inside = {r: View(rank=r, state="builtin", number=4, asked=6, why="closed" if r == 2 else "") for r in (0, 2)}
    found = first_cause({**inside, 1: View(rank=1, number=4, asked=5)}, 3, (10, 11, 12))
    assert (found.code, found.rank, found.how) == ("run-timeout", 1, "not there")
    assert "has not come to collective 6" in found.message and "it has called 5" in found.message
    found = first_cause({**inside, 1: View(rank=1, number=4, asked=6)}, 3, (10, 11, 12))
    assert (found.code, found.rank, found.how) == ("group-failed", 2, "closed") and "lost collective 6" in found.message


def test_what_cannot_be_sent_any_more_is_not_tried_again() -> None:
    """Else the loop would spin on a socket that is always ready until its end has been read."""
    control = Control.__new__(Control)
    ours, theirs = socket.socketpair()
    with ours, selectors.DefaultSelector() as control._selector:
        connection = _Connection(ours, None, -1)
        control._selector.register(ours, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        connection.out += b"more"
        theirs.close()
        control._write(connection)
        assert not connection.out and control._selector.get_key(ours).events == selectors.EVENT_READ


def test_nobody_knows_anything() -> None:
    assert first_cause({}, 2).code == "group-failed"
    assert first_cause({0: View(rank=0, links="?c")}, 2).code == "link-lost"
    alone = {r: View(rank=r, links="??c", final=True) for r in (0, 1)}
    found = first_cause(alone, 3, (5, 6, 7))
    assert found.rank == 2 and "rank 7 cannot be reached by anyone" in found.message
    assert CUT == "c"


def test_a_forked_child_lets_go_of_the_sockets() -> None:
    """Otherwise the death of the parent would go unseen while a child of it lives."""
    with Ranks(2) as ranks:
        member = ranks.all[0]._member
        assert member is not None
        control_module._controls["test"] = ranks.all[0]._control
        try:
            pid = os.fork()
            if pid == 0:
                connections = list(member.connections.values())
                closed = 0
                for connection in connections:
                    try:
                        os.fstat(connection.socket.fileno())
                    except OSError:
                        closed += 1
                os._exit(0 if closed == len(connections) == 1 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            control_module._controls.pop("test")


def test_a_farewell_is_sent_before_the_process_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the control thread comes so late that it finds the farewell and the wait for it at once."""
    with Ranks(2) as ranks:
        leaving = ranks.all[0]
        control, order, gate = leaving._control, [], threading.Event()
        send = control._send

        def slowly(member: control_module.Member) -> None:
            if member.agreement.out:
                time.sleep(0.2)
                send(member)
                order.append("sent")

        monkeypatch.setattr(control, "_send", slowly)
        control.call(lambda: gate.wait(60.0))  # type: ignore[arg-type, return-value]
        thread = threading.Thread(target=lambda: (leaving.leave("terminated"), order.append("left")))  # type: ignore[func-returns-value]
        thread.start()
        while len(control._calls) < 2 and thread.is_alive():
            time.sleep(0.001)
        gate.set()
        thread.join(60.0)
        assert order == ["sent", "left"]
