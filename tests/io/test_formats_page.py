"""The examples on docs/formats.md are read as they stand, and the page names every field and every schema that stands in files."""

import json
import re
from dataclasses import fields
from pathlib import Path

import msgspec

from meshwright.cost import Cost, Priced, Transport
from meshwright.fabric.fabric import Device, Link, Switch
from meshwright.io.costs.table import cost_of_document
from meshwright.io.fabric.document import DTYPES, fabric_from_document
from meshwright.io.fabric.toml import parse_fabric_toml
from meshwright.run.calibrate.operator_times import OperatorTime, OperatorTimes, environment

PAGE = Path("docs/formats.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Fabrics") :].partition("\n## ")[0]


def test_examples_on_the_page():
    (toml,), (document,) = (re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL) for kind in ("toml", "json"))
    fabric = parse_fabric_toml(toml)
    fabric.require_connected()
    assert (len(fabric.devices), len(fabric.links)) == (4, 8)
    assert len(fabric_from_document(json.loads(document)).links) == 1


def test_every_field_and_dtype_is_on_the_page():
    for noun in (Device, Switch, Link):
        for field in fields(noun):
            assert f"`{field.name}`" in SECTION, field.name
    assert " ".join(DTYPES) in SECTION


def _section(title):
    return PAGE[PAGE.index(f"## {title}") :].partition("\n## ")[0]


def _example(section):
    (document,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    return json.loads(document)


def test_cost_example_and_fields():
    section = _section("Costs")
    cost = cost_of_document(_example(section))
    assert cost.table["s0|F"] == Priced(0.01, "measured", 0.009) and cost.transport.per_message_s == 1e-5
    for kind in (Cost, Priced, Transport):
        for field in kind.__struct_fields__:
            assert f"`{field}`" in section, field


def test_operator_times_example_and_fields(tmp_path):
    section = _section("Operator times")
    document = _example(section)
    for field in OperatorTime.__struct_fields__:
        assert f"`{field}`" in section, field
    assert document["environment"].keys() == environment().keys()
    path = tmp_path / "times.json"
    path.write_text(json.dumps(document))
    assert not OperatorTimes(path).times  # another environment: valid, not used
    path.write_text(json.dumps({**document, "environment": environment()}))
    assert OperatorTimes(path).times == {k: msgspec.convert(v, OperatorTime) for k, v in document["times"].items()}


# What commands print with --json; not read back from files.
PRINTED = {
    "kfac-capacity", "placement", "placements", "data.bench", "data.plan", "data.serve", "data.stalls",
    "cluster-plan", "cluster-profile", "cluster-run", "cluster-runs", "cluster-resize", "cluster-resize-log", "cluster-resize-simulated",
    "cluster-vm-plan", "cluster-vm-run", "cluster-vm-runs",
    "graph-partition", "graph-comparison", "graph-plan", "graph-run", "tables-plan", "tables-compare", "tables-fit", "tables-run", "tables-export",
    "pipeline-compare", "pipeline-plan", "pipeline-export", "pipeline-run", "pipeline-fill",
    "capture", "citations", "collective", "completion", "error", "fabric-here", "fabric-list", "fabric-show", "program-diff",
    "program-show", "program-stats", "program-export", "program-import",
    "run.dry", "train.compare", "train.plan", "train.replan", "version",
    "nccl-prediction", "rank-order", "collective-check", "collective-export", "collective-import", "nccl-tuner",
    "collective-groups", "collective-sparse", "collective-sweep", "fabric-lint", "nccl-graphs",
    "place-fit", "place-run",
    "collective-bench", "collective-warm", "doctor", "fabric-probe", "group-report", "lab-down", "lab-dry-run", "lab-fault", "lab-gc", "lab-list",
    "lab-run", "lab-show", "ordered-launch", "train-check",
    "profile", "profile-prediction", "profile-plan", "profile-fit", "train-export", "memory.plan", "memory.pack", "memory.compare",
    "report", "memory.step", "memory.modules", "memory.explain", "train.ledger", "layout-search",
    "trace-annotation", "traffic.plan", "traffic.compare", "fabric-design", "network-design", "board-allocation", "board-replay",
    "cluster-audit", "cluster-carried", "cluster-dry-run", "sandbox-up", "sandbox-down", "sandboxes", "slurm-files",
}  # fmt: skip
SRC = Path("src/meshwright")
DOTTED = {".".join(p.relative_to(SRC).with_suffix("").parts) for p in SRC.rglob("*.py") if p.parent != SRC}
MODULES = DOTTED | {"testing"}  # names of modules and loggers in the same form


def test_every_schema_that_the_code_writes_is_on_the_page():
    written = set()
    for path in SRC.rglob("*.py"):
        written |= set(re.findall(r"""["']meshwright\.([a-z.-]+[a-z])["']""", path.read_text(encoding="utf-8")))
    assert {"cost", "operator-times", "plan", "recording"} <= written
    operators = {name for name in written if name.endswith(".default")}
    for name in sorted(written - PRINTED - MODULES - operators):
        assert f"`meshwright.{name}`" in PAGE, name


def test_rank_costs_are_as_the_page_says():
    from meshwright.decide.collective.cloudcollectives.cost import CostMatrix

    section = _section("Rank costs")
    document = _example(section)
    matrix = CostMatrix.from_document(document)
    assert matrix.to_document() == document and all(f"`{field}" in section for field in document if field not in ("schema", "version", "source"))
