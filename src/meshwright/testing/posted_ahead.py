"""Receives posted ahead as on gloo, on a device without tags: what NCCL's rules refuse. A checker that lets it pass has lost its teeth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..program.issued import CallOrders, Communicator, Issued, Message
from ..program.program import Kind, Part, Program
from ..program.tables import I32
from ..run.executor.lanes import channel_messages
from ..run.executor.schedule import compile_schedule

__all__ = ["posted_ahead"]


def posted_ahead(program: Program, orders: Sequence[I32], sends_ahead: int, *, ready: bool) -> CallOrders:
    """Receives posted ahead as on gloo, every message a call by itself; a communicator and a stream per pair and direction, `ready` or not."""
    sends, receives = channel_messages(program)
    sender = {got: sent for a, b in zip(sends, receives, strict=True) for sent, got in zip(a, b, strict=True)}
    places = [{int(step): i for i, step in enumerate(order)} for order in orders]
    pairs = {pair: c for c, pair in enumerate((a, b) for a in range(program.ranks) for b in range(program.ranks) if a != b)}
    ranks = []
    for rank in range(program.ranks):
        schedule = compile_schedule(program, orders, rank, sends_ahead=sends_ahead)
        # Calls of a pair meet by their order: receives in that of the peer's sends, none later than one that follows it.
        of_peer: dict[int, list[tuple[int, int, Any]]] = defaultdict(list)
        for at, posted in schedule.posts.items():
            for receive in posted:
                of_peer[receive.peer].append((places[receive.peer][sender[receive.step]], at, receive))
        posts: dict[int, list[Any]] = defaultdict(list)
        for found in of_peer.values():
            latest = len(orders[rank])
            for _, at, receive in sorted(found, key=lambda x: x[0], reverse=True):
                latest = min(latest, at)
                posts[latest].insert(0, receive)
        entries: list[Issued] = []
        entry_of: dict[int, int] = {}
        last: tuple[int, ...] = ()
        walk = orders[rank].tolist()
        for position in range(len(walk) + 1):
            for step in schedule.waits.get(position, ()):
                entries.append(Issued("work", after=(entry_of[step],)))
                last = (len(entries) - 1,)
            for receive in posts.get(position, ()):
                entry_of[receive.step] = len(entries)
                pair = pairs[receive.peer, rank]
                entries.append(Issued("messages", 1 + pair, pair, (Message(receive.peer, False, 0, receive.step),), last))
            if position == len(walk):
                break
            step = walk[position]
            came = (entry_of[step],) if program.steps.kind[step] == Kind.TRANSFER and program.steps.parts[step] & Part.RECV else ()
            entries.append(Issued("work", after=came, step=step))
            last = (len(entries) - 1,)
            if step in schedule.sends:
                # Unlike a step that receives and sends: the later one is its send, which is what is waited for from here on.
                entry_of[step] = len(entries)
                pair = pairs[rank, schedule.sends[step].peer]
                entries.append(Issued("messages", 1 + pair, pair, (Message(schedule.sends[step].peer, True, 0, step),), last))
        ranks.append(tuple(entries))
    used = {entry.comm for entries in ranks for entry in entries if entry.kind == "messages"}
    return CallOrders(tuple(ranks), tuple(Communicator(pair, ready or c not in used) for pair, c in pairs.items()))
