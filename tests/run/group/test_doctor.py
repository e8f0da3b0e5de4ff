"""`run doctor`: whatever one rank does differently is named in the first line."""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import histories
import pytest
from histories import GATHER, SUM, Rank, write
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.errors import FormatError, UsageError
from meshwright.run.group.doctor import ALIVE, GONE, STOPPED, UNKNOWN, diagnose, find_records
from meshwright.run.group.record_file import pack_call

MIB = 1 << 20
LATER = 10**18  # far beyond every wait's beginning


def calls(n: int, size: int = 4 * MIB, program: int = 7) -> list[tuple[int, int, int]]:
    return [(SUM, size, program)] * n


def waiting(n: int, peer: int, *, receives: bool = True, step: int = 5) -> Rank:
    return Rank(calls(n), (step, peer, receives))


def look(tmp_path: Path, ranks: list[Rank], alive: str | dict[int, str] = ALIVE) -> Any:
    states = dict.fromkeys(range(len(ranks)), alive) if isinstance(alive, str) else dict.fromkeys(range(len(ranks)), ALIVE) | alive
    return diagnose(write(tmp_path, ranks), states, LATER)


def test_a_rank_behind_in_one_line(tmp_path: Path) -> None:
    """Rank 3 waits in collective 118 for rank 5, which is in its own code after 117; the others are at 121."""
    ranks = [waiting(121, 3) for _ in range(8)]
    ranks[3] = Rank(calls(118), (7, 5, True))
    ranks[5] = Rank(calls(117))
    found = look(tmp_path, ranks)
    assert found.wrong and found.groups[0].verdict.rank == 5 and found.groups[0].verdict.code == "run-timeout"
    assert found.line == (
        "rank 5 has not come to collective 118; it has called 117; rank 3 waits for it in collective 118 (all-reduce sum float32 4 MiB), step 7;"
        " rank 5 is at collective 117 (all-reduce sum float32 4 MiB); rank 3 is at 118; ranks 0-2,4,6-7 are at 121"
    )
    assert "\n" not in found.line


def test_a_dead_rank(tmp_path: Path) -> None:
    ranks = [waiting(9, 1), waiting(9, 2, receives=False, step=3), waiting(9, 0)]
    found = look(tmp_path, ranks, {1: GONE})
    verdict = found.groups[0].verdict
    assert (verdict.code, verdict.rank, verdict.step) == ("rank-died", 1, 5)
    assert found.line.startswith("rank 1 died; rank 0 waits for it in collective 9 (all-reduce sum float32 4 MiB), step 5; rank 1 is at collective 9")
    assert found.groups[0].places[1].startswith("process gone; was at collective 9")


def test_a_stopped_rank(tmp_path: Path) -> None:
    found = look(tmp_path, [waiting(9, 1), Rank(calls(8)), waiting(9, 0)], {1: STOPPED})
    assert found.groups[0].verdict.code == "rank-frozen" and found.line.startswith("rank 1 is frozen")


def test_a_skipped_collective(tmp_path: Path) -> None:
    usual = [*calls(3), (GATHER, MIB, 8), *calls(1)]
    ranks = [Rank(usual[:4], (2, 1, True)), Rank([*calls(4)], (0, 0, True)), Rank(usual[:4], (2, 1, True))]
    ranks[0].calls, ranks[2].calls = usual[:4], usual[:4]
    found = look(tmp_path, ranks)
    assert found.groups[0].verdict.code == "rank-diverged" and found.groups[0].verdict.rank == 1
    assert "rank 1 calls all-reduce sum float32 4 MiB as collective 4 where the others call all-gather float32 1 MiB" in found.line
    ranks[0].calls = ranks[2].calls = [*usual]
    ranks[0].at = ranks[2].at = (0, 1, True)
    assert "left out collective 4" in look(tmp_path / "further", ranks).line


def test_two_calls_that_nobody_else_has_made_yet(tmp_path: Path) -> None:
    """Either may be the odd one: both are named, and that it is not known."""
    ranks = [Rank(calls(3)), Rank([*calls(3), (SUM, MIB, 8)], (2, 2, True)), Rank([*calls(3), (SUM, 2 * MIB, 8)], (2, 1, True))]
    line = look(tmp_path, ranks).line
    assert "rank 2 calls all-reduce sum float32 2 MiB as collective 4 where rank 1 calls all-reduce sum float32 1 MiB" in line
    assert "no other rank has called 4 yet, so either may be right" in line
    ranks[0] = Rank([*calls(3), (SUM, 2 * MIB, 8)], (0, 1, True))
    assert "rank 1 calls all-reduce sum float32 1 MiB as collective 4 where the others call" in look(tmp_path / "all", ranks).line


def test_another_program_and_another_size(tmp_path: Path) -> None:
    ranks = [waiting(4, 1), Rank([*calls(3), (SUM, 4 * MIB, 9)], (1, 0, True)), waiting(4, 1)]
    found = look(tmp_path / "program", ranks)
    assert (found.groups[0].verdict.code, found.groups[0].verdict.rank) == ("plan-mismatch", 1)
    ranks[1] = Rank([*calls(3), (SUM, 2 * MIB, 9)], (1, 0, True))
    found = look(tmp_path / "size", ranks)
    assert (found.groups[0].verdict.code, found.groups[0].verdict.rank) == ("rank-diverged", 1)
    assert "2 MiB" in found.line and "4 MiB" in found.line


def test_a_circle_and_a_busy_rank(tmp_path: Path) -> None:
    found = look(tmp_path / "circle", [waiting(2, 1), waiting(2, 2), waiting(2, 0)])
    assert "waits in a circle (0 for 1, 1 for 2, 2 for 0)" in found.line
    found = look(tmp_path / "busy", [waiting(2, 1), Rank(calls(2), (4, -1, False)), waiting(2, 1)])
    assert found.line.startswith("rank 1 is busy with its own work in collective 2")


def test_what_the_ranks_agreed_on_comes_first(tmp_path: Path) -> None:
    told = "rank 2 died; rank 1 waits for it"
    ranks = [Rank(calls(3), (5, 1, True), told), Rank(calls(3), (6, 2, True), told), Rank(calls(3), (1, 0, True))]
    found = look(tmp_path, ranks, {0: GONE, 1: GONE, 2: GONE})
    assert found.line.startswith(told)


def test_healthy_runs(tmp_path: Path) -> None:
    done = look(tmp_path / "done", [Rank(calls(5)) for _ in range(4)])
    assert not done.wrong and done.line == "no divergence among ranks 0-3; collective 5 (all-reduce sum float32 4 MiB)"
    records = write(tmp_path / "moving", [waiting(5, 1), waiting(5, 0), Rank(calls(4))])
    now = max(g.since_ns for r in records for g in r.groups) + 1000
    assert not diagnose(records, dict.fromkeys(range(3), ALIVE), now).wrong, "a wait of a microsecond is no trouble"
    assert diagnose(records, dict.fromkeys(range(3), ALIVE), now + 5 * 10**9).wrong


def test_slow_links_are_listed(tmp_path: Path) -> None:
    ranks = [Rank(calls(5), waits={1: 7.5, 2: 0.25}), Rank(calls(5), waits={0: 0.5}), Rank(calls(5))]
    found = look(tmp_path, ranks)
    assert not found.wrong and found.groups[0].waits[0] == (1, 0, 7.5)


def test_a_rank_without_a_record(tmp_path: Path) -> None:
    records = write(tmp_path, [waiting(9, 1), Rank(calls(8)), waiting(9, 1)])
    found = diagnose([records[0], records[2]], {0: ALIVE, 2: ALIVE}, LATER)
    assert found.wrong and found.line.startswith("rank 1 left no record here")


KINDS = ("behind", "skip", "swap", "size", "program", "dead", "stopped", "none", "all gone")


@given(st.integers(0, 10**6))
def test_one_planted_divergence_is_always_named(seed: int) -> None:
    rng = random.Random(seed)
    n, culprit, kind = rng.randint(3, 7), 0, rng.choice(KINDS)
    culprit = rng.randrange(n)
    kinds = (pack_call("all-reduce", -1, "sum", "float32"), pack_call("all-gather", -1, "", "float32"))
    menu = [(call, size, rng.getrandbits(40)) for call in kinds for size in (8, MIB)]
    usual = [rng.choice(menu) for _ in range(rng.randint(3, 12))]
    usual[-2:] = [menu[0], menu[3]]  # unlike neighbours
    own, at = list(usual), len(usual) - 2
    if kind == "behind":
        own = own[: rng.randint(1, at)]
    elif kind == "skip":
        del own[at]
    elif kind == "swap":
        own[at], own[at + 1] = own[at + 1], own[at]
    elif kind == "size":
        own[at] = own[at][0], own[at][1] * 2, own[at][2]
    elif kind == "program":
        own[at] = own[at][0], own[at][1], own[at][2] ^ 1
    stuck_at = {"skip": at + 1, "swap": at + 1, "size": at + 1, "program": at + 1}.get(kind, len(usual))
    ranks = []
    for r in range(n):
        if r != culprit:  # everybody waits for the culprit, or for somebody who does
            peer = culprit if r == (culprit + 1) % n or rng.random() < 0.5 else (culprit + 1) % n
            ranks.append(Rank(usual[:stuck_at], (rng.randrange(50), peer, rng.random() < 0.5)))
        elif kind == "behind":
            ranks.append(Rank(own))
        elif kind in ("dead", "stopped"):
            ranks.append(Rank(own, (3, (r + 1) % n, True)) if rng.random() < 0.5 else Rank(own[:-1]))
        else:
            ranks.append(Rank(own[:stuck_at], (3, (r + 1) % n, True)))
    if kind in ("none", "all gone"):
        ranks = [Rank(usual) for _ in range(n)]
    alive = dict.fromkeys(range(n), GONE if kind == "all gone" else UNKNOWN if rng.random() < 0.3 else ALIVE)
    alive[culprit] = {"dead": GONE, "stopped": STOPPED}.get(kind, alive[culprit])
    with tempfile.TemporaryDirectory() as folder:
        found = diagnose(write(Path(folder), ranks), alive, LATER)
    if kind in ("none", "all gone"):
        assert not found.wrong, found.line
        return
    verdict = found.groups[0].verdict
    expected = {"behind": "run-timeout", "program": "plan-mismatch", "dead": "rank-died", "stopped": "rank-frozen"}.get(kind, "rank-diverged")
    assert verdict is not None and (verdict.code, verdict.rank) == (expected, culprit), (kind, culprit, found.line)
    assert f"rank {culprit} " in found.line


# ---- files and the command line ------------------------------------------------------------------------------------------
def test_the_latest_run_is_chosen_and_damage_is_told(tmp_path: Path) -> None:
    write(tmp_path, [Rank(calls(1)), Rank(calls(1))], run="aaaa")
    write(tmp_path, [Rank(calls(2)), Rank(calls(2))], run="bbbb")
    (tmp_path / "broken.flight").write_bytes(b"MWFLIGHT")
    records, damaged = find_records([tmp_path])
    assert {r.header.run for r in records} == {"bbbb"} and len(damaged) == 1
    assert {r.header.run for r in find_records([tmp_path], "aaaa")[0]} == {"aaaa"}
    with pytest.raises(UsageError, match="no run"):
        find_records([tmp_path], "cccc")
    with pytest.raises(FormatError):
        find_records([tmp_path / "broken.flight"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no flight records"):
        find_records([tmp_path / "empty"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [Rank(calls(5)) for _ in range(3)])
    assert main(["run", "doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no divergence among ranks 0-2")
    other = tmp_path / "other"
    write(other, [waiting(9, 1), Rank(calls(8), verdict=""), waiting(9, 1)])
    records, _ = find_records([other])
    assert {r.header.pid for r in records} == {os.getpid()}
    assert main(["run", "doctor", "--json", str(other)]) in (0, 1)  # waits are as young as this test: both are right
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.doctor" and document["processes"] == {"0": "alive", "1": "alive", "2": "alive"}
    assert main(["run", "doctor", "--json", "--dump", str(other)]) in (0, 1)
    records_json = json.loads(capsys.readouterr().out)["records"]
    assert records_json[0]["header"]["schema"] == "meshwright.flight" and len(records_json[0]["groups"][0]["history"]) == 9
    assert records_json[0]["groups"][0]["history"][0]["call"] == "all-reduce sum float32 4 MiB"
    assert main(["run", "doctor", str(tmp_path / "nowhere")]) == 2
    assert histories.SUM
