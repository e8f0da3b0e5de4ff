"""docs/api.md has every public name with its arguments, and no other; every public function says what it does, with types."""

from __future__ import annotations

import inspect
import pydoc
import re
from pathlib import Path

import pytest

import meshwright
import meshwright.torch as front

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
MODULES = {"meshwright": meshwright, "meshwright.torch": front}


def rows(section: str) -> dict[str, str]:
    """What the section's table says of each name."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| `.*", text, re.MULTILINE):
        names, _, said = line.strip("| ").partition(" | ")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), said)
    return found


def functions() -> list[tuple[str, str]]:
    return [(m, n) for m, module in MODULES.items() for n in module.__all__ if inspect.isfunction(getattr(module, n))]


@pytest.mark.parametrize("module", MODULES)
def test_the_page_has_every_public_name(module):
    assert sorted(rows(module)) == sorted(MODULES[module].__all__)


@pytest.mark.parametrize(("module", "name"), functions())
def test_the_page_has_every_argument(module, name):
    signature = inspect.signature(getattr(MODULES[module], name))
    named = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = [re.findall(r"\w+", arguments) for arguments in re.findall(r"`\((.*?)\)`", rows(module)[name])]
    assert name == "configure" or named in shown


@pytest.mark.parametrize(("module", "name"), functions())
def test_public_functions_say_what_they_do_with_types(module, name):
    function = getattr(MODULES[module], name)
    assert len((function.__doc__ or "").split()) > 5
    untyped = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
    assert not untyped and inspect.signature(function).return_annotation is not inspect.Signature.empty


def test_nothing_public_is_shadowed_by_a_package():
    """Importing rooms sets them as attributes of the package: none has the name of something else that is public."""
    rooms = {p.parent.name for p in Path(meshwright.__file__).parent.glob("*/__init__.py")}
    assert rooms & set(meshwright.__all__) == {"plan"} and callable(meshwright.plan)


def test_help_is_useful():
    text = pydoc.render_doc(meshwright, renderer=pydoc.plaintext)
    for part in ("mw.plan(model, batch", "parallelize(model, optimizer, plan)", "plan_model(model:", "check_plan(plan:"):
        assert part in text
