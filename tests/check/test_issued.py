"""NCCL's rules on orders of calls: by hand, and against every way in which small ones can go on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from check_random_programs import random_program

from effort import few
from meshwright.check.issued import MAX_GROUP_CALLS, check_issued
from meshwright.errors import CheckFailed, Deadlock
from meshwright.program.issued import CallOrders, Communicator, Issued, Message
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.rounds import compile_rounds, issued_orders


def send(peer: int, *, comm: int = 0, stream: int = 0, after: tuple[int, ...] = (), size: int = 4, step: int = -1) -> Issued:
    return Issued("messages", stream, comm, (Message(peer, True, size, step),), after)


def receive(peer: int, *, comm: int = 0, stream: int = 0, after: tuple[int, ...] = (), size: int = 4, step: int = -1) -> Issued:
    return Issued("messages", stream, comm, (Message(peer, False, size, step),), after)


def group(*entries: Issued) -> Issued:
    return replace(entries[0], messages=tuple(m for e in entries for m in e.messages))


def orders(*ranks: list[Issued], ready: bool = True, comms: int = 1) -> CallOrders:
    return CallOrders(tuple(map(tuple, ranks)), (Communicator(tuple(range(len(ranks))), ready),) * comms)


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_two_ranks_that_both_send_first_wait_for_each_other() -> None:
    verdict = check_issued(orders([send(1, step=3), receive(1)], [send(0, step=8), receive(0)]))
    (found,) = verdict.findings
    assert found.check == "deadlock" and found.witness["ranks"] == [0, 1] and found.witness["not_over"] == 4
    assert {c["step"] for c in found.witness["cycle"]} == {3, 8, -1}
    assert "rank 0, entry 0 (step 3), send to rank 1, waits for rank 1's end" in found.message
    with pytest.raises(Deadlock, match="in a circle"):
        verdict.raise_if_wrong()


def test_in_one_group_or_on_two_streams_they_do_not() -> None:
    assert check_issued(orders([group(send(1), receive(1))], [group(receive(0), send(0))])).ok
    apart = orders([send(1), receive(1, stream=1)], [send(0), receive(0, stream=1)])
    assert check_issued(apart).ok
    assert not check_issued(apart, in_issue_order=True).ok, "one queue runs them one after another"
    assert check_issued(apart).facts == {"ranks": 2, "groups": 4, "messages": 2, "largest_group": 1}


def test_a_communicator_is_made_where_all_hosts_come_to_it() -> None:
    """Receives posted ahead on communicators of their own, as torch makes them: each host stands at the one that the other has not come to."""
    ahead = [[receive(1, comm=0), send(1, comm=1, stream=1)], [receive(0, comm=1), send(0, comm=0, stream=1)]]
    verdict = check_issued(orders(*ahead, ready=False, comms=2))
    assert "makes its communicator, which waits for the host of rank" in verdict.findings[0].message
    assert check_issued(orders(*ahead, comms=2)).ok, "made before, their streams are independent"
    assert check_issued(orders([receive(1)], [Issued("work"), send(0)], ready=False)).ok


def test_what_comes_after_something_waits_for_it() -> None:
    early = [Issued("work"), receive(1, stream=1), Issued("work", after=(1,)), send(1, stream=1, after=(2,))]
    assert check_issued(orders(early, [send(0), receive(0)])).ok
    assert not check_issued(orders(early, [receive(0), send(0)])).ok
    behind = [send(1, stream=1), receive(1, stream=2, after=(0,))]
    assert not check_issued(orders(behind, [send(0), receive(0)])).ok, "the event holds the second stream"


def test_a_host_that_waits_issues_nothing() -> None:
    told = [receive(1), Issued("host", after=(0,)), send(1, stream=1)]
    assert check_issued(orders(told, [send(0), receive(0, stream=1)])).ok
    (found,) = check_issued(orders(told, [receive(0), send(0)])).findings
    assert "a wait of the host, waits for entry 0" in found.message and "is not issued before the host goes on" in found.message


def test_collectives_meet_in_the_order_of_their_calls() -> None:
    one, two = Issued("collective", 0, 0), Issued("collective", 1, 1)
    assert check_issued(orders([one, two], [two, one], comms=2)).ok
    assert not check_issued(orders([one, two], [two, one], comms=2), in_issue_order=True).ok
    assert not check_issued(orders([one, receive(1)], [send(0), one])).ok
    (found,) = check_issued(orders([one, one], [one])).findings
    assert found.check == "calls" and found.witness["made"] == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (([send(1, step=5)], []), r"rank 0's send to rank 1 \(step 5\) has no other end"),
        (([], [receive(0, step=6)]), r"rank 1's receive from rank 0 \(step 6\) has no other end"),
        (([send(1, size=8, step=1)], [receive(0, step=2)]), r"rank 0 sends 8 bytes where rank 1 receives 4 \(steps 1 and 2\)"),
        (([group(send(1), send(1))], [receive(0), receive(0)]), "ranks 0 and 1 group their calls differently"),
        (([group(send(1), receive(1))], [send(0), receive(0)]), "group their calls differently"),
        (([send(1, after=(0,))], [receive(0)]), "entry 0 of rank 0 comes after one that is not issued before it"),
        (([send(1, comm=1)], [receive(0)]), "a communicator that the rank is no member of"),
        (([send(0)], [receive(0)]), "has a peer outside its communicator"),
        (([group(*[send(1)] * (MAX_GROUP_CALLS + 1))], [group(*[receive(0)] * (MAX_GROUP_CALLS + 1))]), f"more than the {MAX_GROUP_CALLS} of NCCL"),
    ],
)  # fmt: skip
def test_what_nccl_forbids_is_named(ranks: tuple[list[Issued], list[Issued]], text: str) -> None:
    verdict = check_issued(orders(*ranks))
    assert verdict.findings[0].check == "calls" and verdict.findings[0].witness
    with pytest.raises(CheckFailed, match=text):
        verdict.raise_if_wrong()


def test_a_communicator_to_which_a_member_never_comes() -> None:
    given = CallOrders(((send(1),), (receive(0),), ()), (Communicator((0, 1, 2), ready=False),))
    (found,) = check_issued(given).findings
    assert found.check == "calls" and found.witness["absent"] == [2] and "rank 2 never comes" in found.message


def test_a_send_alone_in_a_group_of_another_pair_is_no_difference() -> None:
    """Rank 1 sends to both others in one group; each of them has one call with it."""
    assert check_issued(orders([receive(1)], [group(send(0), send(2))], [receive(1)])).ok


# ---- every way to go on ----------------------------------------------------------------------------------------------


def random_orders(seed: int) -> CallOrders:
    """2 or 3 ranks and a few exchanges of one to three messages each, put into the ranks' orders at random places."""
    rng = random.Random(seed)
    n, comms = rng.randint(2, 3), rng.randint(1, 2)
    ranks: list[list[Issued]] = [[] for _ in range(n)]
    for _ in range(rng.randint(1, 4)):
        comm, stream = rng.randrange(comms), rng.randrange(2)
        if rng.random() < 0.15:
            for r in range(n):
                ranks[r].insert(rng.randint(0, len(ranks[r])), Issued("collective", stream, comm))
            continue
        pairs = {tuple(rng.sample(range(n), 2)) for _ in range(rng.choice([1, 1, 1, 2, 3]))}
        for r in range(n):
            calls = tuple(Message(b if r == a else a, r == a) for a, b in sorted(pairs) if r in (a, b))
            if calls:
                ranks[r].insert(rng.randint(0, len(ranks[r])), Issued("messages", rng.choice([stream, rng.randrange(2)]), comm, calls))
    for entries in ranks:
        if rng.random() < 0.4:
            entries.insert(rng.randint(0, len(entries)), Issued("work", rng.randrange(2)))
        if rng.random() < 0.2:
            entries.insert(rng.randint(0, len(entries)), Issued("host"))
        for i in range(1, len(entries)):
            if entries[i].kind == "host" or rng.random() < 0.25:
                entries[i] = replace(entries[i], after=(rng.randrange(i),))
    return CallOrders(tuple(map(tuple, ranks)), tuple(Communicator(tuple(range(n)), rng.random() < 0.7) for _ in range(comms)))


class Explorer:
    """All states that the calls can come to, one small event at a time. Says of each event whether it may happen now, from the rules' words alone."""

    def __init__(self, given: CallOrders, one_queue: bool) -> None:
        self.given, self.one_queue = given, one_queue

    def met(self, rank: int, number: int, k: int) -> tuple[int, int] | None:
        """The entry with the other end of call k, by counting."""
        entry = self.given.ranks[rank][number]
        call = entry.messages[k]
        mine = [
            (n, i) for n, e in enumerate(self.given.ranks[rank]) if e.comm == entry.comm and e.kind == "messages"
            for i, m in enumerate(e.messages) if (m.peer, m.sends) == (call.peer, call.sends)
        ]  # fmt: skip
        theirs = [
            n for n, e in enumerate(self.given.ranks[call.peer]) if e.comm == entry.comm and e.kind == "messages"
            for m in e.messages if (m.peer, m.sends) == (rank, not call.sends)
        ]  # fmt: skip
        return (call.peer, theirs[mine.index((number, k))])

    def events(self, state: frozenset[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """("come" to a communicator | "issue" | "begin" | "end", rank, number) that may happen next."""
        found = []
        for rank, entries in enumerate(self.given.ranks):
            issued = [n for n in range(len(entries)) if ("issue", rank, n) in state]
            over = {n for n in issued if ("end", rank, n) in state}
            if len(issued) < len(entries):
                n = len(issued)
                entry = entries[n]
                made = entry.comm < 0 or self.given.communicators[entry.comm].ready or all(
                    any(e == "come" and r == m and self.given.ranks[r][x].comm == entry.comm for e, r, x in state)
                    for m in self.given.communicators[entry.comm].members
                )  # fmt: skip
                if not made:
                    found.append(("come", rank, n))
                elif entry.kind != "host" or over.issuperset(entry.after):
                    found.append(("issue", rank, n))
            for n in issued:
                entry = entries[n]
                before = [m for m in issued if m < n and entries[m].kind != "host" and (self.one_queue or entries[m].stream == entry.stream)]
                if entry.kind == "host" or (over.issuperset(before) and over.issuperset(entry.after)):
                    found.append(("begin", rank, n))
                if ("begin", rank, n) in state and all(("begin", *other) in state for other in self.others(rank, n)):
                    found.append(("end", rank, n))
        return [e for e in found if e not in state]

    def others(self, rank: int, number: int) -> list[tuple[int, int]]:
        entry = self.given.ranks[rank][number]
        if entry.kind == "collective":
            turn = [n for n, e in enumerate(self.given.ranks[rank]) if e.kind == "collective" and e.comm == entry.comm].index(number)
            return [
                (r, [n for n, e in enumerate(self.given.ranks[r]) if e.kind == "collective" and e.comm == entry.comm][turn])
                for r in self.given.communicators[entry.comm].members
            ]  # fmt: skip
        return [self.met(rank, number, k) for k in range(len(entry.messages))]

    def last_states(self, rng: random.Random, every: bool) -> set[bool]:
        """Whether all is over, in every state from which nothing goes on (or in those that 20 random ways lead to)."""
        everything = sum(map(len, self.given.ranks))
        ends: set[bool] = set()
        seen: set[frozenset[tuple[str, int, int]]] = set()
        todo = [frozenset()] * (1 if every else 20)
        while todo:
            state = todo.pop()
            events = self.events(state)
            if not events:
                ends.add(sum(e == "end" for e, _, _ in state) == everything)
            for event in events if every else [rng.choice(events)] if events else []:
                then = state | {event}
                if not every or then not in seen:
                    seen.add(then)
                    todo.append(then)
        return ends


@pytest.mark.parametrize("one_queue", [False, True])
def test_the_answer_is_that_of_every_way_to_go_on(one_queue: bool) -> None:
    deadlocks = fine = explored = 0
    for seed in range(few(400)):
        given = random_orders(seed)
        verdict = check_issued(given, in_issue_order=one_queue)
        if any(f.check == "calls" for f in verdict.findings):
            continue
        every = sum(map(len, given.ranks)) <= 6
        explored += every
        ends = Explorer(given, one_queue).last_states(random.Random(seed), every)
        assert ends == {verdict.ok}, (seed, given, verdict)
        deadlocks, fine = deadlocks + (not verdict.ok), fine + verdict.ok
        if not verdict.ok:
            cycle = verdict.findings[0].witness["cycle"]
            assert len({(c["rank"], c["entry"]) for c in cycle}) == len(cycle) >= 2
    assert min(deadlocks, fine, explored) > few(40), (deadlocks, fine, explored)


def test_what_ends_in_the_order_of_issue_ends_under_any_streams() -> None:
    """The stricter rule is stricter."""
    for seed in range(few(3000)):
        given = random_orders(seed)
        if check_issued(given, in_issue_order=True).ok:
            assert check_issued(given).ok, seed


def test_what_the_executor_issues_for_random_programs_ends_as_issued() -> None:
    judged = refused = 0
    for seed in range(few(2000)):
        program = random_program(seed, max_repeat=1, max_messages=12)
        try:
            orders = fuse_lanes(program)
        except Deadlock:
            refused += 1
            continue
        judged += 1
        verdict = check_issued(issued_orders(program, compile_rounds(program, orders)), in_issue_order=True)
        assert verdict.ok, (seed, verdict.findings)
    assert judged > few(1000) and refused > few(100)
