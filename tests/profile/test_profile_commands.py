"""The commands on made-up files: text, JSON, refusals."""

import json

import pytest
from profile_cases import metis, network_between, network_inside, sailor_memory, sailor_times

from meshwright.cli import main
from meshwright.io.costs.profile_documents import read_runtime


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = {"times": sailor_times(), "memory": sailor_memory(), "inside": network_inside(), "between": network_between()}
    for name, document in parts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    return ["times.json", "memory.json", "inside.json", "between.json"]


def shown(capsys, *words):
    assert main(list(words)) == 0, capsys.readouterr()
    return capsys.readouterr().out


LAYOUT = ["--gpu", "A100", "--zone", "z", "--stages", "3", "--dp", "2", "--tp", "2", "--global-batch", "16", "--gpus-per-server", "4"]


def test_show(files, capsys):
    text = shown(capsys, "profile", "show", *files)
    assert "OPT-X: 6 layers, 6 entries, 0 of the grid missing" in text and "1 curves inside servers, 1 between" in text
    document = json.loads(shown(capsys, "profile", "show", *files, "--json"))
    assert document["schema"] == "meshwright.profile" and len(document["entries"]) == 6 and document["findings"] == []
    text = shown(capsys, "profile", "show", *files, "--peak", "A100=1e12", "--tokens", "1000")
    assert "below-bound" in text


def test_show_gaps_and_copies(tmp_path, capsys):
    for t, m in ((1, 1), (1, 2), (2, 2)):
        (tmp_path / f"DeviceType.A100_tp{t}_bs{m}.json").write_text(json.dumps(metis(scale=1.0)))
    text = shown(capsys, "profile", "show", *map(str, sorted(tmp_path.iterdir())))
    assert "1 of the grid missing" in text and "duplicate: A100, micro-batch 1, tensor degree 1; " in text and "forward is taken as 33%" in text


def test_predict(files, capsys):
    text = shown(capsys, "profile", "predict", *files, *LAYOUT)
    assert "12 GPUs, 3 stages x 2 pipelines, global batch 16" in text and "peak memory per stage" in text and "assumed: " in text
    document = json.loads(shown(capsys, "profile", "predict", *files, *LAYOUT, "--json"))
    assert document["bound_s"] <= document["time_s"] <= document["interval_s"][1] and len(document["memory_peak_bytes"]) == 3
    slower = json.loads(shown(capsys, "profile", "predict", *files, *LAYOUT, "--p2p", "blocking", "--nics-per-server", "1", "--json"))
    assert slower["time_s"] > document["time_s"]
    less = json.loads(shown(capsys, "profile", "predict", *files, *LAYOUT, "--set", "gradient_bytes_per_value=2", "--set", "p2p=blocking", "--json"))
    assert less["time_s"] < slower["time_s"] and any("gradients in 2 B" in x for x in less["assumptions"])
    uneven = [*LAYOUT[:4], "--stages", "3,2,1", *LAYOUT[6:]]
    assert json.loads(shown(capsys, "profile", "predict", *files, *uneven, "--json"))["time_s"] > document["time_s"]


def test_predict_interpolates_only_if_asked(files, capsys):
    words = ["profile", "predict", *files, *LAYOUT[:10], "--global-batch", "12", "--gpus-per-server", "4", "--microbatch", "3"]
    assert main(words) == 3
    assert "lacks A100, micro-batch 3, tensor degree 2" in capsys.readouterr().err
    assert "interpolated, not measured: A100, micro-batch 3, tensor degree 2" in shown(capsys, *words, "--interpolate")


def test_fit_and_use(files, capsys, tmp_path):
    def layout(stages, count):
        replicas = [{"device": "A100", "tensor": 2, "zone": "z"}]
        return {"stages": [{"layers": n, "replicas": replicas} for n in stages], "microbatch": 1, "microbatches": [count]}

    runs = [{"layout": layout(s, m), "time_s": t} for s, m, t in (([6], 4, 0.06), ([3, 3], 8, 0.07), ([2, 2, 2], 8, 0.055))]
    (tmp_path / "runs.json").write_text(json.dumps({"schema": "meshwright.measured-runs", "version": 1, "runs": runs}))
    text = shown(capsys, "profile", "fit", *files, "--measured", "runs.json", "--gpus-per-server", "4", "-o", "runtime.json")
    assert "fitted to 3 of 3 runs" in text and read_runtime("runtime.json").per_iteration_s > 0.01
    document = json.loads(shown(capsys, "profile", "fit", *files, "--measured", "runs.json", "--gpus-per-server", "4", "--json"))
    assert document["schema"] == "meshwright.profile-fit" and document["used"] == [0, 1, 2]
    words = ["profile", "predict", *files, "--layout", "layout.json", "--runtime", "runtime.json", "--json"]
    (tmp_path / "layout.json").write_text(json.dumps({"schema": "meshwright.profiled-layout", "version": 1, "layout": layout([3, 3], 8)}))
    assert json.loads(shown(capsys, *words))["time_s"] == pytest.approx(0.07, rel=0.2)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["show", "none.json"], 2, "cannot read"),
        (["show", "times.json", "--peak", "A100"], 2, "is not DEVICE=FLOPS"),
        (["show", "times.json", "--peak", "A100=-1"], 2, "is not DEVICE=FLOPS"),
        (["predict", "times.json"], 2, "give --layout"),
        (["predict", "times.json", *LAYOUT, "--set", "p2p=never"], 2, "never"),
        (["predict", "times.json", *LAYOUT, "--set", "speed=1"], 2, "there is no field 'speed'"),
        (["predict", "times.json", *LAYOUT, "--set", "per_action_s=-1"], 2, "must be finite and >= 0"),
        (["predict", "times.json", *LAYOUT[:-4], "--global-batch", "15"], 2, "not a whole number of micro-batches"),
        (["predict", "times.json", "--gpu", "A100", "--stages", "x", "--global-batch", "1"], 2, "not a list of whole numbers"),
        (["predict", "times.json", "--gpu", "A100", "--stages", "7", "--global-batch", "1"], 2, "7 stages for 6 layers"),
        (["predict", "times.json", "--gpu", "V100", "--stages", "1", "--global-batch", "1"], 2, "no device 'V100'"),
    ],
)  # fmt: skip
def test_refusals(files, capsys, words, code, part):
    assert main(["profile", *words]) == code
    out, err = capsys.readouterr()
    assert not out and part in err and "Traceback" not in err and "bug in meshwright" not in err
