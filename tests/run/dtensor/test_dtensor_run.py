"""Sharding plans on real processes: the serial run's loss and gradients, the planned bytes, DTensor's pieces; and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from captured import captured
from effort import few
from meshwright.cost import Cost, Transport
from meshwright.decide.layout.autoddl import AutoDDL, ShardingPlan, ShardingProblem
from meshwright.errors import FormatError, PlanMismatch, RunTimeout, TooFewDevices, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.run.dtensor.placements import placements
from meshwright.run.dtensor.run import read_layout, run_layout, write_layout
from meshwright.run.dtensor.worker import run_rank

EXAMPLES = Path(__file__).parents[3] / "examples"
NETS = Path(__file__).parents[2] / "decide" / "layout" / "autoddl" / "sharding_problems.py"
pytestmark = pytest.mark.timeout(240)


def star(devices: int) -> Fabric:
    row = tuple(Device(name=f"n{i}", kind="cpu", flops={"fp32": 10**8}) for i in range(devices))  # slow enough for splits to pay
    links = tuple(x for d in row for x in (Link(src=d.name, dst="s", rate_Bps=10**9), Link(src="s", dst=d.name, rate_Bps=10**9)))
    return Fabric(name="star", devices=row, switches=(Switch(name="s"),), links=links)


def plan(model: str, devices: int, search: str = "auto", mesh: tuple[int, ...] | None = None) -> ShardingPlan:
    cost = Cost(per_call_s=1e-7, transport=Transport(per_message_s=1e-7))
    problem = ShardingProblem(graph=captured(model, scalable=False), fabric=star(devices), cost=cost, item_bytes=8)
    return AutoDDL(search=search, mesh=mesh).plan(problem)


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.parametrize("devices", [2, 4])
def test_loss_gradients_and_bytes(devices: int) -> None:
    """AutoDDL's plan and templates of nets with attention, tied weights, batch norm, convolutions, uneven widths, an operator kept whole."""
    mesh = (2, 2) if devices == 4 else (2,)
    wanted = [
        plan(f"{EXAMPLES / 'gpt.py'}:tiny_tied", devices, mesh=mesh), plan(f"{EXAMPLES / 'convnet.py'}:tiny", devices, mesh=mesh),
        plan(f"{NETS}:fc_uneven", devices, mesh=mesh), plan(f"{NETS}:branches", devices, mesh=mesh), plan(f"{NETS}:fc", devices, "data"),
        plan(f"{EXAMPLES / 'gpt.py'}:tiny", devices, "megatron"), plan(f"{EXAMPLES / 'convnet.py'}:tiny", devices, "data"),
    ]  # fmt: skip
    assert all(b.total for p in wanted for b in p.bytes_sent), "a plan without communication tests nothing"
    found = run_layout(wanted, steps=1, warmup=1, dtype="float64", verify=True)
    for p, r in zip(wanted, found, strict=True):
        where = (p.model, p.strategy, p.mesh)
        assert r.bytes_equal, (where, r.sent_bytes, p.bytes_sent)
        assert r.loss_apart is not None and r.loss_apart < 1e-9, where
        assert r.gradients_apart is not None and r.gradients_apart < 1e-9, (where, r.gradients_apart)
        assert r.losses[1] != r.losses[0], "the optimiser moved nothing"
        assert r.time_s > 0


@pytest.mark.real
def test_losses_do_not_depend_on_the_layout_with_dropout() -> None:
    """The mask belongs to the tensor, not to the rank: data parallel, tensor parallel and one axis more give one loss, step after step."""
    plans = [plan(f"{NETS}:dropped", 4, "data"), plan(f"{NETS}:dropped", 4, "megatron"), plan(f"{NETS}:dropped", 4, mesh=(2, 2))]
    first, *others = run_layout(plans, steps=3, warmup=0, dtype="float64")
    for other in others:
        assert other.losses == pytest.approx(first.losses, rel=1e-12)
    assert first.losses[1] != first.losses[0]


SCRIPT = """
import sys, torch, torch.distributed as dist
from itertools import product
from torch.distributed.tensor import distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
from meshwright.decide.layout.autoddl.mesh import Axis, Mesh
from meshwright.decide.layout.autoddl.redistribute import Redistributor, step_sent
from meshwright.plan.sbp import coordinates, valid
from meshwright.run.dtensor.placements import placement_of
from meshwright.lower.sharding import Redistribution
from meshwright.run.dtensor.pieces import Place, cut
from meshwright.run.dtensor.redistribute import LoneRedistribution
from meshwright.run.executor.transport import own_transport
import os
sizes = tuple(map(int, sys.argv[1].split("x")))
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
transport = own_transport(rank, torch.device("cpu"))
place = Place(sizes, list(coordinates(sizes))[rank])
device_mesh = init_device_mesh("cpu", sizes)
redistribute = Redistributor(Mesh(tuple(Axis(p, 1e-9, 1e-6, 1e-6) for p in sizes)))
done = 0
for shape in ((8, 4), (7, 6)):
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).reshape(shape)
    states = [s for s in product(("B", "P", "S0", "S1"), repeat=len(sizes)) if valid(shape, s, sizes)]
    backs = {}
    for a, b in list(product(states, states))[::int(sys.argv[2])]:
        piece = cut(whole, a, place)
        for axis, kind in enumerate(a):
            if kind == "P":
                piece = piece * (1.0 / sizes[axis])
        steps = redistribute.path(shape, 8, a, b)
        def along(state, steps):
            way = Redistribution((shape,) * dist.get_world_size(), state, tuple(steps), "test")
            return LoneRedistribution(sizes, rank, way, "float64", transport)
        ahead = along(a, [(s.axis, s.target) for s in steps])
        got = ahead.run(piece)
        assert ahead.messages.sent_bytes.get("test", 0) == 8 * sum(step_sent(shape, s, sizes, place.at) for s in steps), (a, b)
        if b not in backs:
            backs[b] = along(b, [(i, "B") for i in reversed(range(len(b))) if b[i] != "B"])
        back = backs[b].run(got)
        assert torch.allclose(back, whole), (a, b)
        done += 1
    for state in states:
        if "P" not in state:
            theirs = distribute_tensor(whole, device_mesh, [placement_of(k) for k in state]).to_local()
            assert torch.equal(cut(whole, state, place), theirs), state
assert done > 20, done
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch's own threads may end the process with "terminate called" when the interpreter tears them down
"""


@pytest.mark.sample(2)
@pytest.mark.real
@pytest.mark.parametrize("mesh", ["2", "4", "2x2"])
def test_every_redistribution_on_gloo_sends_the_predicted_bytes_and_pieces_are_dtensors(mesh: str, tmp_path: Path) -> None:
    import socket

    ranks = 2 if mesh == "2" else 4
    stride = "3" if mesh == "2x2" and few(100) < 100 else "1"  # of the pairs of states; each is left and reached
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    processes = [
        subprocess.Popen([*command, mesh, stride], env={**environment, "RANK": str(r)}, stderr=subprocess.PIPE, text=True)
        for r in range(ranks)
    ]
    try:
        said = [p.communicate(timeout=150)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), said


# ---- files -----------------------------------------------------------------------------------------------------------
def test_plans_are_written_and_read_and_broken_ones_refused(tmp_path: Path) -> None:
    good = plan(f"{NETS}:fc", 2, "data")
    write_layout(tmp_path / "a.json", good)
    assert read_layout(tmp_path / "a.json") == good
    with pytest.raises(UsageError, match="cannot read"):
        read_layout(tmp_path / "none.json")
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(FormatError, match="no layout plan"):
        read_layout(tmp_path / "b.json")
    (tmp_path / "b.json").write_text('{"plan": 1' + "0" * 5000 + "}")  # an integer of thousands of digits
    with pytest.raises(FormatError, match="no layout plan"):
        read_layout(tmp_path / "b.json")
    broken = {
        "is not meshwright.layout version 1": {"version": 2}, "is not 2 devices": {"mesh": (3,)},
        "one SBP type per mesh axis": {"sources": {**good.sources, "input:0": ("Q",)}}, "a bucket that is never summed": {"buckets": ()},
        "an axis or a type": {"moves": (msgspec.structs.replace(good.moves[0], forward=((5, "B"),)), *good.moves[1:])},
    }  # fmt: skip
    for message, change in broken.items():
        write_layout(tmp_path / "c.json", msgspec.structs.replace(good, **change))
        with pytest.raises(FormatError, match=message):
            read_layout(tmp_path / "c.json")


def test_placements_in_dtensors_words() -> None:
    from torch.distributed.tensor import Replicate, Shard

    found = placements(plan(f"{NETS}:fc", 4, "megatron"))
    assert found["param:0.weight"] == (Shard(0),) and found["param:2.weight"] == (Shard(1),) and found["input:0"] == (Replicate(),)
    assert found["linear"] == (Shard(1),)


# ---- what goes wrong -------------------------------------------------------------------------------------------------
def test_senseless_requests_are_refused() -> None:
    two, four = plan(f"{NETS}:fc", 2, "data"), plan(f"{NETS}:fc", 4, "data")
    with pytest.raises(UsageError, match="at least 1"):
        run_layout([two], steps=0)
    with pytest.raises(UsageError, match="take turns"):
        run_layout([two, four])
    with pytest.raises(TooFewDevices):
        run_layout([two], device="cuda")


@pytest.mark.real
def test_what_a_rank_refuses_is_said_and_slow_ones_are_ended(tmp_path: Path) -> None:
    good = plan(f"{NETS}:fc", 2, "data")
    changed = msgspec.structs.replace(good, fingerprint="0" * 16)
    with pytest.raises(PlanMismatch, match="not the planned one"):
        run_layout([changed])
    with pytest.raises(RunTimeout):
        run_layout([good], timeout_s=0.2)


def step_of(model: str, broken: ShardingPlan) -> object:
    from meshwright.capture.forward import trace_forward
    from meshwright.capture.graph import executed_graph
    from meshwright.lower.sharding import lower_sharding
    from meshwright.program.calls import inline
    from meshwright.run.dtensor.work import ShardedWork

    traced = trace_forward(model, device="cpu")
    lowered = lower_sharding(broken, executed_graph(traced))
    return ShardedWork(broken, traced, lowered, inline(lowered.program, lowered.callees).program, 0)


def test_plans_of_other_models_are_refused() -> None:
    good = plan(f"{NETS}:fc", 1)
    step_of(f"{NETS}:fc", good)
    with pytest.raises(PlanMismatch, match="says nothing about"):
        step_of(f"{NETS}:fc", msgspec.structs.replace(good, sources={}))
    with pytest.raises(PlanMismatch, match="has no operator"):
        step_of(f"{NETS}:fc", msgspec.structs.replace(good, ops={}))
    with pytest.raises(PlanMismatch, match="operators differ"):
        step_of(f"{NETS}:fc", msgspec.structs.replace(good, ops={**good.ops, "more": good.ops["linear"]}))
    step_of(f"{NETS}:overwrites", plan(f"{NETS}:overwrites", 1))  # capture writes it out: through a view, and read afterwards


def test_in_place_operators_are_run_out_of_place_or_refused() -> None:
    import torch

    from meshwright.run.dtensor.local import _out_of_place

    assert _out_of_place(torch.ops.aten.relu_.default) is torch.ops.aten.relu.default
    assert _out_of_place(torch.ops.aten.add.Tensor) is torch.ops.aten.add.Tensor
    with pytest.raises(Unsupported, match="no twin"):
        _out_of_place(torch.ops.aten.normal_.default)


def test_what_is_overwritten_and_read_again_is_refused() -> None:
    import torch

    from meshwright.run.dtensor.work import _refuse_overwriting

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.aten.view.default, (x, [-1]))
    written = graph.call_function(torch.ops.aten.relu_.default, (view,))
    _refuse_overwriting(written, ["view"])
    graph.call_function(torch.ops.aten.neg.default, (x,))
    with pytest.raises(Unsupported, match="relu__default overwrites view, which neg_default reads afterwards"):
        _refuse_overwriting(written, ["view"])


def test_the_number_of_ranks_must_be_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.run.dtensor.run import prepare_folder
    from meshwright.run.dtensor.worker import WorkRequest

    prepare_folder(tmp_path, [plan(f"{NETS}:fc", 2, "data")], WorkRequest(plans=[]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(PlanMismatch, match="for 2 ranks"):
        run_rank(tmp_path)


@pytest.mark.real
def test_positions_of_one_long_sample_are_divided() -> None:
    """Context parallelism in the search's own words: rows of a causal attention, its keys gathered, all else position by position."""
    found = plan(f"{NETS}:one_long_sample", 2)
    (attention,) = [op for name, op in found.ops.items() if name.startswith("scaled_dot_product_attention")]
    assert attention.names == ("query rows",) and attention.inputs[0] == ("S2",) and attention.inputs[1] == ("B",)
    (r,) = run_layout([found], steps=1, warmup=1, dtype="float64", verify=True)
    assert r.bytes_equal and r.loss_apart < 1e-9 and r.gradients_apart < 1e-9
