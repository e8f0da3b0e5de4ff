"""Search over fusions of a gradient list: the Pareto set of states per position, pruned by weighted lower bounds. All integers.

Source: Cupcake (MLSys 2023) for the timeline; the search is ours. A state after a group that ends at position i is (compute, network, chain,
decodes): end of its encode; end of its exchange; end of all decodes so far if the compute stream were free for them as soon as exchanges are
over; sum of the decodes. The step ends at max(compute + decodes, chain) of the last state. Every transition is non-decreasing in every
component, so a state that is nowhere smaller than another can be dropped.

Bounds: for each weight l, WEIGHT_PARTS * step >= l * (work of the compute stream) + (WEIGHT_PARTS - l) * (a chain of exchanges), and the least of the
right side over all suffixes is additive: `network[l, k]` where the chain begins with the network's present end, `stream[l, k]` where it begins with
a group that is not ready yet. They make the search exact in little time; they hold for any times >= 0.
Cost: per position, candidates = sum of kept states before it * codecs; each is compared with the kept states of its position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, copy_into, helper

__all__ = ["WEIGHT_PARTS", "advance", "extend", "suffix_bounds"]

I64 = NDArray[np.int64]
WEIGHT_PARTS = 16  # bounds are taken for the weights l / WEIGHT_PARTS, l = 0 .. WEIGHT_PARTS: more cost time, fewer prune less
_MAX_NS = 1 << 62  # above every time: where a minimum begins


@allocating
def advance(start, network, work, permille):  # type: ignore[no-untyped-def]
    """When `work` is done that begins at `start` on a stream that is slowed down until `network`."""
    if permille == 0 or network <= start:
        return start + work
    return start + work + min(work * permille // 1000, (network - start) * permille // (1000 + permille))


@allocating
def suffix_bounds(position, work, encode, exchange, decode, network, stream, decodes):  # type: ignore[no-untyped-def]
    """Fill column `position` of the bounds from the columns behind it.

    `work[i]`: backward from `position` to i; encode, exchange, decode[codec, i]: of the group (position, i]. Index i runs to the last position.
    """
    codecs, ends = encode.shape
    last = ends - 1
    for weight in range(WEIGHT_PARTS + 1):
        rest = WEIGHT_PARTS - weight
        least_network, least_stream = _MAX_NS, _MAX_NS
        for i in range(position + 1, ends):
            for q in range(codecs):
                h, g, d = encode[q, i], exchange[q, i], decode[q, i]
                # The compute stream does backward, encode and decode of the group in any case.
                busy = weight * (work[i] + h + d)
                if i == last:
                    # Last group: its decode cannot begin before its exchange ends, so it belongs to the chain too.
                    a = busy + rest * (g + d)
                    b = busy + rest * (work[i] + h + g + d)
                else:
                    a = busy + rest * g + network[weight, i]
                    # From a group that is not ready, the chain runs over its backward and encode first; what follows waits for the network,
                    # or again for the stream.
                    b = busy + rest * (work[i] + h) + max(rest * g + network[weight, i], stream[weight, i])
                least_network, least_stream = min(least_network, a), min(least_stream, b)
        network[weight, position], stream[weight, position] = least_network, least_stream
    least = _MAX_NS
    for i in range(position + 1, ends):
        for q in range(codecs):
            least = min(least, decode[q, i] + decodes[i])
    decodes[position] = least


@helper
def _least(compute, network_end, chain, total, position, network, stream, decodes):  # type: ignore[no-untyped-def]
    """A lower bound of the step, times WEIGHT_PARTS, of every completion of a state at `position`."""
    # Weight-free bounds first: all decodes follow the last encode, and the chain of decodes follows the exchanges.
    best = WEIGHT_PARTS * max(compute + total, chain + decodes[position])
    for weight in range(WEIGHT_PARTS + 1):
        rest = WEIGHT_PARTS - weight
        exchange = max(rest * network_end + network[weight, position], rest * compute + stream[weight, position])
        best = max(best, weight * (compute + total) + exchange)
    return best


@allocating
def extend(  # type: ignore[no-untyped-def]
    end, work, encode, exchange, decode, first, states, permille, network, stream, decodes, limit, beam
):
    """States kept at position `end`: (rows of compute, network, chain, decodes, index of the state before, codec), by rising sum.

    `work[k]`: backward from k to `end`; encode, exchange, decode[codec, k]: of the group (k, end]; states[first[k]:first[k + 1]]: kept at k.
    `limit`: states whose bound reaches it (times WEIGHT_PARTS) are dropped. `beam` > 0 keeps only so many, those with the least bounds.
    """
    codecs = encode.shape[0]
    size = 1024
    found = np.empty((size, 7), np.int64)
    count = 0
    for k in range(end):
        for s in range(first[k], first[k + 1]):
            for q in range(codecs):
                h, g, d = encode[q, k], exchange[q, k], decode[q, k]
                ready = advance(states[s, 0], states[s, 1], work[k] + h, permille)
                sent = max(states[s, 1], ready) + g
                chain = max(states[s, 2], sent) + d
                total = states[s, 3] + d
                # A state whose every completion reaches the limit cannot improve on what is known.
                bound = _least(ready, sent, chain, total, end, network, stream, decodes)
                if bound >= limit:
                    continue
                if count == size:
                    more = np.empty((2 * size, 7), np.int64)
                    for row in range(size):
                        copy_into(more[row], found[row])
                    found, size = more, 2 * size
                found[count, 0], found[count, 1], found[count, 2], found[count, 3] = ready, sent, chain, total
                found[count, 4], found[count, 5], found[count, 6] = s, q, bound
                count += 1
    keys = np.empty(count, np.int64)
    for c in range(count):  # a state that dominates another has no larger sum: one pass by rising sum needs no removal
        keys[c] = found[c, 6] if beam > 0 else found[c, 0] + found[c, 1] + found[c, 2] + found[c, 3]
    order = np.argsort(keys, kind="mergesort")
    kept = np.empty((count, 6), np.int64)
    many = 0
    for c in order:
        covered = False
        for m in range(many):
            if (
                kept[m, 0] <= found[c, 0] and kept[m, 1] <= found[c, 1] and kept[m, 2] <= found[c, 2] and kept[m, 3] <= found[c, 3]
            ):  # fmt: skip
                covered = True
                break
        if covered:
            continue
        for column in range(6):
            kept[many, column] = found[c, column]
        many += 1
        if beam > 0 and many == beam:
            break
    return kept[:many].copy()
