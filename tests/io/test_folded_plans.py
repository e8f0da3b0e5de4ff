"""Plans of alike servers are stored folded once they get large: they are written, read, checked, exported and imported like any other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from msccl_executor_twin import replays

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.forestcoll.strategy import OPERATIONS
from meshwright.drive.collective.job import plan_collective
from meshwright.drive.handover.msccl import export_msccl
from meshwright.drive.plans import check_plan
from meshwright.errors import FormatError, Unsupported
from meshwright.interop.from_msccl import import_msccl
from meshwright.interop.msccl import ExecutorLimits
from meshwright.interop.to_msccl import MscclOptions, lower_to_msccl, most_connections
from meshwright.io.fabric.name import load_fabric
from meshwright.io.msccl.xml import msccl_text, parse_msccl
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.plan.plan import Plan
from meshwright.program.builder import ProgramBuilder
from meshwright.program.fold import expand
from meshwright.program.program import Contract
from meshwright.program.validate import validate

FOLDED = [op for op in OPERATIONS if op in ("all-gather", "reduce-scatter", "all-reduce")]  # others have one root, so no two servers are alike


@cache
def folded(op: str) -> Plan:
    problem = CollectiveProblem.on(load_fabric("dgx-a100:3"), op, 24 << 20)
    plan, _ = plan_collective(problem, candidates=[ForestColl(fold=True, pieces=4, unroll=False)])
    assert plan.main.fold is not None
    return plan


@pytest.mark.parametrize("op", FOLDED)
def test_a_folded_plan_is_written_read_and_checked(op: str) -> None:
    plan = folded(op)
    back = plan_from_bytes(plan_bytes(plan))
    assert plan_bytes(back) == plan_bytes(plan)
    check_plan(back)
    assert check_program(expand(back.main)).ok
    contract = back.main.contract
    assert contract is not None and [b for b, _, _ in contract.outputs] == list(range(24)) and len(back.main.buffers) == 8


@pytest.mark.parametrize("op", FOLDED)
def test_a_contract_of_a_folded_program_names_buffers_of_every_member(op: str) -> None:
    main = folded(op).main
    contract = main.contract
    assert contract is not None
    chunks = int(main.buffers.chunks[0])
    for field in ("inputs", "outputs"):
        beyond = f"chunks 1..{1 + chunks} of a buffer with {chunks}"
        for triple, message in (((24, 0, 1), "must be a buffer 0..23, got 24"), ((9, 1, chunks), beyond)):
            wrong: Contract = replace(contract, **{field: (*getattr(contract, field)[:-1], triple)})
            with pytest.raises(FormatError, match=message) as caught:
                validate(replace(main, contracts=(wrong,)))
            assert caught.value.where == f"program.contract.{field}[23]"


@pytest.mark.parametrize("op", FOLDED)
def test_trees_with_more_connections_than_blocks_share_them(op: str) -> None:
    main = folded(op).main
    with pytest.raises(Unsupported) as caught:
        export_msccl(main, MscclOptions(blocks=1))
    peers = int(caught.value.data["needed"])  # a block sends to one peer, so fewer cannot do
    apart, pooled = export_msccl(main), export_msccl(main, MscclOptions(blocks=peers + 1))
    assert pooled.options.pool and not apart.options.pool
    assert most_connections(main) == most_connections(expand(main)) > peers
    most = [max(len(g.blocks) for g in done.algo.gpus) for done in (apart, pooled)]
    assert most[1] <= peers + 1 < most[0]
    text = msccl_text(pooled.algo)
    replays(text, seeds=1)  # the independent executor: right values, whatever the order of blocks
    read = parse_msccl(text.encode())
    back = import_msccl(read, in_place=bool(read.in_place), chunk_bytes=4).program
    assert check_program(back).ok and back.ranks == 24


def test_what_no_way_of_writing_brings_within_limits_is_refused_before_it_is_written_out() -> None:
    main = folded("all-gather").main
    with pytest.raises(Unsupported, match="gpus: 24, the executor has 20") as caught:
        export_msccl(main, MscclOptions(limits=ExecutorLimits(children=20)))
    assert caught.value.data == {"limit": "children", "needed": 24, "most": 20}
    received = np.bincount(main.lanes.actor[main.lane_of_step()][main.steps.chan_in >= 0]).max()
    needed = int(1 + 24 + received)
    with pytest.raises(Unsupported, match="XML elements of gpu") as caught:
        export_msccl(main, MscclOptions(limits=ExecutorLimits(nodes=needed - 1)))
    assert caught.value.data == {"limit": "nodes", "needed": needed, "most": needed - 1}


def test_messages_that_wait_for_each_others_ends_cannot_share_connections() -> None:
    b = ProgramBuilder(ranks=2)
    data = [b.buffer(r, chunks=2, chunk_bytes=4, role="input") for r in range(2)]
    there, back = b.channel(0, 1), b.channel(1, 0)
    # in place: either rank receives where it sent from, so each receipt waits for its rank's own sending
    first, second = b.lane(0), b.lane(1)
    first.send(there, data[0], 1, 1)
    first.recv(back, data[0], 1, 1)
    second.send(back, data[1], 0, 1)
    second.recv(there, data[1], 0, 1)
    whole = tuple((d, 0, 2) for d in data)
    b.contract = Contract(op="all-to-all", inputs=whole, outputs=whole)
    program = b.build()
    assert check_program(program).ok and export_msccl(program, place="in").algo.ranks == 2
    with pytest.raises(Unsupported, match="cannot share connections") as caught:
        lower_to_msccl(program, MscclOptions(place="in", pool=True))
    assert caught.value.data == {"limit": "order"}
