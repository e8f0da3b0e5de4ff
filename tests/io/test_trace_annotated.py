"""The annotated trace: every original event as it was, nested slices on tracks of their own, whatever the file looked like; and the command."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from meshwright.annotate import annotate
from meshwright.cli import main
from meshwright.errors import UsageError
from meshwright.io.trace.annotated import write_annotated
from meshwright.io.trace.read import read_trace

EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 7, "tid": 1, "args": {"name": "main <b>thread</b>"}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 7, "tid": 1, "ts": 4490932537681.263, "dur": 90.5},
    {"ph": "X", "cat": "user_annotation", "name": "module:<script>", "pid": 7, "tid": 1, "ts": 4490932537682.001, "dur": 50.25},
    {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "pid": 7, "tid": 1, "ts": 4490932537682.5, "dur": 20.125, "args": {"x": [1, {"y": None}]}},
    {"ph": "i", "s": "g", "name": "mark", "pid": "", "tid": "", "ts": 4490932537690},
]  # fmt: skip
DOCUMENT = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": EVENTS, "traceName": "x"}


def annotated(tmp_path, data, *, name="t.json", out="out.json"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    trace = read_trace(path)
    write_annotated(path, annotate(trace), tmp_path / out)
    packed = (tmp_path / out).read_bytes()
    return json.loads(gzip.decompress(packed) if out.endswith(".gz") else packed), trace


@pytest.mark.parametrize("out", ["out.json", "out.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_everything_that_was_there_stays(tmp_path, out, indent):
    document, _ = annotated(tmp_path, json.dumps(DOCUMENT, indent=indent), out=out)
    events = document.pop("traceEvents")
    assert events[: len(EVENTS)] == EVENTS
    assert document == {k: v for k, v in DOCUMENT.items() if k != "traceEvents"}
    added = [e for e in events[len(EVENTS) :] if e["ph"] == "X"]
    assert [e["name"] for e in added] == ["step 1", "forward", "model", "<script>"]
    assert added[-1]["args"] == {"kind": "module", "evidence": "exact", "module": "<script>"}
    assert all(e["tid"] != 1 and e["pid"] == 7 for e in added)
    assert (added[-1]["ts"], added[-1]["dur"]) == (4490932537682.5, 20.125)


def test_slices_of_a_track_nest(tmp_path):
    document, _ = annotated(tmp_path, json.dumps(DOCUMENT))
    again = tmp_path / "again.json"
    again.write_text(json.dumps(document))
    trace = read_trace(again)
    assert not trace.warnings and len(trace) == 7
    track = next(t for t in range(len(trace.tracks)) if "modules of" in trace.tracks[t].thread)
    assert trace.parent[trace.rows(track)].tolist()[1:] == [trace.rows(track).start + i for i in range(3)]
    assert annotate(trace).root.host_ns == annotate(read_trace(tmp_path / "t.json")).root.host_ns, "what was added is not counted"


PLAIN = json.dumps(DOCUMENT)
DAMAGE = {
    "bare list": json.dumps(EVENTS), "cut": PLAIN[:-60], "control": PLAIN.replace("aten::conv2d", "aten::co\x02nv2d"),
    "no comma": json.dumps(DOCUMENT, indent=1).replace("},\n  {", "}\n  {", 1), "bad head": PLAIN.replace('"schemaVersion": 1', '"x": nan'),
    "bad tail": PLAIN.replace('"traceName": "x"', '"traceName": x'), "empty": '{"traceEvents": []}',
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_comes_out_whole(tmp_path, what):
    document, trace = annotated(tmp_path, DAMAGE[what])
    events = document if isinstance(document, list) else document["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e.get("cat") != "meshwright annotation"]
    assert len(slices) == len(trace) == (0 if what == "empty" else 3)


def test_refused_endings(tmp_path):
    with pytest.raises(UsageError, match=r"\.json"):
        annotated(tmp_path, json.dumps(DOCUMENT), out="out.pftrace")


def test_the_command(tmp_path, capsys):
    path, out = tmp_path / "t.json", tmp_path / "o.json"
    path.write_text(json.dumps(DOCUMENT))
    assert main(["trace", "annotate", str(path), "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert "rank 0 of 2: 1 step" in text and "<script>" in text and "written" in text and out.exists()
    assert main(["trace", "annotate", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"]) == ("meshwright.trace-annotation", 1)
    assert document["tree"]["host_ns"] == sum(t["window_ns"] for t in document["tracks"]) == 90_500


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--depth", "0"], 2, "--depth"), (["--save-modules", "x.json"], 2, "--model"), (["--modules", "missing.json"], 2, "cannot read"),
        (["-o", "SAME"], 2, "overwrite"), (["--model", "a", "--modules", "b"], 2, "not allowed"),
    ],
)  # fmt: skip
def test_wrong_use(tmp_path, capsys, more, code, said):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(DOCUMENT))
    assert main(["trace", "annotate", str(path), *[str(path) if m == "SAME" else m for m in more]]) == code
    assert said in capsys.readouterr().err


def test_a_foreign_file(tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_text("hello")
    assert main(["trace", "annotate", str(path)]) == 1
    assert "not a Chrome trace" in capsys.readouterr().err


def test_the_command_with_a_model(tmp_path, capsys):
    model = tmp_path / "model.py"
    model.write_text("import torch\nfrom torch import nn\n\ndef build():\n    return nn.Conv2d(3, 4, 3), (torch.zeros(1, 3, 8, 8), torch.zeros(1))\n")
    path = tmp_path / "t.json"
    path.write_text(json.dumps([e for e in EVENTS if not e["name"].startswith("module:")]))
    assert main(["trace", "annotate", str(path), "--model", f"{model}:build", "--save-modules", str(tmp_path / "m.json")]) == 0
    said = capsys.readouterr().out
    assert main(["trace", "annotate", str(path), "--modules", str(tmp_path / "m.json")]) == 0
    assert said == capsys.readouterr().out and "Conv2d" in said and "c captured" in said
    assert Path(tmp_path / "m.json").exists() and "torch" in sys.modules
