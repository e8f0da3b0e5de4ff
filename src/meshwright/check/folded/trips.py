"""What one rank of a folded program knows of its own steps from messages that went out and came back.

A message from another member orders what that member did. But a member that sends to this rank after it got something of this rank says that this
rank had sent that: a way out and a way back along the fold's axes, whose offsets add up to nothing. In stored steps: the receipt of an answer comes
after the sending of a question, where the receipt of questions of that offset comes before the sending of answers. Memory is counted in this order:
without it a rank would keep all rows that it ever sends to experts, since nothing of its own says that they have left.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from ...program.program import Program
from ..program.order import Order
from .messages import linked_by
from .shadow import Shadow

__all__ = ["with_round_trips"]

Ints = np.ndarray[Any, Any]


def with_round_trips(made: Shadow) -> Program:
    """The shadow's program with an edge from every question's sending to the receipts of answers that come after its own receipt.

    Cost: a binary search per message among those of each channel that leads the other way.
    """
    p = made.program
    ends = dict(made.message_steps())
    if not ends:
        return p
    order, sizes = Order(p), [axis.size for axis in made.axes]
    # By channel: from which stored rank, to the image of which, how far along the axes; and its messages in order, as (sending, receipt).
    of: dict[int, list[int]] = defaultdict(list)
    into: dict[int, list[int]] = defaultdict(list)
    for step in sorted(ends):
        (of if ends[step].sends else into)[ends[step].channel].append(step)
    actor = p.lanes.actor[p.lane_of_step()]
    leads: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for c, steps in of.items():
        by = tuple(x % n for x, n in zip(ends[steps[0]].by, sizes, strict=True))
        leads[int(actor[steps[0]]), int(actor[into[c][0]]), by].append(c)
    edges: list[tuple[int, int]] = []
    for (source, target, by), answers in leads.items():
        back = tuple(-x % n for x, n in zip(by, sizes, strict=True))
        for question in leads.get((target, source, back), ()):
            asked, got = np.array(of[question]), np.array(into[question])
            for answer in answers:
                edges += _edges(order, asked, got, np.array(of[answer]), np.array(into[answer]))
    return linked_by(p, edges)


def _edges(order: Order, asked: Ints, got: Ints, sent: Ints, arrived: Ints) -> list[tuple[int, int]]:
    """From `asked` to `arrived`, for every answer the last question whose receipt (`got`) comes before its sending (`sent`)."""
    low, high = np.zeros(len(sent), np.int64), np.full(len(sent), len(got), np.int64)  # so many questions surely came before, at most
    while np.any(low < high):
        middle = (low + high + 1) // 2
        at = np.maximum(middle - 1, 0)
        before = order.before(order.node(got[at], np.zeros(len(at), np.int64)), order.node(sent, np.zeros(len(at), np.int64)))
        open_ = low < high
        low = np.where(open_ & before, middle, low)
        high = np.where(open_ & ~before, middle - 1, high)
    told = np.diff(low, prepend=0) > 0  # what an earlier answer said is known
    return list(zip(asked[low[told] - 1].tolist(), arrived[told].tolist(), strict=True))
