"""Task graphs in files: our own form (`meshwright.tasks`, docs/formats.md) and WfFormat 1.2 to 1.5, in which workflow collections are published.

WfFormat (wfcommons.org/format): `workflow.specification.tasks` with `parents` and files, `workflow.execution.tasks` with `runtimeInSeconds`. Work is
the runtime times `WORKFLOW_RATE`, so a device with that rate takes as long as the machine of the recording; an edge carries the files that one task
writes and the other reads. Version 1.4 and older ones keep all of it in `workflow.tasks`. Files that no task writes are taken to be everywhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UsageError
from ...graph.tasks import Task, TaskEdge, TaskGraph
from ..limits import MAX_QUANTITY, MaxBytes
from ..strict_json import decode, header, read_document, refuse_ambiguous, write_document

__all__ = ["SCHEMA", "VERSION", "WORKFLOW_RATE", "read_tasks", "write_tasks"]

SCHEMA, VERSION = "meshwright.tasks", 1
WORKFLOW_RATE = 10**9  # operations per second that a recorded second of a workflow's task stands for


class _File(TaskGraph, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    schema: str = SCHEMA
    version: int = VERSION


def read_tasks(path: str | os.PathLike[str]) -> TaskGraph:
    """The task graph in a JSON file (or .json.gz) of either form, told by its fields. Raises: UsageError (no such file), FormatError."""
    where, data = Path(path).name or str(path), read_document(path, limit=MaxBytes.TASKS)
    document = decode(data, msgspec.json.Decoder(dict[str, Any]), where)
    refuse_ambiguous(data, where)
    try:
        if "workflow" in document:
            return _workflow(document, where)
        header(data, schema=SCHEMA, version=VERSION, where=where)
        found = decode(data, msgspec.json.Decoder(_File), where)
        return TaskGraph(name=found.name, tasks=found.tasks, edges=found.edges)
    except UsageError as error:
        raise FormatError(error.message, where=f"{where}: {error.where}", hint=error.hint) from None


def write_tasks(path: str | os.PathLike[str], graph: TaskGraph) -> None:
    """In our own form."""
    document = {"schema": SCHEMA, "version": VERSION, **msgspec.to_builtins(graph)}
    write_document(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _workflow(document: dict[str, Any], where: str) -> TaskGraph:
    try:
        workflow = document["workflow"]
        old = "tasks" in workflow
        specified = workflow["tasks"] if old else workflow["specification"]["tasks"]
        ran = {t.get("id", t.get("name")): t for t in (specified if old else workflow.get("execution", {}).get("tasks", ()))}
        sizes = {} if old else {f["id"]: _bytes(f["sizeInBytes"]) for f in workflow["specification"].get("files", ())}
        ids = [str(t.get("id", t.get("name"))) for t in specified]
        reads, writes = ([_files(t, kind, old, sizes) for t in specified] for kind in ("input", "output"))
        tasks = [Task(name=name, work=_seconds(ran.get(name)) * WORKFLOW_RATE) for name in ids]
        # Files of 1.4 name parents by `name`, whether tasks have an `id` or not.
        number = {str(t.get("name")): i for i, t in enumerate(specified)} | {name: i for i, name in enumerate(ids)}
        edges = [
            TaskEdge(src=ids[i], dst=ids[j], size_bytes=sum(reads[j][f] for f in reads[j].keys() & writes[i].keys()))
            for j, t in enumerate(specified) for i in (number[str(parent)] for parent in t.get("parents", ()))
        ]  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"lacks or mangles {error}"
        raise FormatError(what, where=f"{where}: workflow", hint="WfFormat 1.2 to 1.5: wfcommons.org/format") from None
    return TaskGraph(name=str(document.get("name", "workflow"))[:128], tasks=tuple(tasks), edges=tuple(edges))


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_QUANTITY:
        raise ValueError(f"a size of {str(value)[:32]}")
    return int(value)


def _files(task: dict[str, Any], kind: str, old: bool, sizes: dict[str, int]) -> dict[str, int]:
    """Names and bytes of what a task reads or writes."""
    if not old:
        return {name: sizes.get(name, 0) for name in task.get(f"{kind}Files", ())}
    entries = [f for f in task.get("files", ()) if f.get("link") == kind]
    return {f.get("id", f.get("name")): _bytes(f.get("sizeInBytes", f.get("size", 0))) for f in entries}


def _seconds(task: dict[str, Any] | None) -> float:
    value = 0.0 if task is None else task.get("runtimeInSeconds", task.get("runtime", 0.0))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_QUANTITY / WORKFLOW_RATE:
        raise ValueError(f"a runtime of {str(value)[:32]}")
    return float(value)
