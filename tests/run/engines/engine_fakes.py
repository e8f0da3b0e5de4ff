"""An engine in memory that fails as real ones do: it does not answer, before or after it did what it was told; it forgets jobs; it starts one
twice. And one run in rounds that every real engine carries out."""

from __future__ import annotations

import json
import random
import sys
import time

from meshwright.cluster import Part, Queue, QueuedJob, Sensitivity, Server, Servers
from meshwright.cluster.allocation import speed_of
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import Rounds, given_of, speeds
from meshwright.errors import EngineAway
from meshwright.io.cluster.journal import read_journal
from meshwright.run.engines import Driver
from meshwright.run.engines.audited import audit
from meshwright.run.engines.interface import Seen

SERVERS = Servers(servers=tuple(Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(2)), cores=4, memory_bytes=1 << 34) for n in range(2)))


ASKED = -(10**8)  # it was asked to end


class Faulty:
    """`rate`: of faults. Launchers keep their own rules: one claim per attempt and server. `done`: how often each job's work was done."""

    name, picks_gpus, resizes, launches = "faulty", True, False, True

    def __init__(self, seed: int, rate: float) -> None:
        self.rng, self.rate = random.Random(seed), rate
        self.held, self.running = {}, {}
        self.notes, self.said, self.done, self.sizes = [], [], {}, {}

    def _fault(self) -> None:
        if self.rng.random() < self.rate:
            raise EngineAway("does not answer", where="faulty")

    def discover(self):
        return SERVERS

    def addresses(self, servers):
        return dict.fromkeys(servers, "127.0.0.1")

    def remember(self, ids):
        pass

    def down(self):
        return set()

    def hold(self, work):
        self._fault()
        if work.key not in self.running:
            self.held[work.key] = work
        self._fault()
        return (work.key,)

    def start(self, works):
        self._fault()
        for work in works:
            if self.held.pop(work.key, None) or self.rng.random() < self.rate:  # a second copy, which the claim must stop
                self._launch(work)
        self._fault()

    def _launch(self, work):
        attempt = work.placed.attempt
        for g in work.placed.given:
            claim = work.folder / f"claim-{attempt}-{g.server}"
            if claim.exists():
                return
            claim.touch()
            note = {"time_s": time.time(), "server": g.server, "host": "h", "cuda_visible_devices": ",".join("0" * len(g.gpus)),
                    "ranks": [n for n, r in enumerate(work.placed.ranks) if r.server == g.server]}  # fmt: skip
            (work.folder / f"started-{attempt}-{g.server}.json").write_text(json.dumps(note))
        self.running[work.key] = [work, self.rng.randint(1, 3)]

    def look(self, works):
        self._fault()
        for key in list(self.running):
            entry = self.running[key]
            entry[1] -= 1
            if entry[1] == 0:
                for g in entry[0].placed.given:
                    note = {"time_s": time.time(), "code": 0}
                    (entry[0].folder / f"ended-{entry[0].placed.attempt}-{g.server}.json").write_text(json.dumps(note))
                self.done[entry[0].placed.job] = self.done.get(entry[0].placed.job, 0) + 1
            if self.rng.random() < self.rate / 4 and ASKED < entry[1] <= 0:  # forgotten, with the notes on the disk
                self.running[key] = [entry[0], -(10**6)]
        for key in list(self.held):
            if self.rng.random() < self.rate:
                del self.held[key]
        return [self._seen(w) for w in works]

    def _seen(self, work):
        if work.key in self.running:
            left = self.running[work.key][1]
            given = self.sizes.get(work.key, work.placed.given)
            if left <= ASKED:
                return Seen("failed", given, 143)
            return Seen("gone") if left < -(10**5) else Seen("done" if left <= 0 else "running", given)
        return Seen("held") if work.key in self.held else Seen("gone")

    def cancel(self, work):
        self._fault()
        self.held.pop(work.key, None)
        if self.running.get(work.key, (None, 0))[1] > 0:
            for g in work.placed.given:
                note = {"time_s": time.time(), "code": 143, "asked": True}
                (work.folder / f"ended-{work.placed.attempt}-{g.server}.json").write_text(json.dumps(note))
            self.running[work.key][1] = ASKED
        self._fault()

    leave = cancel

    def suspend(self, work):
        pass

    resume = suspend

    def resize(self, work, given):
        self._fault()
        self.sizes[work.key] = given
        self._fault()

    def close(self):
        pass


COUNTS = """import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
state, marks = pathlib.Path(os.environ["MESHWRIGHT_STATE"]), pathlib.Path(sys.argv[1])
path = state / f"ticks-{os.environ['RANK']}"
done = int(path.read_text()) if path.exists() else 0
with (marks / f"from-{os.environ['RANK']}").open("a") as log:
    log.write(f"{os.environ['MESHWRIGHT_ATTEMPT']} {done}\\n")
while len(list(marks.glob("short-*"))) < 2:
    time.sleep(0.05)
    done += 1
    path.with_suffix(".new").write_text(str(done))
    path.with_suffix(".new").rename(path)
    if os.environ["RANK"] == "0":  # whose numbers are looked at
        (marks / "begun").touch()
"""


class AfterIt(Rounds):
    """All servers are the first job's until it has begun; then rounds decide."""

    begun = None

    def decide(self, state, moment):
        if self.begun.exists():
            return super().decide(state, moment)
        if state.parts:
            return {}
        return {0: tuple(Part(s, tuple(range(len(x.gpus))), x.cores, x.kind.steps) for s, x in enumerate(self.servers.servers))}


def gives_way(session, servers, folder, *, round_s=0.5):
    """A job on all servers, which ends well only when the other two have, gives way to these and goes on from what it saved; the driver's rows.

    Nobody runs twice, everything is audited."""
    profile = Sensitivity(name="any", cores=(1.0, 2.0, 4.0), memory_bytes=(1 << 30,), speed=((1.0,), (1.0,), (1.5,)))
    (folder / "marks").mkdir()
    long = (sys.executable, "-S", "-c", COUNTS, str(folder / "marks"))
    queue = Queue(profiles=(profile,), jobs=tuple(
        QueuedJob(name=f"j{n}", gpus=g, profile="any", arrival_s=0.0, duration_s=1.0 if n else 1e6,
                  command=("sh", "-c", f'sleep 0.3; [ "$RANK" != 0 ] || echo $MESHWRIGHT_ATTEMPT >> {folder}/marks/short-{n}') if n else long)
        for n, g in enumerate((servers.total_gpus, 4, 2))
    ))  # fmt: skip
    policy = AfterIt(servers=servers, queue=queue, order=order("srtf")(), allocation=allocation("priced")(), round_s=round_s,
                     resizes=session.engine.resizes)  # fmt: skip
    policy.begun = folder / "marks" / "begun"
    driver = Driver(session=session, servers=servers, queue=queue, policy=policy, per="server", limit_s=150,
                    given=lambda n, parts: tuple(given_of(servers, queue, n, parts)), speed=speeds(servers, queue, speed_of))  # fmt: skip
    ran = driver.run()
    assert [r.code for r in ran] == [0, 0, 0]
    assert ran[0].moves >= 1 and ran[0].attempts >= 2
    found = audit(session.folder)
    assert found.verdict.ok and not found.unfinished and not found.failed, found.verdict.findings
    for n in (1, 2):  # a short job may be moved, too, even after its mark
        attempts = (folder / "marks" / f"short-{n}").read_text().split()
        assert 1 <= len(set(attempts)) == len(attempts) <= ran[n].attempts, "on several servers, too, the first rank runs once an attempt"
    begun = [[int(x) for x in line.split()] for line in (folder / "marks" / "from-0").read_text().splitlines()]
    assert len({a for a, _ in begun}) == len(begun) <= ran[0].attempts and [d for _, d in begun] == sorted(d for _, d in begun)
    assert begun[-1][1] > 0, "what was saved is found again"
    said = [(r.job, r.what) for r in read_journal(session.folder / "journal.jsonl")]
    assert ("j0", "preempted") in said
    return ran
