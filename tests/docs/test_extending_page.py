"""docs/extending.md, followed literally: the toys are added to a copy of the package, found by commands and `auto`, and meet the batteries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import one_interpreter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
NET = '''
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(64, 8)), (torch.randn(1024, 64), torch.randint(8, (1024,)))
'''


def blocks() -> list[tuple[str, str]]:
    """(file that the text names before it, block) of every Python block."""
    found = []
    for match in re.finditer(r"```python\n(.*?)```", PAGE, re.DOTALL):
        files = re.findall(r"`(src/meshwright/decide/[\w/]+\.py)`", PAGE[: match.start()])
        found.append((files[-1], match[1]))
    return found


def commands(word: str) -> list[list[str]]:
    return [line.split() for line in re.findall(r"^\$ meshwright (.*)$", PAGE, re.MULTILINE) if line.startswith(word)]


def laid_over(folder: Path, file: str) -> None:
    """A copy of a package's `__init__.py` that finds the modules that are not beside it where they are."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / file).read_text()
    first = re.search(r"^(from|import) (?!__future__)", text, re.MULTILINE)
    begin = first.start() if first else len(text)
    path.write_text(f"{text[:begin]}__path__.append({str((ROOT / file).parent)!r})\n{text[begin:]}")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page adds and edits, laid over the package: every other module is the source's own, with its compiled kernels."""
    folder = tmp_path_factory.mktemp("extended")
    for file in ("src/meshwright/__init__.py", "src/meshwright/decide/__init__.py"):
        laid_over(folder, file)
    for file, block in blocks():
        path = folder / file
        if path.name != "__init__.py":
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
            continue
        laid_over(folder, file)
        line, entry = block.rstrip("\n").split("\n\n")  # the import, and the line of the tuple
        text = path.read_text()
        last = text.rindex("\nfrom .", 0, text.index("__all__"))
        begin = text.index("\nSTRATEGIES")
        end = text.index("\n)", begin)
        path.write_text(f"{text[:last]}\n{line}{text[last:end]}\n{entry}{text[end:]}")
    (folder / "net.py").write_text(NET)
    return folder


# An interpreter that has imported the package before forgets it: torch, which takes longest, need not be imported once more.
FROM_PACKAGE = """
import os, sys

for name in [x for x in sys.modules if x.partition(".")[0] == "meshwright"]:
    del sys.modules[name]
os.environ["PYTHONPATH"] = sys.argv.pop(1)
sys.path.insert(0, os.environ["PYTHONPATH"])
sys.dont_write_bytecode = True
"""
BATTERY = "import pytest\n\nsys.exit(pytest.main(sys.argv[1:]))\n"


def run(package: Path, program: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}
    command = [sys.executable, "-c", FROM_PACKAGE + program, str(package / "src"), *words]
    return subprocess.run(command, cwd=cwd or package, env=environment, capture_output=True, text=True, timeout=280, check=False)


def battery(package: Path, words: str, *more: str, of: str = "") -> subprocess.CompletedProcess[str]:
    """`of`: one of the files of batteries."""
    return run(package, BATTERY, "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"tests/contract/{of}", "-k", words, *more, cwd=ROOT)


@pytest.fixture(scope="module")
def batteries(package: Path) -> subprocess.CompletedProcess[str]:
    """Of all toys in one run, as on the page."""
    return battery(package, re.findall(r'\$ \./test tests/contract -k "(.*)"', PAGE)[0], "-rA")


@pytest.mark.slow
@pytest.mark.parametrize(("toy", "tests"), [("Hub", 10), ("OneByOne", 5), ("Replicated", 2), ("BiggestFirst", 3)])
def test_the_toys_pass_their_contract_batteries(batteries: subprocess.CompletedProcess[str], toy: str, tests: int) -> None:
    assert batteries.returncode == 0, batteries.stdout[-3000:]
    assert len(re.findall(rf"^PASSED .*{toy}", batteries.stdout, re.MULTILINE)) >= tests


@pytest.fixture(scope="module")
def shown(package: Path) -> dict[tuple[str, ...], tuple[int, str]]:
    """(exit code, what it says) of every command of the page, all in one interpreter."""
    asked = commands("")
    done = run(package, one_interpreter.PROGRAM + one_interpreter.SAYS, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    return {tuple(command): (code, out + err) for command, (code, out, err) in zip(asked, json.loads(done.stdout), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "name"),
    [("collective", "hub"), ("pipeline", "one-by-one"), ("layout", "replicated"), ("memory", "biggest-first"), ("strategies", "hub")],
)
def test_the_commands_of_the_page_show_the_toys(shown: dict[tuple[str, ...], tuple[int, str]], word: str, name: str) -> None:
    """The first is `auto`, which lists what it tried; the second names the toy (of collectives it is the other way round)."""
    found = commands(word)
    assert found and (word == "strategies" or any(name in command for command in found))
    for command in found:
        code, text = shown[tuple(command)]
        assert code == 0, (command, text)
        assert name in text, (command, text)


def test_without_its_edge_the_toy_is_caught(package: Path, tmp_path: Path) -> None:
    """The page says what happens then."""
    shutil.copytree(package, tmp_path / "broken")
    strategy = tmp_path / "broken" / "src" / "meshwright" / "decide" / "collective" / "hub.py"
    text = strategy.read_text()
    assert ", after=[sum_of[piece]])" in text
    strategy.write_text(text.replace(", after=[sum_of[piece]])", ")"))
    done = battery(tmp_path / "broken", "Hub and accepted_by_every_checker", of="test_collective_contract.py")
    assert done.returncode == 1
    assert "race" in done.stdout
