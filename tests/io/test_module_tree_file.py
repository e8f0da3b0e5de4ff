"""Files of modules: what is written is read, the page's example is read, and every refusal names its field."""

import json
import re
from pathlib import Path

import pytest

from meshwright.errors import FormatError
from meshwright.io.limits import MaxBytes
from meshwright.io.trace.module_tree import read_module_tree, write_module_tree
from meshwright.trace.module_tree import CapturedOperator, ModuleNode, ModuleTree

TREE = ModuleTree(
    model="m", modules=(
        ModuleNode(path="", kind="Net", parent=-1), ModuleNode(path="a", kind="Sequential", parent=0),
        ModuleNode(path="a.0", kind="Linear", parent=1, parameters=("weight",)), ModuleNode(path="b", kind="ReLU", parent=0),
    ),
    operators=(CapturedOperator(name="aten::linear", module=2, inner=("aten::t",), owners=(("TBackward0", (2,)),)),),
)  # fmt: skip


@pytest.mark.parametrize("name", ["tree.json", "tree.json.gz"])
def test_round_trip(tmp_path, name):
    write_module_tree(tmp_path / name, TREE)
    assert read_module_tree(tmp_path / name) == TREE


def test_relations():
    assert TREE.ancestors(2) == [2, 1, 0] and TREE.depth(2) == 2 and TREE.common(2, 3) == 0 and TREE.common(1, 2) == 1


def test_the_pages_example(tmp_path):
    section = Path("docs/formats.md").read_text().partition("## Modules beside a trace")[2]
    (example,) = re.findall(r"```json\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    (tmp_path / "t.json").write_text(example)
    assert read_module_tree(tmp_path / "t.json").operators[0].owners == (("AddmmBackward0", (1,)),)


def broken(**changes):
    document = {"schema": "meshwright.trace-modules", "version": 1, "model": "m", "modules": [{"path": "", "kind": "N", "parent": -1}]}
    return {**document, **changes}


ROOT = {"path": "", "kind": "N", "parent": -1}
REFUSED = [
    ({"modules": []}, "modules"), ({"modules": [{**ROOT, "parent": 0}]}, r"modules\[0\].parent"),
    ({"modules": [ROOT, {**ROOT, "path": "a"}]}, r"modules\[1\].parent"), ({"modules": [ROOT, {**ROOT, "parent": 0}]}, "occurs twice"),
    ({"modules": [{**ROOT, "kind": "x" * 2000}]}, "longer than"), ({"operators": [{"name": "a", "module": 1}]}, r"operators\[0\]"),
    ({"operators": [{"name": "a", "module": 0, "owners": [["x", [7]]]}]}, r"operators\[0\]"), ({"more": 1}, "more"),
    ({"operators": [{"name": "x" * 2000, "module": 0}]}, "longer than"), ({"version": 9}, "newer"), ({"schema": "meshwright.plan"}, "expected"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_refusals(tmp_path, changes, said):
    (tmp_path / "t.json").write_text(json.dumps(broken(**changes)))
    with pytest.raises(FormatError, match=said):
        read_module_tree(tmp_path / "t.json")


def test_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(MaxBytes, "MODULE_TREE", 50)
    (tmp_path / "t.json").write_text(json.dumps(broken()))
    with pytest.raises(FormatError, match="larger than"):
        read_module_tree(tmp_path / "t.json")
