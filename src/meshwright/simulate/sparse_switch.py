"""Sparse sums on the way up a tree of switches: what every link carries, what a switch must hold, and when dense numbers or the hosts are better.

Cite: D. De Sensi, S. Di Girolamo, S. Ashkboos, S. Li, T. Hoefler, "Flare: Flexible In-Network Allreduce" (SC 2021, arXiv 2106.15565), section 7.
Left open by the paper: when a block is over, and where the table gives way to an array. Our answer: the last packet of a child says how many it has
sent, so an empty block is one packet without pairs; an array from the pair on with which what was sent and is held would take as many bytes.
Deviations: times are the busiest link's bytes over its rate, so handlers are as fast as the line (`handlers` says whether they are).
Invariant: what leaves the top is the sum of what the hosts sent, pair by pair; a pair that finds its place taken travels on and is added above.
Cost: O(1) per pair and switch; the array O(span) per block.

A message is cut into blocks of `span` indices. Hosts send (index, value) pairs, block by block. A switch keeps, per block, a table with one place per
hash; a pair whose place another index has goes to a spill buffer, and a full one is sent up at once. The handlers (`kernels.sparse_block`) are those
of the switch in software (`run.aggregate.sparse_rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..kernels import sparse_block
from ..kernels.compile import allocating, fingerprint
from ..kernels.sparse_block import DENSE, HELD, NUMBER_BYTES, PAIR_BYTES, WAITING, clear, insert, made_blocks, pop

__all__ = ["Level", "Reduction", "SparseSwitch", "random_supports", "reduce_sparse", "union_pairs", "ways"]

HEADER_BYTES = 58  # of a packet on the wire: Ethernet, IP, UDP, and a header of 16 bytes
MAX_DRAWN = 1 << 34  # elements of all hosts: one random number each, a minute or two
MAX_PAIRS = 1 << 25  # of all hosts together: some seconds, 1 GB
MAX_ELEMENTS = 1 << 31  # of a message: the hash of an index is worked out in 64 bits


@dataclass(frozen=True, kw_only=True)
class SparseSwitch:
    """`span`: indices of a block; `places`: of its table; `spill`: pairs that wait for a full packet upwards; `packet_bytes`: payload."""

    span: int = 1 << 14
    places: int = 1 << 11
    spill: int = 127
    packet_bytes: int = 1024

    def __post_init__(self) -> None:
        if min(self.span, self.places, self.spill) < 1 or self.packet_bytes < PAIR_BYTES:
            raise UsageError("span, places and spill are at least 1, a packet has at least a pair", where="switch")


@dataclass(frozen=True)
class Level:
    """Links between one level and the next above, of all its senders: `pairs` sent, of them `spilled` early; `blocks_dense` sent as arrays; mean and
    largest bytes of one link; `table_bytes`: most that one block of a sender held (0: a host). `expected_pairs`: of independent supports."""

    hosts_below: int
    senders: int
    pairs: int
    spilled: int
    blocks_dense: int
    mean_bytes: float
    most_bytes: int
    table_bytes: int
    expected_pairs: float


@dataclass(frozen=True)
class Reduction:
    """`levels`: from the hosts up; `indices`, `values`: of the sum; `down_bytes`: of the result, on every link down."""

    levels: tuple[Level, ...]
    indices: NDArray[Any]
    values: NDArray[Any]
    down_bytes: int


def union_pairs(elements: int, density: float, hosts: int) -> float:
    """Expected size of the union of independent supports: n (1 - (1 - p)^m)."""
    return float(elements * (1 - (1 - density) ** hosts))


def random_supports(elements: int, density: float, hosts: int, *, overlap: float = 0.0, seed: int = 0) -> list[NDArray[np.int64]]:
    """Ascending indices per host, each taken with probability `density`; `overlap`: this share of a host's comes from one list for all."""
    drawn = elements * hosts
    if not 0 <= density <= 1 or not 0 <= overlap <= 1 or min(elements, hosts) < 1 or drawn * density > MAX_PAIRS or drawn > MAX_DRAWN:
        hint = f"densities from 0 to 1, at most {MAX_PAIRS:,} pairs in all and {MAX_DRAWN:,} elements of all hosts together"
        raise UsageError(f"{hosts} hosts of {elements} elements at density {density:g}", where="density", hint=hint)
    rng = np.random.default_rng(seed)
    common = rng.random(elements) < density
    found = []
    for _ in range(hosts):
        own = rng.random(elements) < density
        found.append(np.flatnonzero(np.where(rng.random(elements) < overlap, common, own)))
    return found


def reduce_sparse(hosts: Sequence[tuple[NDArray[Any], NDArray[Any]]], elements: int, tree: Sequence[int], switch: SparseSwitch) -> Reduction:
    """The sum of the hosts' (ascending indices, values) through the tree.

    tree: children of a switch, from the top down; their product is the number of hosts. Raises: UsageError.
    """
    if not 1 <= elements <= MAX_ELEMENTS:
        raise UsageError(f"{elements} elements", where="elements", hint=f"1 to {MAX_ELEMENTS}")
    if not tree or min(tree) < 1 or prod(tree) != len(hosts):
        raise UsageError(f"a tree of {' x '.join(map(str, tree))} has {prod(tree)} hosts, there are {len(hosts)}", where="tree")
    for number, (indices, values) in enumerate(hosts):
        ascending = len(indices) == len(values) and bool((np.diff(indices) > 0).all())
        if not ascending or (len(indices) and not 0 <= indices[0] <= indices[-1] < elements):
            raise UsageError(f"host {number}: ascending indices below {elements}, with a value each", where="hosts")
    blocks = -(-elements // switch.span)
    sent = [_Sent(np.asarray(i, np.int64), np.asarray(v, np.float64), np.bincount(np.asarray(i) // switch.span, minlength=blocks)) for i, v in hosts]
    density = sum(len(i) for i, _ in hosts) / (elements * len(hosts))
    levels = [_level(sent, switch, elements, 1, density)]
    for depth, children in enumerate(reversed(tree)):
        sent = [_switched(sent[i : i + children], switch, blocks) for i in range(0, len(sent), children)]
        if depth + 1 < len(tree):
            levels.append(_level(sent, switch, elements, len(hosts) // len(sent), density))
    top = sent[0]
    indices, where = np.unique(top.indices, return_inverse=True)
    values = np.zeros(len(indices))
    np.add.at(values, where, top.values)
    down = int(_link_bytes(np.bincount(indices // switch.span, minlength=blocks), switch).sum())
    return Reduction(tuple(levels), indices, values, down)


def ways(found: Reduction, elements: int, hosts: int, rate_Bps: float, switch: SparseSwitch) -> dict[str, float]:
    """Seconds of the busiest link: `sparse` up and down the tree at once; `dense` numbers through the same switches; `hosts`, which send all pairs
    to all in a ring; the dense `ring`."""
    dense = _array_bytes(elements, switch)
    own = max(level.most_bytes for level in found.levels[:1])
    most = max(found.down_bytes, *(level.most_bytes for level in found.levels))
    return {  # of equals the first is the simplest
        "dense": dense / rate_Bps, "ring": 2 * dense * (hosts - 1) / hosts / rate_Bps, "hosts": own * (hosts - 1) / rate_Bps,
        "sparse": most / rate_Bps,
    }  # fmt: skip


@dataclass
class _Sent:
    """What one sender sends up: pairs in order of sending, how many per block; of them spilled early; most bytes that a block held."""

    indices: NDArray[np.int64]
    values: NDArray[np.float64]
    per_block: NDArray[np.int64]
    spilled: int = 0
    held_bytes: int = 0


def _array_bytes(numbers: int, switch: SparseSwitch) -> int:
    return numbers * NUMBER_BYTES + -(-numbers * NUMBER_BYTES // switch.packet_bytes) * HEADER_BYTES


def _link_bytes(per_block: NDArray[np.int64], switch: SparseSwitch) -> NDArray[np.int64]:
    """Bytes of each block: as pairs, or as an array where that is less; an empty one is a packet without any."""
    packets = np.maximum(-(-per_block * PAIR_BYTES // (switch.packet_bytes // PAIR_BYTES * PAIR_BYTES)), 1)
    found: NDArray[np.int64] = np.minimum(per_block * PAIR_BYTES + packets * HEADER_BYTES, _array_bytes(switch.span, switch))
    return found


def _level(sent: Sequence[_Sent], switch: SparseSwitch, elements: int, hosts_below: int, density: float) -> Level:
    each = [_link_bytes(s.per_block, switch) for s in sent]
    array = _array_bytes(switch.span, switch)
    return Level(
        hosts_below, len(sent), sum(len(s.indices) for s in sent), sum(s.spilled for s in sent), int(sum((e == array).sum() for e in each)),
        float(np.mean([e.sum() for e in each])), int(max(e.sum() for e in each)), max(s.held_bytes for s in sent),
        union_pairs(elements, density, hosts_below) * len(sent),
    )  # fmt: skip


def _switched(children: Sequence[_Sent], switch: SparseSwitch, blocks: int) -> _Sent:
    """What a switch sends up of its children's pairs: they come packet by packet, one child after the other."""
    per_packet = switch.packet_bytes // PAIR_BYTES
    block, turn, child = [], [], []
    for number, sent in enumerate(children):
        of = sent.indices // switch.span
        order = np.argsort(of, kind="stable")
        sent.indices, sent.values, of = sent.indices[order], sent.values[order], of[order]
        first = np.cumsum(sent.per_block) - sent.per_block
        block.append(of)
        turn.append((np.arange(len(of)) - first[of]) // per_packet)
        child.append(np.full(len(of), number))
    order = np.lexsort((np.concatenate(child), np.concatenate(turn), np.concatenate(block)))
    indices, values = np.concatenate([s.indices for s in children])[order], np.concatenate([s.values for s in children])[order]
    ends = np.cumsum(np.bincount(indices // switch.span, minlength=blocks))
    made = made_blocks(1, span=switch.span, places=switch.places, waiting=switch.spill, keys=np.int64, values=np.float64)
    out_indices, out_values, per_block, spilled, held = _served(indices, values, ends, made, switch.span, switch.spill)
    return _Sent(out_indices, out_values, per_block, int(spilled), int(held))


def _entry(sources: int) -> Any:
    """Closes over the source of what it uses: code that was kept for another is not taken."""

    @allocating
    def served(indices, values, ends, blocks, span, spill):  # type: ignore[no-untyped-def]
        """Every block of a switch, by the handlers that the switch in software runs: what is sent up, in order."""
        out_indices, out_values = np.empty(len(indices), np.int64), np.empty(len(values), np.float64)
        per_block, state = np.zeros(len(ends), np.int64), blocks.state
        out = spilled = most = begin = sources * 0
        for b in range(len(ends)):
            first = out
            clear(blocks, 0, span, False)
            for i in range(begin, ends[b]):
                insert(blocks, 0, b * span, span, indices[i], values[i])
                most = max(most, span * NUMBER_BYTES if state[0, DENSE] else (state[0, HELD] + state[0, WAITING]) * PAIR_BYTES)
                if state[0, WAITING] == spill:
                    for _ in range(spill):
                        out_indices[out], out_values[out] = pop(blocks, 0, b * span, span)
                        out += 1
                    spilled += spill
            while True:
                index, value = pop(blocks, 0, b * span, span)
                if index < 0:
                    break
                out_indices[out], out_values[out] = index, value
                out += 1
            per_block[b], begin = out - first, ends[b]
        return out_indices[:out], out_values[:out], per_block, spilled, most

    return served


_served = _entry(fingerprint(str(sparse_block.__file__)))
