"""Task graphs in files: our form, WfFormat old and new, and what is refused."""

from __future__ import annotations

import json

import pytest

from meshwright.errors import FormatError, UsageError
from meshwright.io.model.tasks import WORKFLOW_RATE, read_tasks

OURS = {
    "schema": "meshwright.tasks", "version": 1, "name": "two", "tasks": [{"name": "a", "work": 2.5, "kind": "camera"}, {"name": "b", "work": 1}],
    "edges": [{"src": "a", "dst": "b", "size_bytes": 7}],
}  # fmt: skip
NEW = {
    "name": "seismology", "schemaVersion": "1.5",
    "workflow": {
        "specification": {
            "tasks": [
                {"name": "decon", "id": "d1", "children": ["m1"], "parents": [], "inputFiles": ["x"], "outputFiles": ["y", "z"]},
                {"name": "merge", "id": "m1", "children": [], "parents": ["d1"], "inputFiles": ["y", "z"], "outputFiles": []},
            ],
            "files": [{"id": "x", "sizeInBytes": 5}, {"id": "y", "sizeInBytes": 70}, {"id": "z", "sizeInBytes": 30}],
        },
        "execution": {"tasks": [{"id": "d1", "runtimeInSeconds": 1.5}, {"id": "m1", "runtimeInSeconds": 0.25}]},
    },
}  # fmt: skip
OLD = {
    "name": "montage", "schemaVersion": "1.4",
    "workflow": {
        "tasks": [
            {"name": "p", "id": "ID1", "runtime": 2.0, "parents": [], "files": [{"link": "output", "name": "f", "size": 11}]},
            {"name": "q", "id": "ID2", "runtime": 3.0, "parents": ["p"], "files": [{"link": "input", "name": "f", "size": 11}]},
        ]
    },
}


def written(tmp_path, document):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_all_forms_are_read(tmp_path):
    ours = read_tasks(written(tmp_path, OURS))
    assert [(t.name, t.work, t.kind) for t in ours.tasks] == [("a", 2.5, "camera"), ("b", 1.0, "any")] and ours.edges[0].size_bytes == 7
    new = read_tasks(written(tmp_path, NEW))
    assert [t.work for t in new.tasks] == [1.5 * WORKFLOW_RATE, 0.25 * WORKFLOW_RATE]
    assert [(e.src, e.dst, e.size_bytes) for e in new.edges] == [("d1", "m1", 100)] and new.name == "seismology"
    old = read_tasks(written(tmp_path, OLD))
    assert [(e.src, e.dst, e.size_bytes) for e in old.edges] == [("ID1", "ID2", 11)] and old.tasks[1].work == 3 * WORKFLOW_RATE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"edges": [{"src": "a", "dst": "c"}]}, "no task 'c'"), ({"edges": [{"src": "a", "dst": "b"}, {"src": "b", "dst": "a"}]}, "in a circle"),
        ({"tasks": []}, "must be 1"), ({"schema": "meshwright.plan"}, "schema"), ({"more": 1}, "unknown field"), ({"version": 2}, "version"),
        ({"workflow": {}}, "lacks or mangles"), ({"workflow": {"tasks": [{"name": "p", "runtime": "long"}]}}, "runtime of long"),
        ({"workflow": {"tasks": [{"name": "p", "files": [{"link": "output", "name": "f", "size": -1}]}]}}, "size of -1"),
    ],
)  # fmt: skip
def test_what_is_no_task_graph_is_refused_by_place(tmp_path, change, says):
    with pytest.raises(FormatError, match=says) as refused:
        read_tasks(written(tmp_path, {**OURS, **change}))
    assert "tasks.json" in refused.value.where


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_tasks(tmp_path / "none.json")
