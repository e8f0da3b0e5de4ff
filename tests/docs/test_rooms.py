"""The floor plan: every room says what it is for and offers little; the root is short; names do not say twice where they are."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "meshwright"
ROOMS = sorted(p.parent for p in SRC.rglob("__init__.py") if p.parent != SRC)  # the root's names have a test of their own (test_public_names)
MOST_MODULES_AT_THE_ROOT = 15
MOST_NAMES = 12

# Rooms whose `__init__` holds more than imports, each with the reason.
HOLD_CODE = {"cli": "`main` loads the frame when it is called"} | dict.fromkeys(
    (
        "decide/cluster",
        "decide/cluster/vms",
        "decide/cluster/resize",
        "decide/collective",
        "decide/data",
        "decide/collective/sparse",
        "decide/experts",
        "decide/layout",
        "decide/memory",
        "decide/pipeline",
        "decide/place",
        "decide/restart",
        "decide/tables",
        "decide/topology",
        "decide/traffic",
        "decide/traffic/adaqp",
    ),
    "the list of a decision's strategies, and the look-up in it",
)

# Names of other people, or of a noun, that hold a room's name.
OWN_NAMES = {
    "graph/step_graph": "the noun", "profile/layer_profile": "the noun", "trace/execution_trace": "PyTorch's name", "run/steps/step": "the noun",
}  # fmt: skip


def name(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def first_module(room: Path) -> ast.Module:
    return ast.parse((room / "__init__.py").read_text())


def offered(tree: ast.Module) -> list[str]:
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            return list(ast.literal_eval(node.value))  # type: ignore[union-attr, arg-type]
    return []


def test_the_root_is_short() -> None:
    assert len(list(SRC.glob("*.py"))) <= MOST_MODULES_AT_THE_ROOT


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_a_room_says_what_it_is_for(room: Path) -> None:
    said = (ast.get_docstring(first_module(room)) or "").partition("\n")[0]
    assert len(said.split()) >= 4 and (said[0].isupper() or said[0] == "`") and "say in one line" not in said
    assert len(list(room.glob("*.py"))) > 1 or any(inner.parent == room for inner in ROOMS), "a room with nothing in it"


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_a_room_offers_little_and_holds_its_code_in_modules(room: Path) -> None:
    tree = first_module(room)
    assert len(offered(tree)) <= MOST_NAMES
    if name(room) in HOLD_CODE:
        return
    assert not [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    bound = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) and n.level for a in n.names}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert bound - used == set(offered(tree)), "what is imported here is offered, and nothing else"


def test_no_allowance_is_left_over() -> None:
    code = (ast.FunctionDef, ast.Assign, ast.AnnAssign)  # beside `__all__`
    assert all(sum(isinstance(n, code) for n in first_module(SRC / room).body) > 1 for room in HOLD_CODE)
    assert all((SRC / f"{module}.py").exists() for module in OWN_NAMES)


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_names_do_not_say_twice_where_they_are(room: Path) -> None:
    said = {room.name, room.name.removesuffix("s")}
    twice = {name(p.with_suffix("")) for p in room.glob("*.py") if p.stem != room.name and said & set(re.split("_", p.stem))}
    assert twice <= set(OWN_NAMES)


def test_the_floor_plan_names_every_room() -> None:
    """docs/design.md: the ten lines are the contract's, and the table has a row for every package at the root."""
    page = (ROOT / "docs" / "design.md").read_text().partition("## The floor plan")[2].partition("\n## ")[0]
    shown = page.partition("```\n")[2].partition("\n```")[0].splitlines()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert shown == next(c for c in contracts if c["type"] == "layers")["layers"]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    assert sorted(room for row in rows for room in row) == sorted(p.parent.name for p in SRC.glob("*/__init__.py"))


def test_tests_lie_beside_what_they_test() -> None:
    """A folder of tests has a room of its name, and no test lies at the root of `run`, `probe` or `drive`, whose rooms are many."""
    beside = {"contract", "data", "docs", "tools"}
    folders = {p.parent.relative_to(ROOT / "tests") for p in (ROOT / "tests").rglob("test_*.py")}
    assert {f.as_posix() for f in folders if f.parts[0] not in beside and not (SRC / f).is_dir()} == set()
    assert not folders & {Path(), Path("run"), Path("probe"), Path("drive")}


def test_whoever_catches_a_wrong_json_catches_wrong_utf8_too() -> None:
    """msgspec tells of bytes that are no UTF-8 by an error that is not one of its own."""
    found = []
    for path in SRC.rglob("*.py"):
        for caught in re.findall(r"^ *except .*msgspec\.(?:DecodeError|MsgspecError).*", path.read_text(), re.MULTILINE):
            if not re.search(r"UnicodeDecodeError|ValueError", caught):
                found.append(f"{path.relative_to(SRC)}: {caught.strip()}")
    assert not found
