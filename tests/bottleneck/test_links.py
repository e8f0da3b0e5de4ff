"""Slow links are named from messages between pairs: by direction, also where the slow direction delays the other one of its connection."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_traces import Settings, write_ranks

from meshwright.bottleneck.breakdown import break_down
from meshwright.bottleneck.lanes import Activities, Kind, Meetings, RankView, Stage, Step
from meshwright.cli.frame import main

MS = 1_000_000


def views(ranks, messages, end):
    """Ranks that do nothing but wait for messages (source, destination, sent, waits from, arrives); the rest of the time they compute."""
    out = []
    for r in range(ranks):
        mine = sorted((m for m in messages if r in m[:2]), key=lambda m: (m[2] if m[0] == r else m[3], m))
        waits = [(m[3], m[4], mine.index(m)) for m in messages if m[1] == r]
        rows, at = [], 0
        for begin, stop, number in sorted(waits, key=lambda w: w[1]):
            begin, stop = max(begin, at), max(stop, at)
            rows += [(at, begin, Kind.COMPUTE, -1), (begin, stop, Kind.WAIT, number)]
            at = stop
        rows = [x for x in [*rows, (at, end, Kind.COMPUTE, -1)] if x[1] > x[0]]
        start, stop, kind, meeting = (np.array(c, np.int64) for c in zip(*rows, strict=True))
        zero = np.zeros(len(rows), np.int32)
        host = Activities(
            start=start, end=stop, kind=kind.astype(np.int8), stage=np.full(len(rows), Stage.COMMUNICATION, np.int8), module=zero, name=zero - 1,
            meeting=meeting.astype(np.int32),
        )  # fmt: skip
        columns = np.array([(m[2] if m[0] == r else m[3], m[4], m[0], m[1], 1 << 20) for m in mine], np.int64).reshape(-1, 5).T
        meetings = Meetings(
            key=tuple(str(m) for m in mine), label=("message",) * len(mine), queue=tuple(f"link/{m[0]}>{m[1]}" for m in mine), arrives=columns[0],
            leaves=columns[1], source=columns[2], destination=columns[3], size_bytes=columns[4], everyone=np.zeros(len(mine), bool),
        )  # fmt: skip
        step = Step(number=0, start=0, end=end)
        out.append(RankView(rank=r, source="made", steps=[step], host=host, device=None, meetings=meetings, modules=("",), names=()))
    return out


def ring(slow, took, back):
    """Rounds on a ring of four: each rank sends to both neighbours and goes on when it has heard from both. The slow direction takes `took`,
    its other one mostly `back`."""
    messages, now = [], [MS] * 4
    for round_ in range(12):
        arrivals = {b: [] for b in range(4)}
        for a in range(4):
            for b in ((a + 1) % 4, (a - 1) % 4):
                length = took if (a, b) == slow else back if (b, a) == slow and round_ % 4 else MS
                arrivals[b].append((now[a] + length, a, now[a]))
        for b in range(4):
            at = now[b]
            for arrives, a, sent in sorted(arrivals[b]):
                messages.append((a, b, sent, min(at, arrives - 1), arrives))
                at = max(at, arrives)
            arrivals[b] = at
        now = [arrivals[b] + MS for b in range(4)]
    return messages, max(now)


@pytest.mark.parametrize("slow", [(0, 1), (1, 0), (2, 3), (3, 0), (0, 3)])
@pytest.mark.parametrize("back", [MS, 30 * MS])
def test_the_slow_direction_is_named(slow, back):
    messages, end = ring(slow, 40 * MS, back)
    found = break_down(views(4, messages, end), one_clock=True)
    named = [c for c in found.causes if c.kind == "slow link"]
    assert [c.where for c in named] == [f"link {slow[0]} -> {slow[1]}"]
    assert named[0].facts["rate_Bps"] == pytest.approx((1 << 20) / 40e-3, rel=1e-6)
    assert named[0].gain_s <= named[0].path_s


def test_equal_links_are_not_blamed():
    messages, end = ring((9, 9), MS, MS)
    assert not [c for c in break_down(views(4, messages, end), one_clock=True).causes if c.kind == "slow link"]


def test_a_link_that_is_slow_for_a_while_only_is_not_blamed():
    """Other work on a machine comes and goes: what was slow in three quarters of the recording is no slow link, unless a fabric says so."""
    messages, end = ring((0, 1), 40 * MS, MS)
    spared = sorted(m for m in messages if m[:2] == (0, 1))[-3:]
    faster = [(*m[:4], m[2] + MS) if m in spared else m for m in messages]
    faster = [(a, b, sent, min(since, arrives - 1), arrives) for a, b, sent, since, arrives in faster]
    assert not [c for c in break_down(views(4, faster, end), one_clock=True).causes if c.kind == "slow link"]
    few = [m for m in messages if m[:2] != (0, 1)] + sorted(m for m in messages if m[:2] == (0, 1))[:4]
    assert not [c for c in break_down(views(4, few, end), one_clock=True).causes if c.kind == "slow link"]


def test_a_fabric_says_what_links_should_carry(tmp_path, capsys):
    messages, end = ring((9, 9), MS, MS)
    plain = break_down(views(4, messages, end), one_clock=True)
    where = next(c.where for c in plain.causes if c.kind == "exposed communication")  # "message 1 -> 0 of group link": on the path
    pair = (int(where.split()[1]), int(where.split()[3]))
    stated = {(a, b): 4 * (1 << 20) / 1e-3 if (a, b) == pair else 1.0 for a in range(4) for b in range(4)}
    found = break_down(views(4, messages, end), one_clock=True, rates_Bps=stated)
    named = [c for c in found.causes if c.kind == "slow link"]
    assert [c.where for c in named] == [f"link {pair[0]} -> {pair[1]}"] and "where the fabric says 4.19" in named[0].advice
    one, two = map(str, write_ranks(tmp_path, Settings()))
    assert main(["trace", "breakdown", one, two, "--fabric", "laptop:2"]) == 0
    capsys.readouterr()
    assert main(["trace", "breakdown", one, two, "--fabric", "laptop:1"]) == 2
    assert "has 1 devices, the traces are of 2 ranks" in capsys.readouterr().err
