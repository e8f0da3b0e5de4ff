"""Traces of machines in files: our own come back, published ones are read, hostile databases are not obeyed."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pytest

from meshwright.cluster.generate_vms import synthetic_vms
from meshwright.cluster.vms import Resize, VmHosts, VmTrace
from meshwright.decide.cluster.vms import forecast, strategy
from meshwright.drive.vms import place_vms
from meshwright.errors import FormatError, UsageError
from meshwright.io.cluster import is_vms, load_vms, read_vm_placement, read_vms, write_vm_placement, write_vms
from meshwright.io.cluster.vm_traces import read_azure_packing, read_huawei
from meshwright.testing.soak.cluster_files import azure_base

SMALL = synthetic_vms(3, days=0.3, before_days=0.1, load=0.3, owners=5, warm_days=0.1, low=0.3, seed=1)


def columns(trace):
    return {name: getattr(trace, name) for name in trace.__dataclass_fields__}


def test_machines_and_placements_come_back(tmp_path):
    odd = VmTrace(**columns(SMALL) | {"size": np.where(np.arange(18)[:, None, None] == 3, np.inf, SMALL.size), "resizes": (Resize(1e4, 0, 1),),
        "end_s": np.where(SMALL.end_s > 2e4, np.inf, SMALL.end_s), "shape": np.where(SMALL.shape == 3, 0, SMALL.shape).astype(np.int32)})  # fmt: skip
    for name in ("v.json", "v.vms.json.gz"):
        write_vms(tmp_path / name, odd)
        back = read_vms(tmp_path / name)
        assert all(np.array_equal(a, b) for a, b in zip(columns(odd).values(), columns(back).values(), strict=True)) and is_vms(str(tmp_path / name))
        assert len(load_vms(str(tmp_path / name))) == len(odd)
    made, _ = place_vms(odd, VmHosts.of([3]), strategy("first-fit")(), forecast("perfect", odd), from_s=0.0)
    write_vm_placement(tmp_path / "p.json", made)
    first = (tmp_path / "p.json").read_bytes()
    assert read_vm_placement(tmp_path / "p.json") == made
    write_vm_placement(tmp_path / "p.json", read_vm_placement(tmp_path / "p.json"))
    assert (tmp_path / "p.json").read_bytes() == first
    broken = json.loads(first)
    broken["bound"]["value"] = "0.5"
    (tmp_path / "b.json").write_text(json.dumps(broken), encoding="utf-8")
    with pytest.raises(FormatError, match="exact rational"):
        read_vm_placement(tmp_path / "b.json")


@pytest.mark.parametrize(("field", "value", "says"), [
    ("owner", [0], "owner"), ("low", [10**7], "does not exist"), ("shape", [2**40], "does not exist"), ("size", [[[1.0], [2.0]], [[1.0]]],
        "unequal|resource"),
    ("until_s", -1e9, "recording"), ("version", 9, "newer"), ("schema", "meshwright.queue", "document"), ("resizes", [[0.0, -1, 0]], "resize"),
    ("features", [[1.0, 2.0]], "unequal"),
])  # fmt: skip
def test_machines_that_are_refused(tmp_path, field, value, says):
    write_vms(tmp_path / "v.json", SMALL)
    document = json.loads((tmp_path / "v.json").read_bytes())
    document[field] = value
    (tmp_path / "v.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(FormatError, match=says):
        read_vms(tmp_path / "v.json")


def test_azure_packing(tmp_path):
    azure_base(tmp_path / "a.sqlite")
    trace = load_vms(str(tmp_path / "a.sqlite"))
    assert is_vms(str(tmp_path / "a.sqlite")) and trace.kinds == ("0", "1") and trace.shapes == ("7", "8")
    assert trace.resources == ("core", "memory", "hdd", "ssd", "nic") and trace.size[0].tolist() == [[0.25, 0.125, 0, 0.1, 0], [0.5, 0.25, 0, 0.1,
        0.2]]
    assert np.isinf(trace.size[1, 0]).all() and trace.low.tolist() == [False, True, False]  # the fourth was gone before
    assert (trace.arrival_s / 86_400).tolist() == [-3.5, 0.5, 1.0] and trace.end_s[0] == 1.25 * 86_400 and np.isinf(trace.end_s[1])
    made, _ = place_vms(trace, VmHosts.of([1, 2]), strategy("best-fit")(), forecast("kaplan-meier", trace, at_s=86_400.0 * 1.3), from_s=0.0)
    assert made.refused == () and {s.host for s in made.stays if trace.shape[s.vm] == 1} <= {1, 2}


@pytest.mark.parametrize(("more", "says"), [
    (["DROP TABLE vm", "CREATE VIEW vm AS SELECT 1 vmId, 1 tenantId, 7 vmTypeId, 0 priority, 0.5 starttime, 2.0 endtime"], "no plain table vm"),
    (["DROP TABLE vm", "CREATE VIRTUAL TABLE vm USING fts5(vmId, tenantId, vmTypeId, priority, starttime, endtime)"],
        "no plain table vm|cannot be read"),
    (["ALTER TABLE vm RENAME COLUMN endtime TO x", "ALTER TABLE vm ADD COLUMN endtime REAL AS (vmId)"], "lacks plain columns: endtime"),
    (["ALTER TABLE vm DROP COLUMN tenantId"], "lacks plain columns: tenantId"), (["UPDATE vm SET vmTypeId = 99"], "unknown type"),
    (["UPDATE vm SET starttime = 'soon'"], "starttime is 'soon'"), (["UPDATE vm SET endtime = -9"], "before it starts"), (["DELETE FROM vm"],
        "0 rows"),
    (["UPDATE vmType SET core = -1"], "core is"), (["UPDATE vm SET starttime = 9e300 * 9e300"], "starttime is"),
    (["UPDATE vm SET starttime = -4.0"], "comes after the beginning"), (["UPDATE vm SET tenantId = 'x' || hex(zeroblob(400))"], "more than 256"),
])  # fmt: skip
def test_databases_that_are_refused(tmp_path, more, says):
    try:
        azure_base(tmp_path / "a.sqlite", *more)
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite makes no such table: {error}")
    before = (tmp_path / "a.sqlite").read_bytes()
    with pytest.raises(FormatError, match=says):
        read_azure_packing(tmp_path / "a.sqlite")
    assert (tmp_path / "a.sqlite").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_files_that_are_no_database(tmp_path):
    (tmp_path / "x?mode=rwc#.sqlite").write_bytes(b"SQLite format 3\0" + bytes(84))
    for name, data in (("t.sqlite", b"hello"), ("x?mode=rwc#.sqlite", None)):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(FormatError, match=r"no SQLite database|cannot be read|no plain table"):
            read_azure_packing(tmp_path / name)
    with pytest.raises(UsageError, match="cannot be read"):
        read_azure_packing(tmp_path / "none.sqlite")


def test_a_damaged_schema_is_refused(tmp_path):
    """SQLite quotes it in its message, which is then no UTF-8."""
    azure_base(tmp_path / "a.sqlite")
    data = (tmp_path / "a.sqlite").read_bytes()
    (tmp_path / "a.sqlite").write_bytes(data.replace(b"CREATE TABLE vm", bytes([*b"CREATE T", 200, *b"BLE vm"])))
    with pytest.raises(FormatError, match=r"cannot be read|no plain table"):
        read_azure_packing(tmp_path / "a.sqlite")


def test_huawei(tmp_path):
    path = tmp_path / "h.csv"
    path.write_text("vmid,cpu,memory,time,type\n0,1,2,10,0\n1,4,8,15,0\n0,1,2,40,1\n0,8,16,50,0\n", encoding="utf-8")
    trace = load_vms(str(path))
    assert is_vms(str(path)) and trace.shapes == ("1c2g", "4c8g", "8c16g") and trace.arrival_s.tolist() == [10, 15, 50]
    assert trace.end_s.tolist() == [40, np.inf, np.inf] and trace.size[1, 0].tolist() == [4 / 80, 8 / 180] and trace.owner.tolist() == [0, 1, 2]
    assert read_huawei(path, host=(8.0, 16.0)).size[2, 0].tolist() == [1, 1]
    head = "vmid,cpu,memory,time,type\n"
    for body, says in (
        ("0,1,2,10,0\n0,1,2,11,0\n", "h.csv:3"), ("0,1,2,10,1\n", "deletes what is there"), ("0,1,2,10,0\n1,1,2,9,0\n",
            "do not fall"), ("0,1,2,x,0\n", "time is"),
        ("0,1,2,10\n", "4 columns"), ("0,1,2,10,2\n", "type '2'"), ("0,-1,2,10,0\n", "cpu is"), ('0,"1,2,10,0\n', "not CSV"), ("", "no machine"),
        ("0" * 5000 + ",1,2,3,0\n", "a line of more"),
    ):  # fmt: skip
        path.write_text(head + body, encoding="utf-8")
        with pytest.raises(FormatError, match=says):
            read_huawei(path)
    path.write_text("vmid,cpu\n", encoding="utf-8")
    with pytest.raises(FormatError, match="lacks columns: memory"):
        read_huawei(path)


def test_huawei_as_lifetimes(tmp_path):
    """The form in which others pass the recording on (ChanTinPing/SPANE): the same machines as by creates and deletes, but for those that stay."""
    path = tmp_path / "lt.csv"
    path.write_text("vmid,cpu,mem,at,lt,ltpred\n0,4,16,0.0,194.0,9\n1,1,2,2.0,498.0,9\n2,4,16,2.0,0,9\n3,1,1,55.0,2540293.0,9\n", encoding="utf-8")
    trace = load_vms(str(path))
    assert is_vms(str(path)) and trace.shapes == ("4c16g", "1c2g", "1c1g") and trace.arrival_s.tolist() == [0, 2, 55]
    assert trace.end_s.tolist() == [194, 500, 2540348] and trace.until_s == 55
    events = tmp_path / "h.csv"
    events.write_text("vmid,cpu,memory,time,type\n0,4,16,0.0,0\n1,1,2,2.0,0\n3,1,1,55.0,0\n0,4,16,194,1\n1,1,2,500,1\n3,1,1,2540348,1\n", "utf-8")
    assert all(np.array_equal(a, b) for a, b in zip(columns(load_vms(str(events))).values(), columns(trace).values(), strict=True))
    for body, says in (("0,4,16,0.0,-1\n", "lt is"), ("0,4,16,soon,1\n", "at is"), ("0,4,16,-1,1\n", "at is"), ("0,4,16,0\n", "4 columns"),
                       ("0,4,x,0,1\n", "memory is"), ("0,4,16,0.0,1\n", "no machine")):  # fmt: skip
        path.write_text("vmid,cpu,mem,at,lt\n" + body, encoding="utf-8")
        with pytest.raises(FormatError, match=says):
            read_huawei(path)


def test_azure_packing_as_published(tmp_path):
    """The schema of Azure's page and rows of the published database, as those who opened it print them: machines from 139 days before, that end after
    the 14 days, without an end, of tenants and machines whose numbers have gaps."""
    base = sqlite3.connect(tmp_path / "packing_trace_zone_a_v1.sqlite")
    base.executescript(
        "CREATE TABLE vm (vmId INTEGER, tenantId INTEGER, vmTypeId INTEGER, priority INTEGER, starttime REAL, endtime REAL);"
        "CREATE TABLE vmType (id INTEGER, vmTypeId INTEGER, machineId INTEGER, core REAL, memory REAL, hdd REAL, ssd REAL, nic REAL);"
        "INSERT INTO vm VALUES (0, 0, 8, 0, -138.925486, NULL), (1, 0, 8, 0, -138.925486, 18.035497), (2, 0, 8, 0, -138.925486, 29.828787),"
        "(3, 0, 8, 0, -138.925486, NULL), (4, 0, 8, 0, -63.689572, 53.589653), (7735508, 2791895, 42, 0, 13.381644, 13.382375),"
        "(7735509, 2791895, 42, 0, 13.381644, 13.382375), (7735516, 2791704, 42, 0, 13.397303, 13.404040),"
        "(7735517, 2791704, 42, 0, 13.397303, 13.404040), (7735518, 2791704, 42, 0, 13.397303, 13.404040);"
        "INSERT INTO vmType VALUES (0, 8, 16, 0.25, 0.25, NULL, 0.1, 0.05), (1, 42, 16, 0.5, 0.125, NULL, 0.2, 0.05), (2, 42, 3, 1, 0.5, 0, 0, 0.1);"
    )
    base.commit()
    base.close()
    trace = load_vms(str(tmp_path / "packing_trace_zone_a_v1.sqlite"))
    assert len(trace) == 10 and trace.kinds == ("16", "3") and np.isinf(trace.end_s).sum() == 2
    assert trace.owner.tolist() == [0] * 5 + [1] * 2 + [2] * 3
    assert trace.arrival_s[0] == -138.925486 * 86_400 and trace.until_s == 13.397303 * 86_400 and not trace.low.any()
    made, run = place_vms(trace, VmHosts.of([3, 1]), strategy("nilas")(), forecast("kaplan-meier", trace, at_s=13.39 * 86_400), from_s=0.0)
    assert made.refused == () and run.measures.refused == 0


def test_names_of_machines():
    assert load_vms("vms:hosts=3,days=0.3,before_days=0.1,load=0.3,owners=5,warm_days=0.1,low=0.3,seed=1").end_s.tolist() == SMALL.end_s.tolist()
    assert not is_vms("synthetic:jobs=3") and not is_vms("/nowhere/file")
    for wrong, says in (("vms:jobs=3", "no option"), ("vms:hosts=x", "no option"), ("vms:hosts=0", "hosts"), ("vms:seed=-1", "seed")):
        with pytest.raises(UsageError, match=says):
            load_vms(wrong)
