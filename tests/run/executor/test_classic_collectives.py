"""The classic algorithms on real messages (gloo, point to point): every operation, results equal torch's, bit for bit on whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rig import fabric_of, in_threads

from meshwright.decide.collective import OPERATIONS, CollectiveProblem, strategy
from meshwright.errors import Unsupported
from meshwright.io.fabric.name import load_fabric
from meshwright.run.executor.collective import CollectiveRank, callable_form
from meshwright.run.executor.transport import TaggedTransport

ALGORITHMS = (
    "double-tree", "halving-doubling", "recursive-doubling", "bruck", "pat", "direct", "rooted-tree", "scatter-all-gather", "hierarchical",
    "cloudcollectives", "multipath",
)  # fmt: skip


def planned(name: str, op: str, ranks: int) -> Any:
    fabric = load_fabric(f"line:{ranks}") if name == "multipath" else fabric_of(ranks)  # where ranks pass on what is not theirs
    problem = CollectiveProblem.on(fabric, op, 4 * 840, root=ranks - 1)
    try:
        return strategy(name)().plan(problem, rng=np.random.default_rng(0)).program
    except Unsupported:
        return None


def expected(op: str, given: list[torch.Tensor], root: int) -> list[torch.Tensor | None]:
    """By torch; None where nothing is promised."""
    n = len(given)
    total = torch.stack(given).sum(0) if op in ("all-reduce", "reduce", "reduce-scatter") else None
    only = [r == root for r in range(n)]
    if op == "all-reduce":
        return [total] * n
    if op == "reduce":
        return [total if x else None for x in only]
    if op == "reduce-scatter":
        assert total is not None
        return list(total.chunk(n))
    if op == "broadcast":
        return [given[root]] * n
    if op == "scatter":
        return list(given[root].chunk(n))
    if op in ("all-gather", "gather"):
        return [torch.cat(given) if op == "all-gather" or x else None for x in only]
    if op == "all-to-all":
        return [torch.cat([x.chunk(n)[r] for x in given]) for r in range(n)]
    return [given[(r - 1) % n] for r in range(n)]


@pytest.mark.sample(14)
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_real_messages_give_torchs_answer(name: str, ranks: int) -> None:
    done = 0
    programs = {op: planned(name, op, ranks) for op in OPERATIONS}

    def body(rank: int, group: Any) -> dict[str, torch.Tensor]:
        out = {}
        for op, program in programs.items():
            if program is None:
                continue
            form, contract = callable_form(program), program.contract
            own = np.flatnonzero(form.buffers.actor == rank)
            where = {b: k for k, b in enumerate(np.flatnonzero(program.buffers.actor == rank).tolist())}
            words = form.buffers.chunk_bytes[own[0]] // 4
            (source, first, count), (target, at, length) = contract.inputs[rank], contract.outputs[rank]
            tensors = {}
            for b in {source, target}:
                tensors[where[b]] = torch.full((int(form.buffers.chunks[own[where[b]]] * words),), -1.0)
            tensors[where[source]][first * words : (first + count) * words] = values(op, rank, int(count * words))
            made = CollectiveRank(program, rank, tensors, TaggedTransport(group))
            made.run()
            out[op] = made.buffer(where[target])[at * words : (at + length) * words].clone()
        return out

    results = in_threads(ranks, body)
    for op, program in programs.items():
        if program is None:
            continue
        words = int(program.buffers.chunk_bytes[0]) // 4
        given = [values(op, r, count * words) for r, (_, _, count) in enumerate(program.contract.inputs)]
        for rank, wanted in enumerate(expected(op, given, ranks - 1)):
            if wanted is not None:
                assert torch.equal(results[rank][op], wanted), (op, rank)
                done += 1
    assert done


def values(op: str, rank: int, words: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([OPERATIONS.index(op), rank]).integers(-1000, 1000, words).astype(np.float32))
