"""A session on an engine that fails: nothing is lost, nothing happens twice, and the journal takes up where it broke off."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from engine_fakes import SERVERS, Faulty

from effort import few
from meshwright.cluster import Given, Part, Queue, QueuedJob, Server, Servers
from meshwright.cluster.generate import UNPROFILED
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import Rounds, given_of
from meshwright.drive.cluster_kept import Kept
from meshwright.errors import EngineAway, FormatError, RunTimeout, UsageError
from meshwright.run.engines import Driver, Session
from meshwright.run.engines.audited import audit
from meshwright.run.engines.driven import Ran
from meshwright.run.engines.interface import Seen
from meshwright.run.engines.overheads import Overheads, fit_overheads, predict

SIZES = (1, 2, 4, 1, 3, 2)


def queue_of(sizes=SIZES):
    return Queue(profiles=(UNPROFILED,), jobs=tuple(
        QueuedJob(name=f"j{i}", gpus=g, profile="unprofiled", arrival_s=0.0, duration_s=1.0, command=("true",)) for i, g in enumerate(sizes)
    ))  # fmt: skip


def policy(queue):
    return Kept(servers=SERVERS, queue=queue, order=order("fifo")(), allocation=allocation("proportional")())


def driver(session, queue, **options):
    return Driver(session=session, servers=SERVERS, queue=queue, policy=policy(queue), poll_s=0.0, per="server",
                  given=lambda n, parts: tuple(given_of(SERVERS, queue, n, parts)), **options)  # fmt: skip


@pytest.mark.parametrize("seed", range(few(20)))
def test_nothing_is_lost_and_nothing_is_done_twice(tmp_path, seed):
    """Faults before and after every call, jobs forgotten while they are held, second copies; the process is broken off twice on the way."""
    engine, queue = Faulty(seed, 0.2), queue_of()
    for turn in range(3):
        with Session(engine, tmp_path / "run") as session:
            d = driver(session, queue, patience_s=60.0, limit_s=1e9)
            if turn == 2:
                d.run()
                continue
            steps = iter(range(4 * (turn + 1)))

            def stop(steps=steps, d=d):
                if next(steps, None) is None:
                    raise KeyboardInterrupt

            whole = d._turn
            d._turn = lambda whole=whole, stop=stop: (stop(), whole())
            try:
                d.run()
            except KeyboardInterrupt:
                pass
    assert engine.done == {f"j{i}": 1 for i in range(len(SIZES))} and all(r.code == 0 for r in d.ran)
    found = audit(tmp_path / "run")
    assert found.verdict.ok and not found.unfinished and not found.failed and found.verdict.facts["jobs"] == len(SIZES)


def test_actions_may_be_repeated_and_the_journal_says_each_once(tmp_path):
    engine = Faulty(0, 0.0)
    given = [Given(job="a", server="s0", gpus=("s0g1",), cores=2, memory_bytes=1 << 30)]
    with Session(engine, tmp_path) as s:
        for _ in range(2):
            s.submit("a", ["true"], number=0)
            s.place("a", given)
        for _ in range(2):
            s.start(["a"])
        with pytest.raises(UsageError, match="drives this run"):
            Session(engine, tmp_path)
        while not [e for e in s.watch() if e.what == "ended"]:
            pass
        assert s.audit("a") == tuple(given) and s.watch() == []
    lines = [json.loads(x)["what"] for x in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert lines == ["run", "submit", "place", "held", "start", "released", "running", "ended", "note"]
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"what": "cancel", "time_s": 1')  # cut short by a kill
    with Session(engine, tmp_path) as s:
        s.submit("a", ["true"], number=0)
        s.place("a", given)
        s.start(["a"])
        assert s.jobs["a"].now == "ended" and engine.done == {"a": 1}


def test_a_job_that_begins_while_the_engine_is_asked_goes_on(tmp_path):
    """The engine says that it waits; before anybody reads the answer its launcher has written its note."""

    class Late(Faulty):
        let_go, cancelled = None, 0

        def start(self, works):
            self.let_go = works[0]

        def look(self, works):
            if self.let_go is None:
                return super().look(works)
            self._launch(self.let_go)
            self.let_go = None
            return [Seen("waiting")]

        def cancel(self, work):
            self.cancelled += 1
            super().cancel(work)

    engine = Late(0, 0.0)
    with Session(engine, tmp_path) as s:
        s.submit("a", ["true"], number=0)
        s.place("a", [Given(job="a", server="s0", gpus=("s0g1",), cores=2, memory_bytes=1 << 30)])
        s.start(["a"])
        said = [e for _ in range(5) for e in s.watch()]
    assert [(e.what, e.code) for e in said] == [("running", 0), ("ended", 0)] and not engine.cancelled and s.jobs["a"].attempt == 1


def test_what_cannot_be_is_refused(tmp_path):
    engine = Faulty(0, 0.0)
    with Session(engine, tmp_path) as s:
        with pytest.raises(UsageError, match="no command"):
            s.submit("a", [], number=0)
        with pytest.raises(UsageError, match="was submitted"):
            s.place("b", [])
        s.submit("a", ["true"], number=0)
        with pytest.raises(UsageError, match="has no GPU"):
            s.place("a", [Given(job="a", server="s0", gpus=("s1g0",), cores=1, memory_bytes=1)])
    other = Servers(servers=(Server(name="elsewhere", gpus=("g",), cores=1, memory_bytes=9),))
    with pytest.raises(UsageError, match="has no server elsewhere"):
        Session(engine, tmp_path, servers=other)
    engine.name = "other"
    with pytest.raises(UsageError, match="on the engine"):
        Session(engine, tmp_path)
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(FormatError, match="line 1"):
        Session(engine, tmp_path)


def test_an_engine_that_stays_away_ends_the_run_and_a_limit_does(tmp_path):
    with Session(Faulty(0, 1.0), tmp_path / "a") as s, pytest.raises(EngineAway):
        driver(s, queue_of((1,)), patience_s=0.0).run()
    with Session(Faulty(0, 0.0), tmp_path / "b") as s, pytest.raises(RunTimeout, match="1 jobs"):
        driver(s, queue_of((1,)), limit_s=-1.0).run()


class Restless(Rounds):
    """For some rounds whatever a seeded coin says: who runs is moved, preempted or left alone. Then the allocation's own."""

    def decide(self, state, moment):
        self.rounds += 1
        if self.rounds > 12:
            return super().decide(state, moment)
        rng, free = random.Random(self.rounds), {s: set(range(2)) for s in range(2)}
        found = {}
        for n in sorted(state.there.tolist(), key=lambda n: rng.random()):
            places = [(s, g) for s in free for g in sorted(free[s])][: self.queue.jobs[n].gpus]
            if rng.random() < 0.3 or len(places) < self.queue.jobs[n].gpus:
                found |= {n: ()} if n in state.parts else {}
                continue
            found[n] = tuple(Part(s, tuple(g for x, g in places if x == s), rng.choice((1, 2)), 3) for s in dict.fromkeys(s for s, _ in places))
            for s, g in places:
                free[s].discard(g)
        return found


@pytest.mark.parametrize("seed", range(few(12)))
@pytest.mark.parametrize("resizes", [False, True])
def test_jobs_that_are_moved_and_preempted_end_once(tmp_path, seed, resizes):
    """Faults, a policy that changes its mind every round, the process broken off on the way: no GPU is held twice, each job ends once."""
    engine, queue = Faulty(seed, 0.1), queue_of()
    engine.resizes = resizes
    engine.rng.randint = lambda a, b: 4  # looks that a job lasts
    moves = 0
    for turn in range(2):
        with Session(engine, tmp_path / "run") as session:
            d = driver(session, queue, patience_s=60.0, limit_s=1e9)
            d.policy = Restless(servers=SERVERS, queue=queue, order=order("fifo")(), allocation=allocation("proportional")(), round_s=1e-6)
            turns, whole = iter(range(15)), d._turn

            def stop(turns=turns, whole=whole):
                if next(turns, None) is None:
                    raise KeyboardInterrupt
                whole()

            if not turn:
                d._turn = stop
            with contextlib.suppress(KeyboardInterrupt):
                d.run()
            moves += sum(r.moves for r in d.ran)
    assert moves and engine.done == {f"j{i}": 1 for i in range(len(SIZES))} and all(r.code == 0 for r in d.ran)
    found = audit(tmp_path / "run")
    assert found.verdict.ok and not found.unfinished and not found.failed and found.verdict.facts["attempts"] > len(SIZES)
    said = [r.what for r in session.records]
    assert said.count("preempted") <= said.count("preempt") and "preempted" in said


def test_overheads_need_a_job_that_ended():
    with pytest.raises(UsageError, match="no job ended well"):
        fit_overheads(queue_of((1, 1)), [Ran(arrival_s=0.0)] * 2)


def test_overheads_of_one_run_predict_another():
    """Jobs one after the other on one server: starts are sums, by hand."""
    queue = queue_of((4, 4, 4))
    ran = [Ran(arrival_s=0.0, decided_s=t, released_s=t, started_s=t + 0.3, ended_s=t + 1.4, noticed_s=t + 1.5, code=0, attempts=1) for t in (0.1,
        1.6, 3.1)]
    found = fit_overheads(queue, ran)
    assert (found.arrival_s, found.start_s, found.end_s) == pytest.approx((0.1, 0.3, 0.2))
    run, starts = predict(SERVERS, queue, policy(queue), found)
    assert starts.tolist() == pytest.approx([0.4, 1.9, 3.4]) and run.end_s[2] == pytest.approx(4.6)
    assert predict(SERVERS, queue, policy(queue), Overheads())[1].tolist() == pytest.approx([0, 1, 2])


def test_jobs_of_one_moment_are_placed_in_turn():
    """Two at once, then two at once: the second of each starts 0.4 s later, and holds its server so much longer."""
    queue = queue_of((2, 2, 2, 2))
    ran = [Ran(arrival_s=0.0, decided_s=t, released_s=t, started_s=t + late, ended_s=t + late + 1, noticed_s=t + late + 1.1, code=0, attempts=1)
           for t, late in ((0.0, 0.2), (0.001, 0.599), (1.3, 0.2), (1.7, 0.2))]  # fmt: skip
    found = fit_overheads(queue, ran)
    assert (found.start_s, found.turn_s, found.end_s) == pytest.approx((0.2, 0.399, 0.1))
    assert predict(SERVERS, queue, policy(queue), found)[1].tolist() == pytest.approx([0.2, 0.599, 1.5, 1.899])
