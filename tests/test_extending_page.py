"""docs/extending.md, followed literally: the toy strategy is added to a copy of the package and meets the contract battery."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def code_after(words: str) -> str:
    """The first Python block after these words."""
    found = re.search(r"```python\n(.*?)```", PAGE[PAGE.index(words) :], re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what the page edits, laid over the rest of the package: kernels elsewhere would all be compiled anew."""
    source, copy = ROOT / "src" / "meshwright", tmp_path / "src" / "meshwright"
    shutil.copytree(source / "decide", copy / "decide", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__init__.py").write_text((source / "__init__.py").read_text() + f"\n__path__.append({str(source)!r})\n")
    decision = copy / "decide" / "collective"
    (decision / "hub.py").write_text(code_after("`src/meshwright/decide/collective/hub.py`:"))
    with (decision / "__init__.py").open("a") as file:
        file.write("\n\n" + code_after("In `src/meshwright/decide/collective/__init__.py`:"))
    return tmp_path


def run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def battery(package: Path, words: str) -> subprocess.CompletedProcess[str]:
    return run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "tests/contract", "-k", words)


@pytest.mark.slow
def test_the_toy_passes_the_contract_battery(package: Path) -> None:
    done = battery(package, "Hub")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 10
    command = re.findall(r"^\$ meshwright (collective plan .*)$", PAGE, re.MULTILINE)[0]
    shown = run(package, "-m", "meshwright", *command.split())
    assert shown.returncode == 0, shown.stderr
    assert "hub" in shown.stdout


def test_without_its_edge_the_toy_is_caught(package: Path) -> None:
    """The page says what happens then."""
    strategy = package / "src" / "meshwright" / "decide" / "collective" / "hub.py"
    text = strategy.read_text()
    assert ", after=[sum_of[piece]])" in text
    strategy.write_text(text.replace(", after=[sum_of[piece]])", ")"))
    done = battery(package, "Hub and accepted_by_every_checker")
    assert done.returncode == 1
    assert "race" in done.stdout
