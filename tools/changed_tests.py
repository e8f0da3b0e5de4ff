"""Which test files a change touches: `python tools/changed_tests.py [BASE]` prints them, one a line, and says why on standard error.

The change is what differs from where this branch left BASE (default: main; on main, the last commit), files not committed included.
A test file is touched by
    a module it imports, directly or through other modules, at the top or inside a function ("from package import name" counts as an import
    of the module that defines the name, so a strategy does not touch everything that uses its neighbours),
    a module or a file whose name it says in a string ("examples/gpt.py:tiny", "-m", "meshwright.run.launch.worker"),
    a command of the command line whose words it says ("memory", "pack"),
    a helper or a conftest.py beside or above it,
    a module of the same name (src/meshwright/io/atomic.py: tests/io/test_atomic.py).
What everything depends on (pyproject.toml, the environment, the root's conftest.py) touches everything: the word ALL is printed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

__all__ = ["Selection", "Tree", "changed_files", "select"]

PACKAGE = "meshwright"
EVERYTHING = ("pyproject.toml", "test", "tools/environment.sh", "tests/conftest.py", "tests/warm_interpreters.py", "tests/compiled_once.py")
READS_EVERYTHING = "tests/docs/test_repo_rules.py"  # line counts, import contracts, sentences of every file
MEANINGLESS = (ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)  # half of all nodes
EVERYTHING_SHARE = 0.8  # of the test files: from here on, all are run


@dataclass
class Module:
    """What one source file imports and says."""

    path: str
    name: str
    imports: list[tuple[str, str]] = field(default_factory=list)  # (module, name in it or "")
    taken: dict[str, tuple[str, str]] = field(default_factory=dict)  # name here -> (module, name there)
    words: set[str] = field(default_factory=set)  # words of its strings
    dynamic: bool = False  # imports modules by name
    table: dict[str, str] = field(default_factory=dict)  # its tables of text: a package that imports on demand says there what lies where


def parsed(path: Path, root: Path, name: str, package: str) -> Module:
    """`package`: what a relative import starts from."""
    module = Module(path.relative_to(root).as_posix(), name)
    for node in _nodes(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            module.imports += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            target = ".".join(x for x in (base, node.module) if x)
            module.imports += [(target, alias.name) for alias in node.names]
            module.taken |= {alias.asname or alias.name: (target, alias.name) for alias in node.names}
            module.dynamic |= node.module == "importlib"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module.words |= set(node.value.split())
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            module.table |= {str(k.value): str(v.value) for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)}
    return module


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker looks at, from the top down."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        waiting += reversed([x for x in ast.iter_child_nodes(node) if not isinstance(x, MEANINGLESS)])


class Tree:
    """The source and test files of a checkout, and what needs what."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}  # by dotted name
        for path in sorted((root / "src" / PACKAGE).rglob("*.py")):
            parts = path.relative_to(root / "src").with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = parsed(path, root, name, ".".join(parts[:-1]))
        self.tests = {p.relative_to(root).as_posix(): parsed(p, root, p.stem, "") for p in sorted((root / "tests").rglob("*.py"))}
        self.helpers: dict[str, set[str]] = {}  # of the test files that were asked for

    @property
    def test_files(self) -> list[str]:
        return [path for path, module in self.tests.items() if module.name.startswith("test_")]

    def defining(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> str:
        """The module that `from module import name` needs: where a package's `__init__` takes the name from, if it only hands it on."""
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}"
        package = self.modules.get(module)
        if package is not None and package.path.endswith("__init__.py") and (module, name) not in seen:
            if package.dynamic and f"{module}.{package.table.get(name)}" in self.modules:
                return f"{module}.{package.table[name]}"
            if name in package.taken:
                return self.defining(*package.taken[name], seen | {(module, name)})
        return module

    def needed(self, module: Module, package: str) -> Iterator[str]:
        """The modules of the package that a file needs directly."""
        for target, name in module.imports:
            if target == PACKAGE or target.startswith(f"{PACKAGE}."):
                yield self.defining(target, name) if name else target
        for word in module.words:
            if word.startswith(f"{PACKAGE}.") and (found := self.longest(word)) is not None:
                yield found
            if module.dynamic and not self.on_demand(module) and package and f"{package}.{word.lstrip('.')}" in self.modules:
                yield f"{package}.{word.lstrip('.')}"

    def on_demand(self, module: Module) -> bool:
        """Whether a file imports modules by name only for who asks for them: those are followed from there."""
        return module.name == PACKAGE or module.name.startswith(f"{PACKAGE}.cli.")

    def longest(self, word: str) -> str | None:
        """The module that a dotted word starts with: "meshwright.io.atomic.write" is meshwright.io.atomic."""
        parts = word.split(":")[0].split(".")
        return next((name for n in range(len(parts), 1, -1) if (name := ".".join(parts[:n])) in self.modules), None)

    @cached_property
    def users(self) -> dict[str, set[str]]:
        """module -> the modules that need it directly. The table of commands needs none of them: who says the words of one does."""
        found: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, module in self.modules.items():
            package = name if module.path.endswith("__init__.py") else name.rpartition(".")[0]
            for needed in self.needed(module, package):
                if needed in found and needed != name:
                    found[needed].add(name)
        return found

    @cached_property
    def commands(self) -> list[tuple[str, set[str]]]:
        """(module of a command, the words that call it), read from the table in cli/commands.py."""
        table = self.root / "src" / PACKAGE / "cli" / "commands.py"
        found = []
        for node in ast.walk(ast.parse(table.read_text())) if table.exists() else ():
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Tuple) and isinstance(value, ast.Tuple) and isinstance(value.elts[0], ast.Constant):
                        words = {str(e.value) for e in key.elts if isinstance(e, ast.Constant)}
                        found.append((f"{PACKAGE}.cli.{value.elts[0].value}", words))
        return found

    def reached(self, test: str) -> set[str]:
        """The modules that a test file, its helpers and its conftest.py need directly."""
        found: set[str] = set()
        for path in self.with_helpers(test):
            module = self.tests[path]
            found |= set(self.needed(module, ""))
            if PACKAGE in module.words or any(t.startswith(f"{PACKAGE}.cli") for t, _ in module.imports):
                found |= {command for command, words in self.commands if words <= module.words}
        return found

    def with_helpers(self, test: str) -> set[str]:
        """The test file itself, every conftest.py above it, and the helpers they import."""
        if test in self.helpers:
            return self.helpers[test]
        above = [f.as_posix() for f in Path(test).parents]
        found: set[str] = set()
        waiting = deque([test, *(p for f in above if (p := f"{f}/conftest.py") in self.tests)])
        while waiting:
            path = waiting.popleft()
            if path in found or path in EVERYTHING:
                continue
            found.add(path)
            names = {t.split(".")[0] for t, _ in self.tests[path].imports}
            waiting += [p for p, m in self.tests.items() if m.name in names and p.rpartition("/")[0] in above]
        self.helpers[test] = found
        return found


@dataclass
class Selection:
    everything: str = ""  # why, if everything is touched
    why: dict[str, str] = field(default_factory=dict)  # test file -> the first reason

    def add(self, test: str, reason: str) -> None:
        self.why.setdefault(test, reason)


def downstream(tree: Tree, changed: Iterable[str]) -> dict[str, str]:
    """module -> the changed module it needs, directly or through others."""
    found = {name: name for name in changed}
    waiting = deque(found)
    while waiting:
        name = waiting.popleft()
        for user in sorted(tree.users[name] - set(found)):
            found[user] = found[name]
            waiting.append(user)
    return found


def select(tree: Tree, files: Iterable[str]) -> Selection:
    """The test files that a change of these files (paths from the root) touches."""
    files = sorted(set(files))
    chosen = Selection()
    paths = {module.path: name for name, module in tree.modules.items()}
    for path in files:
        if path in EVERYTHING:
            chosen.everything = f"{path} has changed"
            return chosen
        if path in tree.tests:
            _touched_by_test_file(tree, path, chosen)
        if path.endswith((".md", ".ipynb")):
            for test in tree.test_files:
                if test.startswith("tests/docs/"):
                    chosen.add(test, f"{path} has changed")
        if path.startswith("src/"):
            _mirrors(tree, path, chosen)
        _named(tree, path, chosen)
    affected = downstream(tree, [paths[path] for path in files if path in paths])
    for test in tree.test_files:
        for name in sorted(tree.reached(test) & set(affected)):
            chosen.add(test, f"needs {affected[name]}" + (f" through {name}" if affected[name] != name else ""))
            break
    if files and READS_EVERYTHING in tree.tests:
        chosen.add(READS_EVERYTHING, "reads every file")
    if len(chosen.why) >= EVERYTHING_SHARE * len(tree.test_files):
        chosen.everything = f"the change touches {len(chosen.why)} of {len(tree.test_files)} test files"
    return chosen


def _touched_by_test_file(tree: Tree, path: str, chosen: Selection) -> None:
    for test in tree.test_files:
        if test == path:
            chosen.add(test, "has changed")
        elif path in tree.with_helpers(test):
            chosen.add(test, f"uses {path}")


def _mirrors(tree: Tree, path: str, chosen: Selection) -> None:
    """tests/io/test_atomic.py for src/meshwright/io/atomic.py; the folder of tests for what is no Python; a decision's contract."""
    source = Path(path).relative_to("src")
    folder = "tests/" + "/".join(source.parts[1:-1])
    for test in tree.test_files:
        if source.suffix == ".py" and Path(test).parent.as_posix().startswith(folder) and Path(test).name == f"test_{source.stem}.py":
            chosen.add(test, f"has the name of {path}")
        elif source.suffix != ".py" and test.startswith(f"tests/{source.parts[1]}/"):
            chosen.add(test, f"{path} has changed")
        elif source.parts[1:2] == ("decide",) and test == f"tests/contract/test_{source.parts[2]}_contract.py":
            chosen.add(test, f"is the contract that {path} keeps")


def _named(tree: Tree, path: str, chosen: Selection) -> None:
    """Test files, or helpers of theirs, that say the file's name in a string."""
    name = Path(path).name
    if path.startswith("src/") and name.endswith(".py"):
        return  # by the module's dotted name, which `needed` looks for
    sayers = {p for p, m in tree.tests.items() if any(name in word for word in m.words)}
    for test in tree.test_files:
        if sayers & tree.with_helpers(test):
            chosen.add(test, f"names {name}")


def git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: git {' '.join(words)}: {done.stderr.strip()}")
    return [line for line in done.stdout.splitlines() if line]


def changed_files(root: Path, base: str | None) -> list[str]:
    """What differs from where this branch left `base`, with what is not committed and not ignored."""
    if base is None:
        branch = git(root, "rev-parse", "--abbrev-ref", "HEAD")[0]
        has_main = bool(git(root, "branch", "--list", "main"))
        base = "main" if has_main and branch != "main" else "HEAD"
    since = git(root, "merge-base", base, "HEAD")[0]
    return sorted({*git(root, "diff", "--name-only", since), *git(root, "ls-files", "--others", "--exclude-standard")})


def main(arguments: list[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    files = changed_files(root, arguments[0] if arguments else None)
    tree = Tree(root)
    chosen = select(tree, files)
    print(f"{len(files)} files have changed.", file=sys.stderr)
    if chosen.everything:
        print(f"Everything is run: {chosen.everything}.", file=sys.stderr)
        print("ALL")
        return 0
    for test, reason in sorted(chosen.why.items()):
        print(f"  {test}: {reason}", file=sys.stderr)
    print(f"{len(chosen.why)} of {len(tree.test_files)} test files are touched.", file=sys.stderr)
    print("\n".join(sorted(chosen.why)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
