"""Files of gradient traffic: what is written is read back; what is wrong is refused with its place."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from meshwright.drive.traffic import load_traffic_plan, plan_traffic
from meshwright.errors import CheckFailed, FormatError, UsageError
from meshwright.io.plan.traffic import (
    is_traffic_plan,
    read_tensors,
    read_traffic_plan,
    read_traffic_profile,
    write_traffic_plan,
    write_traffic_profile,
)
from meshwright.testing.traffic import traffic_profile

PROFILE = traffic_profile(random.Random(14), 9, 2)


def test_plans_and_profiles_come_back_as_they_were(tmp_path):
    plan = plan_traffic(PROFILE)
    write_traffic_plan(tmp_path / "p.json", plan)
    assert load_traffic_plan(tmp_path / "p.json") == read_traffic_plan(tmp_path / "p.json") == plan
    write_traffic_profile(tmp_path / "q.json.gz", PROFILE)
    assert read_traffic_profile(tmp_path / "q.json.gz") == PROFILE


def test_what_is_no_document_is_no_traffic_plan(tmp_path):
    for text in ('{"schema": "meshwright.plan"}', "no JSON", '{"a": ' + "[" * 100_000):
        (tmp_path / "p.json").write_text(text)
        assert not is_traffic_plan(tmp_path / "p.json")


def test_a_changed_plan_is_refused(tmp_path):
    path = tmp_path / "p.json"
    write_traffic_plan(path, plan_traffic(PROFILE))
    document = json.loads(path.read_text())
    document["plan"]["step_ns"] -= 1
    path.write_text(json.dumps(document))
    with pytest.raises(CheckFailed, match="the step takes"):
        load_traffic_plan(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(version=2), "newer meshwright"), (lambda d: d.update(schema="x"), "expected 'meshwright.traffic-profile'"),
        (lambda d: d["profile"].update(speed=1), "unknown field"), (lambda d: d["profile"].update(ranks="8"), "Expected `int`"),
        (lambda d: d["profile"].update(tensors=d["profile"]["tensors"][::-1]), "order in which they become ready"),
        (lambda d: d["profile"].update(codecs=[]), "no codec"),
    ],
)  # fmt: skip
def test_a_foreign_profile_is_refused(tmp_path, change, text):
    path = tmp_path / "q.json"
    document = {"schema": "meshwright.traffic-profile", "version": 1, "profile": msgspec.to_builtins(PROFILE)}
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=text):
        read_traffic_profile(path)


def test_tensors_from_a_spreadsheet(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\ufeffready_s,name,shape\n0.5,late,3x4\n0.25,early,7\n")
    early, late = read_tensors(path)
    assert (early.name, early.shape, early.ready_ns, late.elements) == ("early", (7,), 250_000_000, 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns are missing"), ("name,shape\n", "columns are"), ("name,shape,ready_s\n", "0 tensors"),
        ("name,shape,ready_s\na,3\n", "2 fields"),
        ("name,shape,ready_s\na,3x-1,0\n", "no shape"), ("name,shape,ready_s\na,3,soon\n", "no time"), ("name,shape,ready_s\na,3,-1\n", "no time"),
        ("name,shape,ready_s\na,3,nan\n", "no time"), ('name,shape,ready_s\n"a,3,1\n', "not CSV"),
    ],
)  # fmt: skip
def test_a_foreign_spreadsheet_is_refused(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match=message):
        read_tensors(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_tensors(tmp_path / "none.csv")
