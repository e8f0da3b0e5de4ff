"""Rules of the repository that no other tool checks."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright import errors
from meshwright.cli.commands import COMMANDS
from meshwright.cli.frame import _find, _load, _parser

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src").rglob("*.py"))
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "yaml.load", "os.system", "os.popen", "torch.jit.load", "torch.export.load",
}  # fmt: skip
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def violations(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """What may not stand in src/: code that runs what it reads, and shells."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES and not node.level:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            what = called(node)
            given = {k.arg: k.value for k in node.keywords}
            if what in FORBIDDEN_CALLS:  # plain names only: `re.compile` and `model.eval` are others
                yield node.lineno, what
            elif what == "torch.load" and not _true(given.get("weights_only")):
                yield node.lineno, "torch.load without weights_only"
            elif what.endswith(("np.load", "numpy.load")) and _true(given.get("allow_pickle")):
                yield node.lineno, "allow_pickle"
            if _true(given.get("shell")):
                yield node.lineno, "shell=True"


def called(node: ast.Call) -> str:
    """What is called, as it is written: `a`, `a.b.c`; for what is neither, the attribute after it at least."""
    names, at = [], node.func
    while isinstance(at, ast.Attribute):
        names.append(at.attr)
        at = at.value
    return ".".join(reversed([*names, at.id if isinstance(at, ast.Name) else ""]))


def _true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@dataclass(frozen=True)
class Looked:
    """What the rules want to know of a module; its tree, which is large, is not kept."""

    violations: tuple[tuple[int, str], ...]
    imports_by_text: tuple[int, ...]
    says_what_it_is: bool


# What a module must say somewhere to break a rule: parsing and walking the others, nearly all, would take seconds.
SUSPICIOUS = re.compile(
    r"(?<![.\w])(?:eval|exec|compile)\b|yaml\.load|os\.(?:system|popen)|torch\.(?:jit\.|export\.)?load|(?:np|numpy)\.load|shell|import_module|__import__"
    rf"|\b(?:{'|'.join(sorted(FORBIDDEN_MODULES))})\b"
)
DOCSTRING = re.compile(r"(?:\s|#.*\n)*[rR]?[\"']")


@functools.cache
def looked(path: Path) -> Looked:
    text = path.read_text()
    nodes = [*ast.walk(ast.parse(text))] if SUSPICIOUS.search(text) else []
    return Looked(tuple(violations(nodes)), tuple(imports_by_text(nodes)), bool(DOCSTRING.match(text)) or not text.strip())


def test_the_rule_sees_what_it_should() -> None:
    bad = "import pickle\nfrom marshal import loads\neval('1')\nyaml.load(x)\nsubprocess.run('x', shell=True)\ntorch.load(f)\nos.system('x')\n"
    assert [line for line, _ in violations(ast.walk(ast.parse(bad)))] == [1, 2, 3, 4, 5, 6, 7]
    assert all(SUSPICIOUS.search(line) for line in [*bad.splitlines(), "__import__('x')", "f = importlib.import_module", "f = eval", "x(shell = 1)"])
    assert all(SUSPICIOUS.search(word) for word in FORBIDDEN_CALLS | FORBIDDEN_MODULES)
    good = "model.eval()\nre.compile('x')\nsubprocess.run(['x'])\ntorch.load(f, weights_only=True)\n"
    assert not list(violations(ast.walk(ast.parse(good))))


def test_nothing_in_src_runs_what_it_reads() -> None:
    found = [f"{name(path)}:{line} {what}" for path in MODULES for line, what in looked(path).violations]
    assert not found


# Imports by a text that import-linter cannot see, each with the reason.
BY_TEXT = {
    "src/meshwright/__init__.py": "the public names, which stand beside it as typing imports too (test_public_names)",
    "src/meshwright/cli/frame.py": "the module of a command, from the table of commands (test_commands_have_what_the_frame_asks_for)",
    "src/meshwright/capture/resolve.py": "modules of the user's model",
    "src/meshwright/testing/soak/files.py": "the readers of io, from a table that names them all (test_every_reader_is_in_the_list)",
    "src/meshwright/run/ranks/worker.py": "what a rank does, in a process of its own: its caller imports the function and hands it over",
}


def imports_by_text(nodes: list[ast.AST]) -> list[int]:
    """Lines that call `import_module` or `__import__`, however they are named there."""
    aliases = {"import_module", "__import__"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            aliases |= {a.asname or a.name for a in node.names if a.name in ("import_module", "__import__")}
    return [n.lineno for n in nodes if isinstance(n, ast.Call) and called(n).rpartition(".")[2] in aliases]


def test_no_module_is_imported_by_a_text() -> None:
    bad = "from importlib import import_module as load\nload('x')\nimportlib.import_module('x')\n__import__('x')\n"
    assert imports_by_text([*ast.walk(ast.parse(bad))]) == [2, 3, 4]
    found = {name(path) for path in MODULES if looked(path).imports_by_text}
    assert found == set(BY_TEXT)


def test_what_ranks_do_is_imported_where_they_are_started() -> None:
    """No `module:function` as a text, which import-linter would not see."""
    text = re.compile(r"""["}]\S*:[a-z_]+_rank["']""")
    assert all(text.search(x) for x in ('"meshwright.run.rank:training_rank"', 'f"{__name__}:tables_rank"', 'f"{__package__}.rank:place_rank"'))
    assert not [name(path) for path in MODULES if text.search(path.read_text())]


def test_public_names() -> None:
    """The table that loads them, the imports that type checkers and import-linter see, and `__all__` say the same."""
    import meshwright

    body = ast.parse(Path(meshwright.__file__).read_text()).body
    typing_only = next(n for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {a.asname or a.name: n.module for n in typing_only.body if isinstance(n, ast.ImportFrom) for a in n.names if n.level == 1}
    assert len(seen) > 10
    assert meshwright.__all__ == sorted([*seen, "__version__"])
    assert seen.pop("plan") == meshwright._HOME["plan_model"]  # the room that can be called
    assert seen == meshwright._HOME
    assert all(getattr(meshwright, n) is not None for n in seen)


def test_commands_have_what_the_frame_asks_for() -> None:
    folder = ROOT / "src" / "meshwright" / "cli"
    for module, _ in COMMANDS.values():
        tree = ast.parse((folder / f"{module}.py").read_text())
        bound = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        bound |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        bound |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        bound |= {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
        assert {"HELP", "arguments", "run"} <= bound, module


def test_every_module_says_what_it_is() -> None:
    assert not [name(path) for path in MODULES if not looked(path).says_what_it_is]


def test_modules_are_short() -> None:
    long = {name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {n: lines for n, lines in long.items() if lines > 400} == {}


def test_names_say_something() -> None:
    assert not [name(p) for p in MODULES if p.stem in ("utils", "util", "helpers", "common", "misc", "tools")]


def test_every_error_is_tested() -> None:
    """Each class of the tree is expected by some test (`pytest.raises`), or named in one that looks at what was raised."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    classes = [n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)]
    assert len(classes) >= 15
    assert not [c for c in classes if not re.search(rf"\b{c}\b", text)]


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by name: two of one name would hide each other."""
    seen: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ("conftest.py", "__init__.py"):
            seen.setdefault(path.name, []).append(name(path))
    assert not [paths for paths in seen.values() if len(paths) > 1]


def test_imports_go_one_way() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def shown_commands() -> list[tuple[str, str]]:
    """Lines `$ meshwright ...` of all pages, continued lines joined."""
    found = []
    for page in DOCS:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.match(r"\s*\$ meshwright (.*)", line):
                    found.append((name(page), match[1].partition(" #")[0]))
    return found


def test_pages_show_commands() -> None:
    assert len(shown_commands()) >= 10


@pytest.mark.parametrize(("page", "command"), shown_commands())
def test_shown_commands_parse(page: str, command: str) -> None:
    words = shlex.split(command.removesuffix(" &"))
    if words[0].startswith("-"):
        return
    found, rest = _find(words)
    assert found in COMMANDS, command
    _, unknown = _parser(found, _load(found)).parse_known_args(rest)
    assert not unknown


def test_scripts_can_be_run() -> None:
    for script in ("quickstart", "test", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=200)
    subprocess.run(["bash", "-n", str(ROOT / "tools" / "environment.sh")], check=True, timeout=200)
