"""What `./test --changed` runs: on a small tree where the answer is known, and on this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from changed_tests import Tree, changed_files, select  # noqa: E402

FILES = {
    "pyproject.toml": "", "docs/page.md": "", "examples/net.py": "", "src/meshwright/page.css": "",
    "src/meshwright/__init__.py": "from importlib import import_module\n_HOME = {'plan': 'drive'}\n"
    "def __getattr__(name):\n    return import_module(f'.{_HOME[name]}', __name__)\n",
    "src/meshwright/errors.py": "", "src/meshwright/lone.py": "",
    "src/meshwright/decide/__init__.py": "",
    "src/meshwright/decide/pack/__init__.py": "from .ring import Ring\nfrom .tree import Tree as Bush\nALL = (Ring,)",
    "src/meshwright/decide/pack/ring.py": "from ...errors import E", "src/meshwright/decide/pack/tree.py": "",
    "src/meshwright/drive.py": "def plan():\n    from .decide.pack import ALL",
    "src/meshwright/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .lone import Lone",
    "src/meshwright/cli/__init__.py": "", "src/meshwright/cli/frame.py": "from importlib import import_module\nfrom . import commands",
    "src/meshwright/cli/commands.py": "COMMANDS = {('memory', 'pack'): ('memory_pack', 'one'), ('lab', 'up'): ('lab_up', 'two')}",
    "src/meshwright/cli/memory_pack.py": "from ..lone import x", "src/meshwright/cli/lab_up.py": "",
    "tests/conftest.py": "", "tests/contract/test_pack_contract.py": "", "tests/docs/test_repo_rules.py": "",
    "tests/a/conftest.py": "import rig", "tests/a/rig.py": "from meshwright.decide.pack import Bush", "tests/a/test_far.py": "",
    "tests/b/test_ring.py": "from meshwright.decide.pack import Ring", "tests/b/test_public.py": "from meshwright import plan",
    "tests/b/test_names.py": "MODEL = 'examples/net.py:tiny'\nW = ['-m', 'meshwright.typed']", "tests/b/test_lone.py": "",
    "tests/b/test_command.py": "from meshwright.cli import main\nmain(['memory', 'pack'])",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    root = tmp_path_factory.mktemp("tree")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Tree(root)


RULES = "docs/test_repo_rules.py"


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("src/meshwright/decide/pack/ring.py", "b/test_ring.py b/test_public.py contract/test_pack_contract.py"),  # by import, on demand, by contract
        ("src/meshwright/errors.py", "b/test_ring.py b/test_public.py"),  # through another module
        ("src/meshwright/decide/pack/tree.py", "a/test_far.py b/test_public.py contract/test_pack_contract.py"),  # by a helper of a conftest.py
        ("src/meshwright/lone.py", "b/test_command.py b/test_lone.py"),  # by the words of a command; by its name; not by a typing import
        ("src/meshwright/cli/lab_up.py", ""),
        ("src/meshwright/typed.py", "b/test_names.py"),  # by a string
        ("examples/net.py", "b/test_names.py"),
        ("docs/page.md", ""),
        ("tests/a/rig.py", "a/test_far.py"),
        ("tests/a/test_far.py", "a/test_far.py"),
        ("src/meshwright/gone.py", ""),
    ],
)
def test_what_a_change_touches(small: Tree, changed: str, touched: str) -> None:
    chosen = select(small, [changed])
    assert not chosen.everything and sorted(chosen.why) == sorted(f"tests/{t}" for t in [*touched.split(), RULES])
    assert all(chosen.why.values())


def test_what_touches_everything(small: Tree) -> None:
    for path in ("pyproject.toml", "tests/conftest.py"):
        assert path in select(small, [path]).everything
    most = [f"tests/{t}" for t in ("b/test_ring.py", "b/test_public.py", "b/test_names.py", "b/test_command.py", "b/test_lone.py", "a/test_far.py")]
    assert "7 of 8" in select(small, most).everything
    assert not select(small, []).why


def test_the_change_is_what_differs_from_where_the_branch_began(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(name)
    git("add", "."), git("commit", "-m", "first")
    (tmp_path / "one").write_text("changed")
    assert changed_files(tmp_path, None) == ["one"]  # on main: since the last commit
    git("checkout", "-b", "side"), git("commit", "-am", "second")
    (tmp_path / "two").write_text("changed")
    (tmp_path / "new").write_text("new")
    assert changed_files(tmp_path, None) == ["new", "one", "two"]  # on a branch: since it left main
    assert changed_files(tmp_path, "HEAD") == ["new", "two"]
    with pytest.raises(SystemExit, match="git merge-base"):
        changed_files(tmp_path, "nosuch")


def test_this_tree() -> None:
    tree = Tree(ROOT)
    assert {"tests/lab/test_lab_real.py"} <= set(select(tree, ["src/meshwright/lab/serve.py"]).why)
    one = select(tree, ["src/meshwright/decide/collective/blink/strategy.py"]).why
    assert "tests/contract/test_collective_contract.py" in one and "tests/annotate/test_annotate.py" not in one
    assert "tests/tools/test_changed_tests.py" in select(tree, ["tools/changed_tests.py"]).why
    words = {command for command, _ in tree.commands}
    assert words == {name for name in words if name in tree.modules} and len(words) > 50
