"""Files of a model's modules and of the operators of one forward pass: JSON, typed, versioned, unknown fields refused, capped.

    {"schema": "meshwright.trace-modules", "version": 1, "model": "model.py:build",
     "modules": [{"path": "", "kind": "Net", "parent": -1, "parameters": []}, {"path": "head", "kind": "Linear", "parent": 0, ...}],
     "operators": [{"name": "aten::linear", "module": 1, "inner": ["aten::addmm"], "owners": [["AddmmBackward0", [1]]]}]}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError
from ...trace.module_tree import CapturedOperator, ModuleNode, ModuleTree
from ..limits import MaxBytes
from ..strict_json import decode, header, read_document, refuse_ambiguous, write_document

__all__ = ["read_module_tree", "write_module_tree"]

SCHEMA = "meshwright.trace-modules"
VERSION = 1
MAX_MODULES = 1_000_000  # of one model
MAX_TEXT_CHARACTERS = 1024  # of a path, a class or a name


class _Module(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    path: str
    kind: str
    parent: int
    parameters: list[str] = []


class _Operator(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    name: str
    module: int
    inner: list[str] = []
    owners: list[tuple[str, list[int]]] = []


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    model: str
    modules: list[_Module]
    operators: list[_Operator] = []


_FILE = msgspec.json.Decoder(_File)


def write_module_tree(path: str | os.PathLike[str], tree: ModuleTree) -> None:
    """Write all or nothing; gzipped if `path` ends in `.gz`."""
    document = {
        "schema": SCHEMA, "version": VERSION, "model": tree.model, "modules": tree.modules, "operators": tree.operators,
    }  # fmt: skip
    write_document(path, msgspec.json.encode(document) + b"\n")


def read_module_tree(path: str | os.PathLike[str]) -> ModuleTree:
    """Raises: UsageError if the file cannot be read, FormatError naming the field for anything wrong in it."""
    where = Path(path).name or str(path)
    data = read_document(path, limit=MaxBytes.MODULE_TREE)
    header(data, schema=SCHEMA, version=VERSION, where=where)
    file = decode(data, _FILE, where)
    refuse_ambiguous(data, where)
    _check(file, where)
    modules = tuple(ModuleNode(path=m.path, kind=m.kind, parent=m.parent, parameters=tuple(m.parameters)) for m in file.modules)
    operators = tuple(
        CapturedOperator(name=o.name, module=o.module, inner=tuple(o.inner), owners=tuple((n, tuple(m)) for n, m in o.owners)) for o in file.operators
    )
    return ModuleTree(model=file.model, modules=modules, operators=operators)


def _check(file: _File, where: str) -> None:
    def refuse(message: str, field: str) -> None:
        raise FormatError(message, where=f"{where}: {field}")

    if not 0 < len(file.modules) <= MAX_MODULES:
        refuse(f"holds {len(file.modules)} modules; 1 to {MAX_MODULES} are read", "modules")
    seen: set[str] = set()
    for i, module in enumerate(file.modules):
        if not (module.parent == -1 if i == 0 else 0 <= module.parent < i):
            refuse(f"{module.parent} is not a module before this one", f"modules[{i}].parent")
        if module.path in seen:
            refuse(f"the path {module.path[:80]!r} occurs twice", f"modules[{i}].path")
        seen.add(module.path)
        if max(map(len, (module.path, module.kind, *module.parameters))) > MAX_TEXT_CHARACTERS:
            refuse(f"a text is longer than {MAX_TEXT_CHARACTERS} characters", f"modules[{i}]")
    for i, operator in enumerate(file.operators):
        named: list[Any] = [operator.module, *(m for _, owners in operator.owners for m in owners)]
        if not all(0 <= m < len(file.modules) for m in named):
            refuse(f"names a module that is not among the {len(file.modules)}", f"operators[{i}]")
        if max(map(len, (operator.name, *operator.inner, *(n for n, _ in operator.owners)))) > MAX_TEXT_CHARACTERS:
            refuse(f"a text is longer than {MAX_TEXT_CHARACTERS} characters", f"operators[{i}]")
