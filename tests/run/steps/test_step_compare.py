"""`memory compare`: all strategies by budget, beside the bound and PyTorch's own."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from meshwright.capture.step import capture_step
from meshwright.cli.frame import main
from meshwright.decide.memory.fusionaware.fused import priced
from meshwright.errors import UnknownName
from meshwright.probe.steps.compare import compare_step
from meshwright.report.memory_curve import curve_svg, curve_text

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))), (torch.randn(512, 64), torch.randn(512, 64))
"""

CONVOLUTIONS = """
import torch
from torch import nn

def net():
    layers = [x for i, o in ((3, 8), (8, 8), (8, 8)) for x in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 256, 4)), (torch.randn(8, 3, 16, 16), torch.arange(8) % 4)
"""


def test_a_curve_is_monotone_above_its_bound_and_no_worse_than_anybody():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    step = capture_step(net, [torch.randn(512, 64), torch.randn(512, 64)], loss="mse", name="<net>")
    graph = priced(step.step_graph, {}, flops_per_s=1e11, bytes_per_s=1e10)
    curve = compare_step(step, graph, budgets=6, effort=1_000_000)
    ours = curve.points["fusionaware"]
    assert all(p is not None for p in ours) and curve.budgets[0] == curve.plain_bytes and ours[0].time_s == pytest.approx(curve.plain_s)
    for before, after in pairwise(ours):
        assert after.peak_bytes <= before.peak_bytes and after.time_s >= before.time_s
    for i, p in enumerate(ours):
        assert curve.floors_s[i] <= p.time_s * (1 + 1e-9) and p.peak_bytes <= curve.budgets[i]
        assert all(row[i] is None or row[i].time_s >= p.time_s * (1 - 1e-9) for row in curve.points.values())
    assert {name for name, _, _ in curve.peers} == {"mincut", "torch default", "torch min-cut", "torch budget"}
    assert all(mine is None or mine.time_s <= p.time_s * (1 + 1e-9) for _, p, mine in curve.peers)
    text = curve_text(curve)
    assert "fusionaware" in text and "torch budget 0.4" in text and text.count("\n") >= 14
    drawing = ElementTree.fromstring(curve_svg(curve))
    names = [e.text for e in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "rotor" in names and "bound" in names and names[0].startswith("<net>")
    with pytest.raises(UnknownName, match="there is no strategy 'moon'"):
        compare_step(step, graph, strategies=["moon"], budgets=3, effort=1_000_000)


def test_the_command_prints_a_table_and_draws_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "m.py").write_text(MODEL)
    words = ["memory", "compare", "--model", f"{tmp_path}/m.py:net", "--loss", "mse", "--budgets", "3", "--effort", "1", "--svg", f"{tmp_path}/c.svg"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.memory.compare" and len(document["budgets"]) == 3 and document["evidence"].startswith("measured here")
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
    assert main([*words, "--budgets", "1"]) == 2
    assert "must be at least 2" in capsys.readouterr().err


def test_plans_that_choose_implementations_have_a_curve_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "m.py").write_text(CONVOLUTIONS)
    words = ["memory", "compare", "--model", f"{tmp_path}/m.py:net", "--budgets", "4", "--effort", "1", "--strategies", "fusionaware"]
    assert main([*words, "--implementations", "exact", "--svg", f"{tmp_path}/c.svg", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plain, joint = document["points"]["fusionaware"], document["points"]["exact"]
    assert all(p["peak_bytes"] <= b for p, b in zip(joint, document["budgets"], strict=True))
    assert all(a["time_s"] <= b["time_s"] for a, b in pairwise(joint))
    assert all(ours["time_s"] <= p["time_s"] * (1 + 1e-9) for ours, p in zip(joint, plain, strict=True) if p is not None)
    assert "exact: other implementations of operators may take less time than the bound" in " ".join(document["notes"])
    drawing = ElementTree.parse(tmp_path / "c.svg").getroot()
    assert "exact" in [e.text for e in drawing.iter("{http://www.w3.org/2000/svg}text")]
    for point in drawing.iter("{http://www.w3.org/2000/svg}path"):
        assert "-" not in point.get("d", "").replace("e-", "")  # nothing outside of the drawing
    assert main([*words, "--implementations", "moon"]) == 2
    assert "there is no kind 'moon'" in capsys.readouterr().err
