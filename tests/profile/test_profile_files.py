"""The public formats read as they are published, merged, and refused when they are not what they should be."""

import copy
import gzip
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_cases import LAYERS, metis, network_between, network_inside, sailor_memory, sailor_times

from meshwright.errors import FormatError, MeshwrightError, UnknownName, UsageError
from meshwright.io.costs.profile_documents import read_layout, read_measured_runs, read_runtime, write_runtime
from meshwright.io.costs.profile_layers import ProfileFiles, parse_profile_file, read_profile_files
from meshwright.profile.layer_profile import Entry
from meshwright.profile.network import TrainingRuntime


def write(folder, name, document):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def parsed(document, name="x.json", **names):
    found = ProfileFiles()
    parse_profile_file(json.dumps(document).encode(), name, found, **names)
    return found


# ---- what is read ------------------------------------------------------------------------------------------------------
def test_sailor_with_companions(tmp_path):
    parts = {"times": sailor_times(), "memory": sailor_memory(), "inside": network_inside(), "between": network_between()}
    found = read_profile_files([write(tmp_path, f"{n}.json", d) for n, d in parts.items()])
    p = found.profile()
    assert (p.model, p.layers, p.devices, p.microbatches, p.tensors) == ("OPT-X", LAYERS, ("A100",), (1, 2, 4), (1, 2))
    assert p.time_s("A100", 4, 2, 1, "backward") == pytest.approx(0.0042) and p.time_s("A100", 1, 1, 0, "update") == 0.0005
    assert p.size(2, 3)[:3] == (5e6, 2e6, 1e6)
    net = found.network()
    assert net.inside_curve("A100", 4).peak_Bps == 1e11
    assert net.between_curve(("z", "A100", 4), ("z", "A100", 4)).rate_Bps(2e6) == pytest.approx(4.9e9)


@pytest.mark.parametrize("levels", [1, 2])
def test_sailor_files_of_one_gpu(tmp_path, levels):
    """They begin at the GPU or at the micro-batch; the folders give the names, or the caller does."""
    document = sailor_times()["OPT-X"]
    inner = document if levels == 1 else document["A100"]
    p = read_profile_files([write(tmp_path, "OPT-Y/GH-96/profile.json", inner)], model="Z", device="G").profile("Z")
    assert p.model == "Z" and p.devices == ({1: "A100", 2: "G"}[levels],)
    q = read_profile_files([write(tmp_path, "OPT-Y/GH-96/profile.json", inner)]).profile()
    assert (q.model, q.devices[0]) == ("OPT-Y", {1: "A100", 2: "GH-96"}[levels])


def test_metis(tmp_path):
    files = [write(tmp_path, f"DeviceType.A100_tp{t}_bs{m}.json", metis(scale=m / t)) for t, m in ((1, 1), (1, 2), (2, 2))]
    p = read_profile_files(files).profile()
    assert (p.model, p.layers, p.split_assumed) == ("GPT3", LAYERS, 1 / 3) and p.gaps() == (Entry("A100", 1, 2),)
    assert p.time_s("A100", 2, 1, 3, "forward") == pytest.approx(0.004) and p.time_s("A100", 2, 1, 3, "backward") == pytest.approx(0.008)
    assert p.time_s("A100", 2, 1, 3, "update") == pytest.approx(0.012 / LAYERS)
    assert p.memory_bytes[Entry("A100", 2, 2)][5] == 105 << 20 and not p.sizes


def test_metis_names_and_missing_parts(tmp_path):
    document = metis()
    del document["execution_memory"], document["model"]["parameters"], document["execution_time"]["optimizer_time_ms"]
    p = read_profile_files([write(tmp_path, "V100_tp1_bs1.json", document)], device="H").profile()
    assert p.devices == ("H",) and not p.memory_bytes and p.time_s("H", 1, 1, 0, "update") == 0
    with pytest.raises(UsageError, match="file's name says"):
        read_profile_files([write(tmp_path, "some.json", document)])


def test_gzip_is_read(tmp_path):
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(sailor_times()).encode()))
    assert read_profile_files([tmp_path / "t.json.gz"]).models == ("OPT-X",)


# ---- what is refused ---------------------------------------------------------------------------------------------------
def spoiled(document, path, value):
    out = copy.deepcopy(document)
    *inner, last = path
    at = out
    for key in inner:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return out


TIMES = ("OPT-X", "A100", "1", "1")


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ({}, "holds no measurements"),
        ({"a": 3}, "expected measurements, got 3"),
        ({"a": []}, "expected measurements"),
        ({"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": {"j": [1]}}}}}}}}}}, "nested too deeply"),
        ({"a": {"b": [1.0, 2.0, 3.0]}}, "2 levels of tables above the times"),
        (spoiled(sailor_times(), (*TIMES, "3"), None), r"OPT-X.A100.1.1: layer 3 is missing"),
        (spoiled(sailor_times(), (*TIMES, "3"), [1.0, 2.0]), r"1.1.3: must be a list of 3"),
        (spoiled(sailor_times(), (*TIMES, "3"), [1.0, 2.0, -1]), r"1.1.3: must be a number from 0"),
        (spoiled(sailor_times(), (*TIMES, "3"), [1.0, True, 1]), "must be a number"),
        (spoiled(sailor_times(), TIMES, {str(i): [0, 0, 1] for i in range(LAYERS)}), "no time in any layer"),
        (spoiled(sailor_times(), ("OPT-X", "A100", "two"), {"1": {"0": [1, 1, 1]}}), "key 'two' must be a whole number"),
        (spoiled(sailor_times(), ("OPT-X", "A100", "0"), {"1": {"0": [1, 1, 1]}}), "key '0' must be a whole number"),
        (spoiled(sailor_times(), ("OPT-X", "A100", "2"), 7), "must be a table with entries"),
        (spoiled(sailor_times(), ("OPT-X", "A\n"), sailor_times()["OPT-X"]["A100"]), "printable characters"),
        (spoiled(sailor_memory(), ("OPT-X", "1", "2", "act_mem_floats"), None), r"1.2: act_mem_floats is missing"),
        (spoiled(sailor_memory(), ("OPT-X", "1", "2", "params_floats"), "many"), "params_floats: must be a number"),
        ({"x": sailor_memory()}, "4 levels of tables above the sizes"),
        ({"x": network_inside()}, "3 levels of tables above the coefficients"),
        ({"A100": {"4": [[0.0, 0.0], 1e11]}}, "must be a list of 3"),
        ({"A100": {"4": [[0.0, 0.0, 1.0], 0]}}, "must be a number from 1"),
        ({"A100": {"4": [[0.0, 0.0, -1.0], 1e11]}}, "gives -1e"),
        ({"A100": {"4": [[0.0, -1.0, 5.0], 1e11]}}, "gives"),
        (spoiled(network_between(), ("z", "A100", "4", "z", "A100", "x"), [[0, 0, 1], 1e9]), "key 'x'"),
    ],
)  # fmt: skip
def test_refused(document, match):
    with pytest.raises(FormatError, match=match):
        parsed(document)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("execution_time",), 3, "execution_time: must be a table"),
        (("model",), {}, "model_name must be a text"),
        (("execution_time", "layer_compute_total_ms"), [1.0, "x"], "layer_compute_total_ms: must be a number"),
        (("execution_time", "layer_compute_total_ms"), None, "layer_compute_total_ms: must be a list"),
        (("execution_time", "layer_compute_total_ms"), [1.0] * 5, "must be a list of 5"),
        (("execution_time", "optimizer_time_ms"), -1, "optimizer_time_ms"),
        (("execution_memory", "layer_memory_total_mb"), [1], "layer_memory_total_mb: must be a list of 6"),
        (("model", "parameters", "parameters_per_layer_bytes"), [1, 2], "parameters_per_layer_bytes: must be a list of 6"),
    ],
)  # fmt: skip
def test_metis_refused(path, value, match):
    with pytest.raises(FormatError, match=match):
        parsed(spoiled(metis(), path, value), "DeviceType.A_tp1_bs1.json")


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": {"b": {"c": [1e999, 1, 1]}}}', "{" * 100000, "\xff"])
def test_not_json(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text.encode("latin1"))
    with pytest.raises(FormatError):
        read_profile_files([tmp_path / "a.json"], model="m", device="d")


def test_files_that_do_not_go_together(tmp_path):
    times = write(tmp_path, "t.json", sailor_times())
    with pytest.raises(FormatError, match="was given before"):
        read_profile_files([times, write(tmp_path, "u.json", sailor_times(microbatches=(2,)))])
    with pytest.raises(FormatError, match="have 5 layers, others 6"):
        read_profile_files([times, write(tmp_path, "m.json", sailor_memory(layers=5))]).profile()
    with pytest.raises(UnknownName, match="memory table does not know 'OPT-X'") as caught:
        read_profile_files([times, write(tmp_path, "o.json", sailor_memory(model="other"))]).profile()
    assert "other" in caught.value.hint
    with pytest.raises(UsageError, match="several models"):
        read_profile_files([times, write(tmp_path, "v.json", sailor_times(model="B"))]).profile()
    with pytest.raises(UnknownName, match="'C'"):
        read_profile_files([times]).profile("C")
    with pytest.raises(FormatError, match="no layer times"):
        read_profile_files([write(tmp_path, "n.json", network_inside())]).profile()
    with pytest.raises(UsageError, match="cannot read"):
        read_profile_files([tmp_path / "none.json"])


def test_nameless_files_need_names():
    with pytest.raises(UsageError, match="which model or GPU"):
        parsed(sailor_times()["OPT-X"]["A100"])


def test_too_many_layers(monkeypatch):
    from meshwright.io.costs import profile_layers

    monkeypatch.setattr(profile_layers, "MAX_LAYERS", 3)
    with pytest.raises(FormatError, match="at most 3"):
        parsed(sailor_times())
    monkeypatch.setattr(profile_layers, "MAX_LAYERS", 100)
    monkeypatch.setattr(profile_layers, "MAX_ROWS", 10)
    with pytest.raises(FormatError, match="more than 10 rows"):
        parsed(sailor_times())


GOOD = [json.dumps(d).encode() for d in (sailor_times(), sailor_memory(), network_inside(), network_between(), metis())]


@given(st.sampled_from(GOOD), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_files_give_values_or_typed_errors(good, data):
    at = data.draw(st.integers(0, len(good) - 1))
    cut = data.draw(st.sampled_from([0, 1, 5]))
    damaged = good[:at] + data.draw(st.sampled_from([b"", b"0", b"}", b'"', b"[", b"-", b"1e400", b"null", b"{}"])) + good[at + cut :]
    found = ProfileFiles()
    try:
        parse_profile_file(damaged, "DeviceType.A_tp1_bs1.json", found, model="m", device="d")
        profile = found.profile("m" if "m" in found.times else None)
    except MeshwrightError as error:
        assert str(error)
        return
    for entry, row in profile.times.items():
        assert len(row) == profile.layers and entry.microbatch > 0 and entry.tensor > 0
        assert all(0 <= t < math.inf for layer in row for t in layer)
    assert all(v >= 0 for row in profile.memory_bytes.values() for v in row)


# ---- our own documents -------------------------------------------------------------------------------------------------
def test_runtime_round_trip(tmp_path):
    runtime = TrainingRuntime(p2p="blocking", gpus_per_server={"A100": 4}, per_action_s=1e-4, constant_memory_bytes={"A100": 1 << 30})
    write_runtime(tmp_path / "r.json", runtime)
    assert read_runtime(tmp_path / "r.json") == runtime


LAYOUT = {"stages": [{"layers": 6, "replicas": [{"device": "A100", "tensor": 2}]}], "microbatch": 1, "microbatches": [8]}


def test_layout_and_runs(tmp_path):
    path = write(tmp_path, "l.json", {"schema": "meshwright.profiled-layout", "version": 1, "layout": LAYOUT})
    assert read_layout(path).gpus == 2
    runs = {"schema": "meshwright.measured-runs", "version": 1, "runs": [{"layout": LAYOUT, "time_s": 1.5, "memory_peak_bytes": [7]}]}
    assert read_measured_runs(write(tmp_path, "m.json", runs))[0].memory_peak_bytes == (7,)
    wrong = (({"time_s": 0}, "time_s: must be > 0"), ({"memory_peak_bytes": [1, 2]}, "one number per stage"), ({"tim_s": 1}, "unknown field"))
    for change, match in wrong:
        bad = {**runs, "runs": [{**runs["runs"][0], **change}]}
        with pytest.raises(FormatError, match=match):
            read_measured_runs(write(tmp_path, "b.json", bad))
    bad_layout = {"schema": "meshwright.profiled-layout", "version": 1, "layout": {**LAYOUT, "microbatches": [0]}}
    with pytest.raises(FormatError, match="micro-batches need at least one sample"):
        read_layout(write(tmp_path, "c.json", bad_layout))
    with pytest.raises(FormatError, match=r"expected 'meshwright\.training-runtime'"):
        read_runtime(path)
