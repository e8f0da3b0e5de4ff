"""The backend against gloo: random sequences of calls, planned or not, of which one rank makes another one in some.

A case is one sequence on a group of its own. Every result must equal gloo's, or, where a rank diverges, every rank must raise the same RankDiverged,
which names it (of two ranks either may be named), long before the deadline. Ranks are processes of this machine; a job of them runs many sequences.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from .calls import Sequence, drawn

__all__ = ["sequences"]

SEQUENCES_OF_A_JOB = 100
RANKS = (2, 3, 4)
MAX_ANSWER_S = 200.0  # of a rank, until the case counts as a hang: more than its groups' deadline
MAX_START_S = 600.0  # of the ranks' processes, on a machine with much else to do
MAX_TOLD_S = 40.0  # from the odd call until a rank raises; a third of the deadline


def sequences(rng: np.random.Generator) -> Generator[dict[str, Any], None, None]:
    """Without end."""
    while True:
        ranks = int(rng.choice(RANKS))
        with tempfile.TemporaryDirectory(prefix="meshwright-soak-") as cache:
            job = _Job(ranks, Path(cache))
            try:
                for _ in range(SEQUENCES_OF_A_JOB):
                    sequence = drawn(int(rng.integers(2**31)), ranks)
                    case: dict[str, Any] = {
                        "kind": f"{ranks} ranks, plans: {sequence.setting}", "operator": sequence.how or "alike", "sums": {}, "most": {},
                        "what": f"seed {sequence.seed}, rank {sequence.odd} at call {sequence.at} of {len(sequence.line)}",
                    }  # fmt: skip
                    case["judge"] = lambda case=case, sequence=sequence, job=job: job.judge(sequence, case)
                    yield case
                    if job.broken:
                        break
            finally:
                job.end()


class _Job:
    def __init__(self, ranks: int, cache: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        env = {
            **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": str(cache / "plans"), "MESHWRIGHT_RECORD_DIR": str(cache),
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.backend_rank"]
        self.said = [(cache / f"rank{r}.txt").open("w+") for r in range(ranks)]
        self.ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(r)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said[r], text=True)
            for r in range(ranks)
        ]
        self.broken = False
        self._lines(MAX_START_S)

    def end(self) -> None:
        for rank, said in zip(self.ranks, self.said, strict=True):
            rank.kill()
            rank.communicate()
            said.close()

    def judge(self, sequence: Sequence, case: dict[str, Any]) -> tuple[str, str]:
        answers = self._answers(sequence.seed)
        if len(answers) < len(self.ranks):
            self.broken = True
            ended = [r for r, rank in enumerate(self.ranks) if rank.poll() is not None]
            if ended:
                self.said[ended[0]].seek(0)
                return "crashed", f"rank {ended[0]}: {self.said[ended[0]].read()[-400:]}"
            missing = sorted(set(range(len(self.ranks))) - set(answers))
            return "hung", f"ranks without an answer: {missing}: {self._stack(missing[0])}"
        rows = [answers[r] for r in sorted(answers)]
        case["sums"].update(calls=rows[0]["calls"])
        for r, row in enumerate(rows):
            if row["outcome"] not in ("alike", "diverged"):
                return row["outcome"], f"rank {r}: {row['error'][:400]}"
        if sequence.odd < 0:
            return "alike", ""
        case["most"].update(seconds_until_told=round(max(row["seconds"] for row in rows), 3))
        if len({row["error"] for row in rows}) > 1:
            return "wrong", "ranks raise different errors: " + " | ".join(row["error"][:200] for row in rows)
        undecided = "either may be right" in rows[0]["error"] and f"rank {sequence.odd} calls" in rows[0]["error"]
        if len(rows) > 2 and rows[0]["named"] != sequence.odd and not undecided:
            return "misnamed", f"rank {sequence.odd} diverged: {rows[0]['error'][:300]}"
        if case["most"]["seconds_until_told"] > MAX_TOLD_S:
            return "late", rows[0]["error"][:200]
        return "diverged", ""

    def _stack(self, rank: int) -> str:
        """Where a rank is, in all its threads."""
        self.ranks[rank].send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        self.said[rank].seek(0)
        return self.said[rank].read()[-1500:]

    def _answers(self, seed: int) -> dict[int, dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(f"{seed}\n")
                rank.stdin.flush()
            except BrokenPipeError:
                return {}
        return self._lines(MAX_ANSWER_S)

    def _lines(self, within_s: float) -> dict[int, Any]:
        """One line of every rank, as far as they say one."""
        found: dict[int, Any] = {}
        with selectors.DefaultSelector() as waits:
            for r, rank in enumerate(self.ranks):
                assert rank.stdout is not None
                waits.register(rank.stdout, selectors.EVENT_READ, r)
            limit = time.monotonic() + within_s
            while len(found) < len(self.ranks) and time.monotonic() < limit:
                for ready, _ in waits.select(1.0):
                    line = ready.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        return found
                    found[ready.data] = json.loads(line)
        return found
