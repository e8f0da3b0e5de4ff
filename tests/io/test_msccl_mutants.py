"""Every mutant of a right MSCCL file is refused, or the interpreter of the executor's rules shows that it still does the same.

The whole table (all operators, 20 schedules of planners) is `benchmarks/handover.py`; here are small files and few mutants of each.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from msccl_executor_twin import Hang, replays
from msccl_files import FILES

from meshwright.check.foreign.executor import _waiting
from meshwright.drive.handover.verdicts import check_msccl
from meshwright.interop.from_msccl import waits_of
from meshwright.interop.msccl import MscclAlgo
from meshwright.io.msccl.xml import msccl_text, parse_msccl
from meshwright.testing.mutate_msccl import MSCCL_OPERATORS, msccl_mutants, mutate_msccl

SMALL = (
    "ring all-reduce 3", "three rings all-reduce 4, two chunks a step", "all pairs all-reduce 3", "relay all-gather 4", "direct alltoall 3",
    "direct gather 3", "chain broadcast 4",
)  # fmt: skip


def means_the_same(algo: MscclAlgo) -> bool:
    try:
        replays(msccl_text(algo), seeds=10, root=0)
    except (AssertionError, Hang):
        return False
    return True


@pytest.mark.parametrize("name", SMALL)
def test_every_mutant_is_refused_or_means_the_same(name: str) -> None:
    algo = FILES[name]()
    said: dict[tuple[str, ...], str] = {}
    seen: set[MscclAlgo] = {algo}
    refused = same = 0
    for m in msccl_mutants(algo, np.random.default_rng(1), per_operator=2):
        if m.algo in seen:
            continue
        seen.add(m.algo)
        assert parse_msccl(msccl_text(m.algo).encode()) == m.algo
        verdict = check_msccl(m.algo)
        assert verdict.status != "unknown", (m.operator, m.what, verdict.findings)
        if verdict.ok:
            assert means_the_same(m.algo), f"accepted, but wrong: {m.operator}: {m.what}"
            same += 1
            continue
        refused += 1
        first = verdict.findings[0]
        assert {"gpu", "field", "cycle"} & first.witness.keys(), (m.operator, first)
        words = tuple(f.message for f in verdict.findings)
        assert words not in said or first.check in ("values", "executor"), (m.what, said[words])
        said.setdefault(words, f"{m.operator}: {m.what}")
    assert refused > 5 * same and len(said) >= 0.95 * refused


def test_no_operator_is_idle_or_harmless() -> None:
    """At least 30 operators; each changes some file for the worse."""
    assert len(MSCCL_OPERATORS) >= 30
    rng, caught = np.random.default_rng(2), Counter[str]()
    for operator in MSCCL_OPERATORS:
        for name in (*SMALL, "direct scatter 3", "chain broadcast 3 from 1"):
            for _ in range(4):
                m = mutate_msccl(FILES[name](), operator, rng)
                if m is not None and check_msccl(m.algo).status == "wrong":
                    caught[operator] += 1
                    break
            if caught[operator]:
                break
    assert [x for x in MSCCL_OPERATORS if not caught[x]] == []


def test_mutants_are_reproducible_and_unknown_operators_an_error() -> None:
    algo = FILES["ring all-reduce 3"]()
    once, twice = ([m.what for m in msccl_mutants(algo, np.random.default_rng(5), per_operator=2)] for _ in range(2))
    assert once == twice
    with pytest.raises(KeyError):
        mutate_msccl(algo, "rewrite in another language", np.random.default_rng(0))


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_checker_counts_waits_as_the_reader_does(name: str) -> None:
    """Two derivations of the executor's numbers, on files and on their mutants."""
    algo = FILES[name]()
    for one in (algo, *(m.algo for m in msccl_mutants(algo, np.random.default_rng(3), per_operator=2))):
        for g in one.gpus:
            if len({b.id for b in g.blocks}) < len(g.blocks):
                continue  # refused before
            read = waits_of(g)
            for b in g.blocks:
                seen = _waiting(b)
                rows = read[b.id]
                assert seen.goes_on == [row.fused for row in rows]
                assert seen.flags == [row.number for row, s in zip(rows, b.steps, strict=True) if s.hasdep and s.type != "nop"]
                assert {w for row in rows for w in row.missing} <= seen.waits
