"""`meshwright train capture` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from capture_nets import EXAMPLES, ODD, graph_of

from meshwright.cli.frame import main
from meshwright.io.model.graph import read_graph


def test_a_graph_is_written_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.json.gz"
    assert main(["train", "capture", "--model", f"{EXAMPLES}/gpt.py:tiny", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    graph = graph_of("gpt")
    assert read_graph(out) == graph
    assert (document["schema"], document["version"], document["path"]) == ("meshwright.capture", 1, str(out))
    assert document["parameters"] == graph.parameter_count and document["saved_bytes"] == graph.saved_bytes
    assert document["forward_flops"] == sum(n.forward.flops for n in graph.nodes) > 0
    assert document["share_with_cause"] >= 0.95 and document["scalable"] is True
    flops = [o["flops"] for o in document["operators"]]
    assert flops == sorted(flops, reverse=True) and document["operators"][0]["target"].startswith("aten.")


def test_text_batch_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.json"
    command = ["train", "capture", "-m", f"{EXAMPLES}/dlrm.py:tiny", "--loss", "mse", "--batch", "3", "-o", str(out), "--top", "2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "26,001" in text and "loss mse, batch 3" in text and f"written to {out}" in text and "note: module paths" in text
    assert read_graph(out).batch_size == 3 and text.count("aten.") == 2


def test_an_opaque_module_is_noted_and_refused_when_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.json"
    assert main(["train", "capture", "-m", f"{ODD}:value_dependent", "-o", str(out)]) == 0
    assert "by opaque" in capsys.readouterr().out and read_graph(out).method == "opaque"
    out.unlink()
    assert main(["train", "capture", "-m", f"{ODD}:value_dependent", "-o", str(out), "--strict"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "operator aten._local_scalar_dense.default" in error and "hint: " in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["-m", f"{EXAMPLES}/gpt.py:smal"], 2, "did you mean small"),
        (["-m", f"{EXAMPLES}/gpt.py:tiny", "--loss", "l2"], 2, "no loss 'l2'"),
        (["-m", f"{EXAMPLES}/gpt.py:tiny", "--batch", "0"], 2, "--batch: must be >= 1"),
        (["-m", f"{EXAMPLES}/gpt.py:tiny", "--out", "/no/such/folder/g.json"], 2, "no directory"),
        (["-m", f"{ODD}:raises"], 1, "no weights here"),
        ([], 2, "--model"),
    ],
)
def test_errors_have_one_line_a_hint_and_a_code(options: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = [] if "--out" in options else ["--out", str(tmp_path / "graph.json")]
    assert main(["train", "capture", *options, *out]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") <= 2
    assert list(tmp_path.iterdir()) == []


def test_what_a_model_prints_does_not_spoil_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chatty.py").write_text(
        "import torch\nfrom torch import nn\nprint('importing')\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n        print('running')\n        return super().forward(x)\n"
        "def f():\n    print('building')\n    return Net(4, 2), (torch.randn(3, 4), torch.randn(3, 2))\n"
    )
    assert main(["train", "capture", "-m", f"{tmp_path}/chatty.py:f", "--loss", "mse", "-o", str(tmp_path / "g.json"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["parameters"] == 10 and "building" in captured.err
