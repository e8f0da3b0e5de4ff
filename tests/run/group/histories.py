"""Flight records of made-up runs, written by the real recorder: what every rank did, and where it is now."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshwright.run.group.record_file import RankRecord, pack_call, read_record
from meshwright.run.group.recorder import FlightFile, Recorder

SUM = pack_call("all-reduce", -1, "sum", "float32")
GATHER = pack_call("all-gather", -1, "", "float32")


@dataclass
class Rank:
    """`calls`: (call, bytes, program); the last one is still running if `at` is set: (step, peer, receives), peer -1 = busy."""

    calls: list[tuple[int, int, int]]
    at: tuple[int, int, bool] | None = None
    verdict: str = ""
    closed: bool = False
    waits: dict[int, float] = field(default_factory=dict)  # seconds received from peer


def write(folder: Path, ranks: list[Rank], run: str = "0123456789abcdef") -> list[RankRecord]:
    """Records as they would lie there if the processes were cut off now."""
    made = []
    for number, rank in enumerate(ranks):
        file = FlightFile(str(folder), run, number, len(ranks))
        recorder = Recorder(file, range(len(ranks)), number, "default")
        for i, (call, size_bytes, program) in enumerate(rank.calls):
            at = recorder.asked(call, size_bytes, program)
            recorder.begin(at)
            if rank.at is not None and i + 1 == len(rank.calls):
                step, peer, receives = rank.at
                recorder.waiting(step, max(peer, 0), int(receives))
                if peer < 0:
                    recorder.moving()
            else:
                for peer, seconds in rank.waits.items():
                    recorder.waited[2 * peer] = int(seconds * 1e9)
                recorder.end()
        if rank.verdict:
            recorder.verdict(rank.verdict)
        file.map.flush()
        made.append(read_record(file.path))
        recorder.words.release()
        file.map.close()
    return made
