from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Cost, Priced, Transport
from meshwright.errors import FormatError, UsageError
from meshwright.io.costs.table import cost_document, cost_of_document, read_cost, write_cost
from meshwright.io.limits import MaxBytes

positive = st.floats(1e-12, 1e15)
seconds = st.floats(0, 1e6)
evidence = st.sampled_from(["measured", "interpolated", "assumed"])
prices = st.builds(Priced, seconds, evidence, seconds)
costs = st.builds(
    Cost, name=st.text(max_size=8), dtype=st.sampled_from(["fp32", "bf16"]),
    flops_efficiency=st.floats(1e-3, 1), memory_efficiency=st.floats(1e-3, 1),
    per_call_s=seconds, default_flops=positive, default_memory_Bps=positive, evidence=evidence, source=st.text(max_size=8),
    table=st.dictionaries(st.text(max_size=5).map(lambda s: s + "|F"), prices, max_size=4),
    transport=st.builds(Transport, per_message_s=seconds, per_byte_s=seconds, per_step_s=seconds, evidence=evidence),
)  # fmt: skip


@given(costs)
def test_round_trip(cost):
    assert cost_of_document(json.loads(json.dumps(cost_document(cost)))) == cost


def test_files_round_trip_byte_for_byte(tmp_path):
    cost = Cost(table={"b|F": Priced(2.0), "a|B": Priced(1.0, "measured", 0.5)})
    write_cost(cost, tmp_path / "a.json")
    assert read_cost(tmp_path / "a.json") == cost
    again = Cost(table=dict(reversed(cost.table.items())))
    write_cost(again, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert b'"schema": "meshwright.cost"' in (tmp_path / "a.json").read_bytes()


def changed(path, value):
    document = cost_document(Cost(table={"a|F": Priced(1.0)}))
    at = document
    *inner, last = path
    for key in inner:
        at = at[key]
    at[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (["schema"], "meshwright.plan", "schema 'meshwright.plan'"),
        (["version"], 2, "version 2"),
        (["extra"], 1, "unknown field"),
        (["cost", "flops_eficiency"], 0.5, "unknown field `flops_eficiency`"),
        (["cost", "flops_efficiency"], 0, r"cost.flops_efficiency: must be > 0, got 0"),
        (["cost", "flops_efficiency"], 1.5, "at most 1"),
        (["cost", "memory_efficiency"], "high", "cost.memory_efficiency"),
        (["cost", "per_call_s"], -1, r"cost.per_call_s: must be >= 0, got -1"),
        (["cost", "default_flops"], -5, r"cost.default_flops: must be > 0"),
        (["cost", "evidence"], "guessed", "guessed"),
        (["cost", "transport", "per_byte_s"], -1e-9, "cost.transport.per_byte_s"),
        (["cost", "table", "a|F", "time_s"], -1, r"cost.table\['a\|F'\].time_s: must be >= 0"),
        (["cost", "table", "a|F", "cpu_s"], -1, "cpu_s"),
        (["cost", "table", "a"], {"time_s": 1}, "'a' is not SEGMENT"),
        (["cost", "table", "a|F", "evidence"], 7, "cost.table"),
    ],
)
def test_errors_point(tmp_path, path, value, match):
    document = changed(path, value)
    with pytest.raises(FormatError) as caught:
        cost_of_document(document, where="c")
    import re

    assert re.search(match, str(caught.value)), str(caught.value)
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(document))
    with pytest.raises(FormatError) as caught:
        read_cost(file)
    assert re.search(match, str(caught.value)) and "cost.json" in str(caught.value)


BIG, NAN = (b'{"schema": "meshwright.cost", "version": 1, "cost": {"per_call_s": %s}}' % x for x in (b"1e999", b"NaN"))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"null", BIG, NAN], ids=range(7))
def test_hostile_files(tmp_path, data):
    file = tmp_path / "cost.json"
    file.write_bytes(data)
    with pytest.raises(FormatError):
        read_cost(file)


@given(st.binary(max_size=200))
def test_random_bytes(data):
    try:
        cost_of_document(msgspec.json.decode(data))
    except (FormatError, msgspec.DecodeError):
        pass


def test_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(MaxBytes, "COST_TABLE", 10)
    (tmp_path / "cost.json").write_text(" " * 11)
    with pytest.raises(FormatError, match="larger"):
        read_cost(tmp_path / "cost.json")


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read") as caught:
        read_cost(tmp_path / "absent.json")
    assert "tables:SYSTEM" in caught.value.hint


def test_nothing_wrong_is_written(tmp_path):
    with pytest.raises(FormatError):
        write_cost(Cost(flops_efficiency=0.0), tmp_path / "cost.json")
    assert list(tmp_path.iterdir()) == []
