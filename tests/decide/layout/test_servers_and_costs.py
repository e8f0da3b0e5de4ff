"""Servers of a fabric, and layer tables of a real captured model against the graph's own sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from captured import captured
from meshwright.cli import main
from meshwright.cost import assumed_cost
from meshwright.decide.layout.layer_costs import FULL, MIXED, layer_table
from meshwright.errors import Infeasible, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.fabric.servers import network_of, ring_Bps, server_kinds
from meshwright.graph.graph import OpGraph
from meshwright.graph.scale import at_batch
from meshwright.io.fabric.name import load_fabric
from meshwright.profile.layer_profile import Entry
from meshwright.testing.layer_tables import fabric

ROOT = Path(__file__).parents[3]
MODEL = f"{ROOT / 'examples' / 'gpt.py'}:small"


def test_kinds_nics_and_rates() -> None:
    kinds = server_kinds(fabric([("fast", 2, 4), ("slow", 1, 2)]))
    assert [(k.name, k.gpus, k.nics, k.nic_Bps, len(k.servers), k.zone) for k in kinds] == [
        ("fast", 4, 4, 10**8, 2, ""), ("slow", 2, 2, 10**8, 1, ""),
    ]  # fmt: skip
    assert kinds[0].inside_Bps == {2: 2e9, 4: 2e9} and kinds[0].outside_latency_s == pytest.approx(4e-6)
    network = network_of(kinds)
    assert network.inside_curve("fast", 4).peak_Bps == 2e9
    assert network.between_curve(("", "fast", 4), ("", "slow", 2)).rate_Bps(1e6) == pytest.approx(1e8)


def test_a_slow_trunk_makes_zones() -> None:
    assert [k.zone for k in server_kinds(fabric([("fast", 2, 2), ("slow", 2, 2)], trunk_Bps=10**7))] == ["zone0", "zone1"]
    assert {k.zone for k in server_kinds(load_fabric("dgx1-v100:2"))} == {""}
    apart = network_of(server_kinds(fabric([("fast", 2, 2), ("slow", 2, 2)], trunk_Bps=10**7)))
    assert apart.between_curve(("zone0", "fast", 2), ("zone1", "slow", 2)).peak_Bps == 1e7
    assert apart.between_curve(("zone0", "fast", 2), ("zone0", "fast", 2)).peak_Bps == 1e8


def test_equal_devices_in_servers_of_other_sizes_are_kinds_of_their_own() -> None:
    assert [k.name for k in server_kinds(fabric([("fast", 1, 4), ("fast", 1, 2)]))] == ["fast", "fast/2"]
    assert [k.name for k in server_kinds(load_fabric("h100-a100:1"))] == ["h100", "a100"]


def test_rings_share_links() -> None:
    devices = tuple(Device(name=f"d{i}", group="box", kind="cpu") for i in range(4))
    links = tuple(Link(src=f"d{i}", dst=f"d{j}", rate_Bps=100) for i, j in ((0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)))
    line = Fabric(name="line", devices=devices, links=links)
    assert ring_Bps(line, (0, 1), 2) == 100
    assert ring_Bps(line, (0, 1, 2, 3), 4) == 100  # the way back is 3-2-1-0, against the others
    crossed = ring_Bps(line, (0, 2, 1, 3), 4)
    assert crossed == 50


def test_server_refusals() -> None:
    net = fabric([("fast", 1, 2)])
    unlike = replace(net, devices=(net.devices[0], replace(net.devices[1], memory_bytes=5)))
    with pytest.raises(Infeasible, match="unlike devices"):
        server_kinds(unlike)
    with pytest.raises(UsageError, match="no devices"):
        server_kinds(Fabric(name="none", devices=()))


def test_sums_are_the_graphs(graph: OpGraph) -> None:
    net = load_fabric("dgx-a100:2")
    kinds = server_kinds(net)
    table = layer_table(lambda b: at_batch(graph, b), kinds, assumed_cost(net), microbatches=(2, 4), tensors=(1, 2, 4), precision=FULL, least=8)
    at = at_batch(graph, 4)
    rows = table.rows[Entry("a100", 4, 1)]
    targets = 4 * 128
    assert sum(r.flops[0] for r in rows) == sum(n.forward.flops for n in at.nodes) + targets * (256 + 8)  # the loss in three parts
    assert sum(r.flops[1] for r in rows) == sum(n.backward.flops for n in at.nodes) + targets * 8
    assert sum(r.parameters for r in rows) == graph.parameter_count
    logits = 256 * 128 * 4 * 4  # the loss keeps an exponential per logit instead of log-probabilities of the same size
    kept = sum(r.kept_bytes[0] for r in rows)
    assert kept == pytest.approx(at.saved_bytes, abs=logits)
    halved = layer_table(lambda b: at_batch(graph, b), kinds, assumed_cost(net), microbatches=(4,), tensors=(1,), precision=MIXED, least=8)
    assert sum(r.kept_bytes[0] for r in halved.rows[Entry("a100", 4, 1)]) < 0.62 * kept


def test_degrees_recomputation_and_sequence_parallelism(graph: OpGraph) -> None:
    net = load_fabric("dgx-a100:1")
    kinds, cost = server_kinds(net), assumed_cost(net)
    whole, split = (
        layer_table(lambda b: at_batch(graph, b), kinds, cost, microbatches=(4,), tensors=(1, 2, 4), precision=FULL, sequence=sequence)
        for sequence in (False, True)
    )
    for t in (1, 2, 4):
        for r in split.rows[Entry("a100", 4, t)]:
            none, selective, full = r.kept_bytes
            assert none >= selective >= 0 and none >= full >= 0 and 0 <= r.again_s[1] <= r.again_s[2] == r.forward_s
            assert (r.tensor_s[0] + r.tensor_s[1] > 0) == (t > 1) or r.flops[0] == 0
    for t in (2, 4):
        a, b = (sum(r.kept_bytes[0] for r in x.rows[Entry("a100", 4, t)]) for x in (whole, split))
        assert b < a < sum(r.kept_bytes[0] for r in whole.rows[Entry("a100", 4, 1)])
    flops = [sum(sum(r.flops) for r in split.rows[Entry("a100", 4, t)]) * t for t in (1, 2, 4)]
    assert flops == pytest.approx([flops[0]] * 3, rel=1e-5)  # the loss of the summed numbers is not divided


def test_attention_made_of_single_operators_is_computed_again_selectively() -> None:
    torch = pytest.importorskip("torch")

    code = (
        "import torch\nfrom torch import nn\n"
        "class A(nn.Module):\n"
        "    def __init__(s):\n        super().__init__(); s.q=nn.Linear(32,96); s.o=nn.Linear(32,32); s.h=nn.Linear(32,8)\n"
        "    def forward(s,x):\n        q,k,v=s.q(x).chunk(3,-1); y=torch.softmax(q@k.transpose(1,2),-1)@v; return s.h(x+s.o(y))\n"
        "def f():\n    return A(),(torch.randn(2,256,32),torch.zeros(2,256,8))\n"
    )
    assert torch is not None
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "eager.py"
        path.write_text(code)
        g = captured(f"{path}:f", loss="mse")
    net = load_fabric("dgx-a100:1")
    row = layer_table(lambda b: at_batch(g, b), server_kinds(net), assumed_cost(net), microbatches=(2,), tensors=(1,), precision=FULL, least=1)
    rows = row.rows[Entry("a100", 2, 1)]
    scores = 2 * 256 * 256 * 4
    dropped = sum(r.kept_bytes[0] - r.kept_bytes[1] for r in rows)
    assert dropped >= scores and sum(r.again_s[1] for r in rows) > 0


def test_layer_table_refusals(graph: OpGraph) -> None:
    net = load_fabric("dgx-a100:1")
    with pytest.raises(UsageError, match="must be >= 1"):
        layer_table(lambda b: graph, server_kinds(net), assumed_cost(net), microbatches=(), tensors=(1,))


# ---- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def graph_file(graph: OpGraph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from meshwright.io.model.graph import write_graph

    path = tmp_path_factory.mktemp("graph") / "small.json"
    write_graph(path, graph)
    return path


def test_the_command_prints_the_layout_its_bounds_and_its_runners_up(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "search", "--graph", str(graph_file), "--fabric", "h100-a100:1", "--global-batch", "32", "--microbatches", "2,4"]
    assert main([*words, "--price", "h100=4", "--price", "a100=2", "--show", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    best = document["best"]
    assert document["schema"] == "meshwright.layout-search" and best["prediction"]["time_s"] == best["time_s"] and best["cost"] > 0
    assert sum(s["layers"] for s in best["layout"]["stages"]) == document["layers"] == sum(r["layers"] for r in best["choices"])
    assert best["time_s"] >= document["bounds"]["universal_s"] and best["time_s"] >= document["bounds"]["family_s"] * (1 - 1e-6)
    assert len(document["runners_up"]) == 3 and all(r["why"] for r in document["runners_up"])
    assert main([*words, "--microbatches", "4", "--show", "2", "--levels", "0,1"]) == 0
    text = capsys.readouterr().out
    assert "bound of any layout" in text and "runners-up" in text and "sharding 3" not in text


def test_the_command_refuses(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["layout", "search", "--graph", str(graph_file), "--fabric", "dgx-a100:1", "--global-batch", "8"]
    for words, code, message in (
        (["--memory", "1MiB"], 3, "no layout fits"), (["--objective", "cost"], 2, "no price of a100"), (["--price", "a100"], 2, "not KIND=NUMBER"),
        (["--tensors", "two"], 2, "list of whole numbers"), (["--levels", "7"], 2, "sharding levels"), (["--methods", "magic"], 2, "no method"),
        (["--microbatches", "3"], 2, "no micro-batch divides"), (["--model", "x:y"], 2, "either --model or --graph"),
        (["--global-batch", "0"], 2, "must be >= 1"),
    ):  # fmt: skip
        assert main([*base, *words]) == code
        error = capsys.readouterr().err
        assert message in error, (words, error)
