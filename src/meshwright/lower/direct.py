"""Collectives that send every piece once, straight to whom it is for: pieces may be of any sizes, and a rank sends exactly its pieces.

A rank's sends go to the ranks behind it first; parts of sums are added in rank order after the rank's own, so all ranks get the same bits.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

from ..program.builder import ProgramBuilder
from ..program.hash import program_hash
from ..program.program import Contract, Program

__all__ = ["direct"]

Counts = tuple[tuple[int, ...], ...]


@cache
def direct(op: str, counts: Counts) -> tuple[str, Program]:
    """(content hash, program). `counts[s][d]`: chunks that rank s has for rank d.

    all-gather, all-to-all: from a rank's first buffer to its second (pieces in the order of their makers). reduce-scatter, all-reduce: in place in
    its only buffer, whose part d rank d adds up.
    """
    b, ranks = ProgramBuilder(ranks=len(counts), name=f"direct {op}"), range(len(counts))
    lanes = [b.lane(r) for r in ranks]
    channels = {(s, d): b.channel(s, d) for s in ranks for d in ranks if s != d and counts[s][d]}
    if op in ("reduce-scatter", "all-reduce"):
        starts = [0, *accumulate(counts[0])]
        sums = [b.buffer(r, chunks=starts[-1], chunk_bytes=1, role="output") for r in ranks]
        for s, d in _turns(channels):
            lanes[s].send(channels[s, d], sums[s], starts[d], counts[s][d])
        for s, d in sorted(channels):
            lanes[d].recv_add(channels[s, d], sums[d], starts[d], counts[s][d])
        own = [(sums[r], starts[r], counts[r][r]) for r in ranks]
        whole = [(buffer, 0, starts[-1]) for buffer in sums]
        if op == "all-reduce":
            back = {(d, s): counts[s][d] for s, d in channels}
            channels |= {x: b.channel(*x) for x in back if x not in channels}
            for s, d in _turns(back):
                lanes[s].send(channels[s, d], sums[s], starts[s], back[s, d])
            for s, d in sorted(back):
                lanes[d].recv(channels[s, d], sums[d], starts[s], back[s, d])
        b.contract = Contract(op=op, inputs=tuple(whole), outputs=tuple(whole if op == "all-reduce" else own))
    else:
        ahead = [[0, *accumulate(row)] if op == "all-to-all" else [0] * len(row) + [max(row)] for row in counts]
        behind = [[0, *accumulate(row[d] for row in counts)] for d in ranks]
        sent = [b.buffer(r, chunks=ahead[r][-1], chunk_bytes=1, role="input") for r in ranks]
        got = [b.buffer(r, chunks=behind[r][-1], chunk_bytes=1, role="output") for r in ranks]
        for s, d in _turns(channels):
            lanes[s].send(channels[s, d], sent[s], ahead[s][d], counts[s][d])
        for r in ranks:
            lanes[r].copy((sent[r], ahead[r][r]), (got[r], behind[r][r]), counts[r][r])
        for s, d in sorted(channels):
            lanes[d].recv(channels[s, d], got[d], behind[d][s], counts[s][d])
        full = tuple((buffer, 0, ahead[r][-1]) for r, buffer in enumerate(sent))
        if op == "all-gather":
            b.contract = Contract(op=op, inputs=full, outputs=tuple((buffer, 0, behind[r][-1]) for r, buffer in enumerate(got)))
        else:  # blocks may differ: what every rank scatters
            b.contracts = tuple(
                Contract(
                    op="scatter", root=s, inputs=tuple((x, 0, n if x == sent[s] else 0) for x, _, n in full),
                    outputs=tuple((got[d], behind[d][s], counts[s][d]) for d in ranks),
                )
                for s in ranks
            )  # fmt: skip
    program = b.build()
    return program_hash(program), program


def _turns(pairs: dict[tuple[int, int], int]) -> list[tuple[int, int]]:
    """(source, destination), so that in every turn the ranks that send do so to different ones."""
    ranks = 1 + max(max(x) for x in pairs) if pairs else 1
    return sorted(pairs, key=lambda x: ((x[1] - x[0]) % ranks, x))
