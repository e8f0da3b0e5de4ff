"""TACCL's JSON files: the published forms, what is refused and where, and a fuzzer."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, UnknownName, UsageError
from meshwright.io.fabric.name import load_fabric
from meshwright.io.msccl.taccl_sketch import profile_fabric, read_profile, read_sketch, sketch_from_json
from meshwright.sketch import PUBLISHED_SKETCHES, Sketch, sketch_of


def dgx2() -> dict[str, Any]:
    """The structure of the public two-box DGX-2 sketch."""
    senders = range(1, 16, 2)
    return {
        "nnodes": 2,
        "intranode_sketch": {"strategy": "switch", "switches": [list(range(16))], "switch_hyperedge_strategy": ["uc-min"]},
        "internode_sketch": {
            "strategy": "relay", "internode_conn": {str(s): [s - 1] for s in senders},
            "gpus_to_sender_rev_map": {str(s): [s - 1, s] for s in senders}, "enforce_ordering": True,
        },
        "symmetry_offsets": [[2, 16], [16, 32]],
        "hyperparameters": {"input_chunkup": 2},
    }  # fmt: skip


def text(document: Any) -> bytes:
    return json.dumps(document).encode()


def test_the_public_files_are_the_sketches_built_in(tmp_path: Path) -> None:
    (tmp_path / "dgx2.json").write_bytes(text(dgx2()))
    assert read_sketch(tmp_path / "dgx2.json") == PUBLISHED_SKETCHES["dgx2-sk-1:2"]
    ndv2 = {
        "nnodes": 2, "intranode_sketch": {"strategy": "none"}, "internode_sketch": {"strategy": "relay", "internode_conn": {"0": [1]}},
        "symmetry_offsets": [[8, 16]], "hyperparameters": {"input_chunkup": 1},
    }  # fmt: skip
    assert sketch_from_json(text(ndv2)) == PUBLISHED_SKETCHES["ndv2-sk-1:2"]
    for connections, name in (("fully-connected", "ndv2-sk-2:2"), ("direct-map", "ndv2-sk-3:2")):
        ndv2["internode_sketch"]["internode_conn"] = connections
        assert sketch_from_json(text(ndv2)) == PUBLISHED_SKETCHES[name]
    one = {"nnodes": 1, "intranode_sketch": {"strategy": "none"}, "symmetry_offsets": [], "hyperparameters": {"input_chunkup": 6}}
    assert sketch_from_json(text(one)) == PUBLISHED_SKETCHES["ndv2-sk-6:1"]
    switched = {key: dgx2()[key] for key in ("intranode_sketch", "hyperparameters")} | {"nnodes": 1, "symmetry_offsets": [[2, 16]]}
    assert sketch_from_json(text(switched)) == PUBLISHED_SKETCHES["dgx2-sk-2:1"]


def test_a_sketch_is_the_same_after_json_and_by_name() -> None:
    for name, sketch in PUBLISHED_SKETCHES.items():
        assert sketch_of(json.loads(json.dumps(asdict(sketch)))) == sketch == sketch_of(name)
    with pytest.raises(UnknownName, match="no published sketch"):
        sketch_of("ndv3")
    with pytest.raises(UnknownName, match="no field 'nodes'"):
        sketch_of({"nodes": 2})
    with pytest.raises(UsageError, match="is no sketch"):
        sketch_of({"switches": 3, "intranode": "switch"})


def changed(path: str, value: Any) -> bytes:
    document = dgx2()
    *parents, last = path.split(".")
    at = document
    for key in parents:
        at = at[key]
    at[last] = value
    return text(document)


BAD = [
    ("nodes", 2, "nodes", "unknown field"),
    ("nnodes", 0, "nnodes", "> 0"),
    ("nnodes", "2", "nnodes", "whole number"),
    ("nnodes", 10**9, "nnodes", "<="),
    ("intranode_sketch.strategy", "magic", "intranode", "no such strategy"),
    ("intranode_sketch.strategy", "none", "switches", "belong together"),
    ("intranode_sketch.switches", [[0, 0]], r"switches\[0\]", "twice"),
    ("intranode_sketch.switches", [[-1]], r"switches\[0\]\[0\]", ">= 0"),
    ("intranode_sketch.switches", [7], r"switches\[0\]", "list of GPU numbers"),
    ("intranode_sketch.switch_hyperedge_strategy", ["uc-mid"], r"hyperedges\[0\]", "no such strategy"),
    ("intranode_sketch.switch_hyperedge_strategy", ["uc-min", "uc-min"], "hyperedges", "2 strategies for 1"),
    ("intranode_sketch.switch_hyperedge_strategy", [3], "switch_hyperedge_strategy", "text"),
    ("internode_sketch.strategy", "direct", "internode_sketch.strategy", "'relay'"),
    ("internode_sketch.internode_conn", "ring", "internode_conn", "sender"),
    ("internode_sketch.internode_conn", {"one": [0]}, "internode_conn", "GPU numbers"),
    ("internode_sketch.internode_conn", {"01": [0]}, "internode_conn", "GPU numbers"),
    ("internode_sketch.internode_conn", {"1": []}, "connections.1", "names no GPU"),
    ("internode_sketch.gpus_to_sender_rev_map", {"2": [2]}, "senders.2", "no receiver"),
    ("internode_sketch.gpus_to_sender_rev_map", {"1": [0], "3": [0]}, "senders.3", "belongs to senders 1 and 3"),
    ("internode_sketch.enforce_ordering", "yes", "enforce_ordering", "true or false"),
    ("symmetry_offsets", [[16, 16]], r"symmetry\[0\]", "0 < offset < group"),
    ("symmetry_offsets", [[1]], r"symmetry_offsets\[0\]", "offset, group"),
    ("symmetry_offsets", [[1, 2]] * 65, "symmetry", "at most"),
    ("hyperparameters", {"input_chunkup": 65}, "hyperparameters.input_chunkup", "<= 64"),
    ("hyperparameters", [], "hyperparameters", "table"),
    ("multinode_sketch", {"strategy": "relay"}, "multinode_sketch.strategy", "round-robin"),
]


@pytest.mark.parametrize(("path", "value", "where", "message"), BAD, ids=[f"{p}={str(v)[:20]}" for p, v, _, _ in BAD])
def test_what_is_wrong_is_named(path: str, value: Any, where: str, message: str) -> None:
    with pytest.raises(FormatError) as found:
        sketch_from_json(changed(path, value), "sketch.json")
    assert re.search(where, found.value.where) and message in found.value.message, (found.value.where, found.value.message)


def test_what_is_missing_is_named() -> None:
    document = dgx2()
    del document["internode_sketch"]
    with pytest.raises(FormatError, match="missing, but nnodes is 2"):
        sketch_from_json(text(document))
    document = dgx2()
    del document["internode_sketch"]["internode_conn"]
    with pytest.raises(FormatError, match="is missing"):
        sketch_from_json(text(document))
    assert sketch_from_json(b"{}") == Sketch()
    accepted = dgx2() | {"multinode_sketch": {"strategy": ["round-robin"], "nnodes": [1], "group_size": [2]}}
    assert sketch_from_json(text(accepted)) == PUBLISHED_SKETCHES["dgx2-sk-1:2"]


@pytest.mark.parametrize("data", [b"", b"[", b"[]", b"\xff", b'{"nnodes": 1, "nnodes": 2}', b'{"nnodes": NaN}', b"[" * 100_000], ids=repr)
def test_not_even_a_document(data: bytes) -> None:
    with pytest.raises(FormatError):
        sketch_from_json(data[:200_000])


def test_large_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_bytes(b" " * ((8 << 20) + 1))
    with pytest.raises(FormatError, match="larger than"):
        read_sketch(tmp_path / "large.json")
    with pytest.raises(UsageError, match="cannot read"):
        read_sketch(tmp_path / "absent.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats(allow_nan=False) | st.sampled_from(["none", "switch", "relay", "0", "direct-map"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["strategy", "0", "1", "x"]), inner, max_size=3),
    max_leaves=8,
)
PATHS = [p for p, *_ in BAD if "." not in p] + ["intranode_sketch", "internode_sketch", *(p for p, *_ in BAD if "." in p)]


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON, cut=st.integers(0, 2000))
def test_fuzz_a_sketch_or_a_format_error(path: str, value: Any, cut: int) -> None:
    data = changed(path, value)
    for piece in (data, data[: cut % (len(data) + 1)]):
        try:
            assert isinstance(sketch_from_json(piece), Sketch)
        except FormatError as error:
            assert error.where


# ---- profiles --------------------------------------------------------------------------------------------------------
NDV2 = {
    "name": "NDv2_1MB", "gpus_per_node": 8, "nics_per_node": 1, "alpha": 0.3, "node_betas_list": [23, 46], "node_invbws_list": [23, 46],
    "remote_invbw": 107, "remote_alpha": 2.6, "remote_beta": 105,
}  # fmt: skip


def test_profile_of_an_ndv2(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(text(NDV2))
    fabric = read_profile(tmp_path / "p.json", boxes=2, kind="ndv2")
    link = {(x.src, x.dst): x for x in fabric.links}
    double, single = link["box0/gpu0", "box0/gpu1"], link["box0/gpu0", "box0/gpu2"]
    assert double.rate_Bps == round(1e12 / 23) and single.rate_Bps == round(1e12 / 46) and double.latency_s == pytest.approx(0.3e-6)
    assert link["box1/nic0", "net"].rate_Bps == round(1e12 / 105) and link["box1/nic0", "net"].latency_s == pytest.approx(2.6e-6)
    preset = load_fabric("ndv2:2")  # the same pairs, the same classes
    classes = {(x.src, x.dst): x.rate_Bps == 50 * 10**9 for x in preset.links if "gpu" in x.src and "gpu" in x.dst}
    assert classes == {pair: x.rate_Bps == double.rate_Bps for pair, x in link.items() if "gpu" in pair[0] and "gpu" in pair[1]}
    fabric.require_connected()


def test_profiles_of_other_boxes() -> None:
    dgx = NDV2 | {"gpus_per_node": 16, "nics_per_node": 8, "node_betas_list": [8], "node_invbws_list": [8]}
    fabric = profile_fabric(text(dgx), boxes=2, kind="dgx2")
    assert len(fabric.devices) == 32 and fabric.links[0].rate_Bps == 125 * 10**9
    route = fabric.route(fabric.actor_of["box0/gpu2"], fabric.actor_of["box1/gpu3"])
    assert [fabric.links[k].dst for k in route] == ["box0/nic1", "net", "box1/nic1", "box1/gpu3"]  # two GPUs share a NIC
    hub = profile_fabric(text(dgx | {"gpus_per_node": 6, "nics_per_node": 2}), boxes=2, kind="hub")
    assert len(hub.devices) == 12 and len(hub.switches) == 2 + 4 + 1 and hub.links[0].rate_Bps == 125 * 10**9
    hub.require_connected()
    custom = {"name": "pair", "gpus_per_node": 2, "alpha": 1, "links": [[0, 1], [0, 0]], "betas": [[0, 10], [0, 0]], "invbws": [[0, 11], [0, 0]]}
    one_way = profile_fabric(text(custom), boxes=1)
    assert [(x.src, x.dst, x.rate_Bps) for x in one_way.links] == [("box0/gpu1", "box0/gpu0", 10**11)]  # rows are destinations


@pytest.mark.parametrize(
    ("change", "kind", "boxes", "message"),
    [
        ({"gpus_per_node": 4}, "ndv2", 2, "must be 8"),
        ({"gpus_per_node": 1, "node_betas_list": [8]}, "hub", 2, "at least 2"),
        ({"node_betas_list": [1]}, "ndv2", 2, "2 entries"),
        ({"node_betas_list": [23, "x"]}, "ndv2", 2, "number"),
        ({"node_betas_list": [23, 0]}, "ndv2", 2, "rate below"),
        ({"remote_beta": 0}, "ndv2", 2, "2 boxes"),
        ({"speed": 1}, "ndv2", 2, "unknown field"),
        ({}, "custom", 2, "list"),
        ({"links": [[0]], "betas": []}, "custom", 2, "8 rows"),
        ({"links": [[0]] * 8, "betas": []}, "custom", 2, "list of 8"),
        ({"alpha": -1}, "ndv2", 2, "between 0"),
    ],
)
def test_profiles_that_are_wrong(change: dict[str, Any], kind: str, boxes: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        profile_fabric(text(NDV2 | change), boxes=boxes, kind=kind)


def test_profile_arguments() -> None:
    with pytest.raises(UsageError, match="no profile kind"):
        profile_fabric(text(NDV2), boxes=1, kind="dgx9")
    with pytest.raises(UsageError, match="boxes"):
        profile_fabric(text(NDV2), boxes=0, kind="ndv2")
