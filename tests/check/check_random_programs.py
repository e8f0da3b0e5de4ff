"""Small random programs, well-formed by construction; whether they are live or free of races is open."""

from __future__ import annotations

import random

from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.program import Program


def random_program(seed: int, *, max_repeat: int = 4, max_messages: int = 7, windows: bool = False, persistent: bool = False) -> Program:
    """2-3 ranks, 1-3 lanes each, messages between random lanes (some fused), local copies, `after` edges with lags, depths 1-3.

    All lanes repeat alike, except that a rank may have one more lane of repeat 1 that others wait for once.
    """
    rng = random.Random(seed)
    ranks = rng.randint(2, 3)
    repeat = rng.randint(1, max_repeat)
    b = ProgramBuilder(ranks=ranks, name=f"random {seed}")
    lanes = [(r, b.lane(r, repeat=repeat)) for r in range(ranks) for _ in range(rng.randint(1, 3))]
    buffers = [
        [b.buffer(r, chunks=2, chunk_bytes=4, window=rng.randint(0, 3) if windows else 0, name=f"b{r}.{k}") for k in range(2)] for r in range(ranks)
    ]
    # every lane's steps as a list of ("send" | "recv" | "fused" | "copy", channel in, channel out)
    todo: list[list[tuple[str, int, int]]] = [[] for _ in lanes]
    channel: dict[tuple[int, int], int] = {}
    for _ in range(rng.randint(1, max_messages)):
        one, two = rng.randrange(len(lanes)), rng.randrange(len(lanes))
        if lanes[one][0] == lanes[two][0]:
            continue
        if (one, two) not in channel:
            channel[one, two] = b.channel(lanes[one][0], lanes[two][0], depth=rng.randint(1, 3))
        todo[one].insert(rng.randint(0, len(todo[one])), ("send", -1, channel[one, two]))
        todo[two].insert(rng.randint(0, len(todo[two])), ("recv", channel[one, two], -1))
    for steps in todo:
        if rng.random() < 0.5:
            steps.insert(rng.randint(0, len(steps)), ("copy", -1, -1))
        for k in range(len(steps) - 1):
            if steps[k][0] == "recv" and steps[k + 1][0] == "send" and rng.random() < 0.5:
                steps[k] = ("fused", steps[k][1], steps[k + 1][2])
                steps[k + 1] = ("gone", -1, -1)
        steps[:] = [x for x in steps if x[0] != "gone"]
    refs: list[tuple[int, StepRef]] = []
    for (rank, lane), steps in zip(lanes, todo, strict=True):
        for what, into, out in steps:
            place = (rng.choice(buffers[rank]), rng.randrange(2))
            after = [(ref, rng.choice([0, 0, 0, 1, 2])) for r, ref in refs if r == rank and ref.lane != lane.number and rng.random() < 0.15]
            if what == "send":
                ref = lane.send(out, *place, after=after)
            elif what == "recv":
                ref = lane.recv(into, *place, after=after)
            elif what == "fused":
                ref = lane.recv_send(into, out, *place, after=after)
            else:
                ref = lane.copy(place, (rng.choice(buffers[rank]), rng.randrange(2)), after=after)
            refs.append((rank, ref))
    for _ in range(rng.randint(0, 2)):  # edges the other way round: where cycles come from
        (r1, one), (r2, two) = rng.choice(refs or [(0, StepRef(0, 0))]), rng.choice(refs or [(1, StepRef(0, 0))])
        if r1 == r2 and one.lane != two.lane:
            b._lanes[one.lane].wait(one.position, (two, rng.choice([0, 1])))
    if rng.random() < 0.3 and refs:
        rank, ref = rng.choice(refs)
        once = b.lane(rank)
        first = once.copy((buffers[rank][0], 0), (buffers[rank][1], 0))
        b._lanes[ref.lane].wait(ref.position, first)
    return b.build()
