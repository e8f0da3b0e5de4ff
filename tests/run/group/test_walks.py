"""Every strategy's programs on tensors of any length, walked in any order, against the definition of the operation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_ranks import in_any_order, in_waves, run_virtually

from meshwright.cost import Transport
from meshwright.decide.collective import NAMES, CollectiveProblem
from meshwright.errors import MeshwrightError, Unsupported
from meshwright.io.fabric.name import load_fabric
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Contract
from meshwright.run.executor.tags import TAG_WINDOW
from meshwright.run.group.chunks import ChunkMap, regions
from meshwright.run.group.instructions import Op
from meshwright.run.group.rank_code import MAX_ELEMENTS_AHEAD, compile_rank, form_of

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "scatter", "gather")
ROOTED = ("broadcast", "reduce", "scatter", "gather")
TRANSPORT = Transport(per_message_s=1e-4, per_byte_s=2.5e-10, per_step_s=5e-6)


@pytest.mark.sample(40)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_strategy_on_odd_lengths(name: str, op: str) -> None:
    fabric = load_fabric("two-islands")
    problem = CollectiveProblem.on(fabric, op, 1 << 16, root=1 if op in ROOTED else 0, transport=TRANSPORT, effort_s=5.0)
    try:
        plan = NAMES[name]().plan(problem, rng=np.random.default_rng(0))
    except MeshwrightError as error:
        assert isinstance(error, Unsupported), error
        return
    for seed, elements in enumerate((1, 3, 1000)):
        run_virtually(plan.program, op, elements, problem.root, seed, repeats=2)
    for seed in range(2):
        run_virtually(plan.program, op, 40, problem.root, seed, drive=in_any_order)
    for seed, elements in enumerate((1, 3, 40)):
        run_virtually(plan.program, op, elements, problem.root, seed, repeats=2, drive=in_waves)


@settings(max_examples=40)
@given(
    ranks=st.integers(2, 7), op=st.sampled_from(OPERATIONS), elements=st.integers(1, 300), size=st.sampled_from([64, 4096, 1 << 18]),
    name=st.sampled_from(["forestcoll", "ring", "blueconnect", "classic", "hierarchical", "joint", "blink"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_stars_of_any_size(ranks: int, op: str, elements: int, size: int, name: str, seed: int) -> None:
    fabric = load_fabric(f"star:{ranks}")
    problem = CollectiveProblem.on(fabric, op, size * ranks, root=seed % ranks if op in ROOTED else 0, transport=TRANSPORT)
    try:
        plan = NAMES[name]().plan(problem, rng=np.random.default_rng(seed))
    except MeshwrightError as error:
        assert isinstance(error, Unsupported), error
        return
    assert run_virtually(plan.program, op, elements, problem.root, seed, dtype=torch.int32).delivered >= ranks - 1


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "reduce-scatter"])
def test_repeated_lanes_put_blocks_where_torch_wants_them(op: str) -> None:
    fabric = load_fabric("star:4")
    problem = CollectiveProblem.on(fabric, op, 1 << 16, transport=TRANSPORT)
    plan = NAMES["forestcoll"](unroll=False, pieces=6).plan(problem, rng=np.random.default_rng(0))  # type: ignore[call-arg]
    assert int(plan.program.lanes.repeat.max()) == 6
    for elements in (5, 36, 77):
        run_virtually(plan.program, op, elements, 0, elements)


def test_more_messages_ahead_than_tags_tell_apart() -> None:
    """64 receives posted at once on one channel, whose first one also waits for something: they must be posted in the order of their messages."""
    b = ProgramBuilder(ranks=2, name="deep")
    x = [b.buffer(r, chunks=64, chunk_bytes=8, role="input") for r in range(2)]
    channel = b.channel(0, 1, depth=64)
    sending, taking = b.lane(0), b.lane(1)
    for i in range(64):
        sending.send(channel, x[0], i)
        taking.recv(channel, x[1], i)
    rows = tuple((x[r], 0, 64) for r in range(2))
    b.contract = Contract(op="broadcast", inputs=rows, outputs=rows, root=0)
    network = run_virtually(b.build(), "broadcast", 64, 0, 3)
    assert network.delivered == 64


def test_lanes_and_after_edges_keep_the_plans_order() -> None:
    """Nothing in the data orders these sends: the lane does, and an edge between lanes."""
    b = ProgramBuilder(ranks=3, name="paced")
    x = [b.buffer(r, chunks=3, chunk_bytes=8, role="input") for r in range(3)]
    near, far, late = b.channel(0, 1), b.channel(0, 2), b.channel(0, 1)
    lane, other = b.lane(0), b.lane(0)
    lane.send(near, x[0], 0)
    second = lane.send(far, x[0], 1)
    other.send(late, x[0], 2, after=[second])
    for rank, channel, chunk in ((1, near, 0), (2, far, 1), (1, late, 2)):
        b.lane(rank).recv(channel, x[rank], chunk)
    rows = tuple((x[r], 0, 3) for r in range(3))
    b.contract = Contract(op="broadcast", inputs=rows, outputs=rows, root=0)
    code = compile_rank(form_of(b.build()), 0, 3)
    sends = [row for row, i in enumerate(code.instructions) if i.op == Op.SEND]
    assert [code.flow.waits[row] for row in sends] == [0, 1, 1]
    assert sends[1] in code.flow.followers[sends[0]] and sends[2] in code.flow.followers[sends[1]]


@given(chunks=st.integers(1, 12), slices=st.integers(1, 5), blocks=st.integers(1, 4), elements=st.integers(0, 200))
def test_chunks_cover_every_element_once(chunks: int, slices: int, blocks: int, elements: int) -> None:
    shape = ChunkMap(chunks * blocks, slices, blocks, elements)
    seen = np.zeros(shape.total, int)
    for chunk in range(chunks * blocks * slices):
        low, high = shape.span(chunk)
        assert 0 <= low <= high <= shape.total
        seen[low:high] += 1
        block = (chunk % (chunks * blocks)) // chunks
        assert low == high or block * elements <= low < high <= (block + 1) * elements
    assert (seen == 1).all()
    sizes = {high - low for low, high in map(shape.padded.span, range(chunks * blocks * slices))}
    assert len(sizes) == 1 and shape.padded.total >= shape.total


def test_what_cannot_run_as_a_collective_is_refused() -> None:
    b = ProgramBuilder(ranks=2, name="bare")
    x = [b.buffer(r, chunks=3, chunk_bytes=8) for r in range(2)]
    channel = b.channel(0, 1)
    b.lane(0).send(channel, x[0], 0)
    b.lane(1).recv(channel, x[1], 0)
    with pytest.raises(Unsupported, match="contract"):
        regions(b.build(), 10)
    b.contract = Contract(op="all-gather", inputs=((x[0], 0, 1), (x[1], 1, 2)), outputs=((x[0], 0, 3), (x[1], 0, 3)))
    with pytest.raises(Unsupported, match="2 equal blocks"):
        compile_rank(form_of(b.build()), 0, 10)


def test_receiving_goes_straight_into_place() -> None:
    """An all-gather in place needs no staging; an all-reduce needs some, and no more than its channels hold."""
    fabric = load_fabric("star:4")
    problem = CollectiveProblem.on(fabric, "all-gather", 1 << 20, transport=TRANSPORT)
    gather = NAMES["forestcoll"]().plan(problem, rng=np.random.default_rng(0)).program
    assert compile_rank(form_of(gather), 0, 1000).staging == ()
    problem = CollectiveProblem.on(fabric, "all-reduce", 1 << 20, transport=TRANSPORT)
    reduce = NAMES["forestcoll"]().plan(problem, rng=np.random.default_rng(0)).program
    code = compile_rank(form_of(reduce), 0, 100_000)
    depth = int(reduce.channels.depth.max()) * int((reduce.channels.dst == 0).sum())
    assert 0 < len(code.staging) <= depth and sum(code.staging) <= 2 * 100_000
    assert sum(i.op == Op.COPY for i in code.instructions) == 0


@pytest.mark.parametrize(
    ("messages", "elements", "ahead"), [(6, 600, 6), (6, 3 * MAX_ELEMENTS_AHEAD, 2), (6, 6 * MAX_ELEMENTS_AHEAD, 1), (20, 2000, TAG_WINDOW)]
)
def test_short_receives_are_posted_beyond_their_channels_depth(messages: int, elements: int, ahead: int) -> None:
    """gloo's word that a receive is posted waits behind what goes the other way; long ones keep to the depth, which bounds staging."""
    b = ProgramBuilder(ranks=2, name="sums")
    x = [b.buffer(r, chunks=messages, chunk_bytes=8, role="input") for r in range(2)]
    channel = b.channel(0, 1, depth=1)
    sends, sums = b.lane(0), b.lane(1)
    for chunk in range(messages):
        sends.send(channel, x[0], chunk)
        sums.recv_add(channel, x[1], chunk)
    rows = tuple((buffer, 0, messages) for buffer in x)
    b.contract = Contract(op="reduce", inputs=rows, outputs=rows, root=1)
    code = compile_rank(form_of(b.build()), 1, elements)
    taken = [row for row, i in enumerate(code.instructions) if i.op == Op.TAKE]
    posts = [row for row, i in enumerate(code.instructions) if i.op == Op.POST]
    before_any = [p for p in posts if p < taken[0]]
    assert len(before_any) == ahead == len(code.staging) and all(code.flow.waits[p] == (p > posts[0]) for p in before_any)
