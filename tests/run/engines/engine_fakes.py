"""An engine in memory that fails as real ones do: it does not answer, before or after it did what it was told; it forgets jobs; it starts one
twice."""

from __future__ import annotations

import json
import random
import time

from meshwright.cluster import Server, Servers
from meshwright.errors import EngineAway
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

    def suspend(self, work):
        pass

    resume = suspend

    def resize(self, work, given):
        self._fault()
        self.sizes[work.key] = given
        self._fault()

    def close(self):
        pass
