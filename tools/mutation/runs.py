"""Runs tests against an overlay of the sources: once to see which test runs which line, then once per mutant with the tests that can notice.

The working tree is read, never written: sources are copied to `<root>/.mutation/src`, which comes first on PYTHONPATH, and one file of the
copy is changed at a time. What was found is kept there too: the map of lines by the content of sources and test files, the verdicts by
mutant and by the content of the test files that gave them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .lines import RECORDING, function_lines, probed
from .operators import Mutation

TOOLS = Path(__file__).parent.parent
STARTUP_S = 60.0  # of a run: imports and collection on a busy machine
COMPILING_S = 180.0  # of a mutant that numba compiles again, with all that calls it
FIRST_TESTS = 4  # of a mutant's tests that run before the others' files are collected
MAX_BUSY_FACTOR = 4.0  # by which limits are stretched on a busy machine
UNHEARD = 1  # exit status of a run in which no test failed: one ran past its limit in compiled code, see `plugin`
TIMES_LIMIT = 3.0  # of a test's recorded time
TEST_EXTRA_S = 30.0  # what the test shares with others (a fixture of its module) is made again when it runs without them
IMPORT = re.compile(r"^(?:from|import) .*$", re.MULTILINE)
PHASE = re.compile(r"(.*) \((collection|setup|call|teardown)\)", re.DOTALL)


def _hash(*parts: bytes | str) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part.encode() if isinstance(part, str) else part)
        made.update(b"\0")
    return made.hexdigest()[:20]


@dataclass
class Verdict:
    """`verdict` is caught, survived, untouched (no test of the room runs the line) or not run; `by` is the test that noticed, `how` what it did."""

    mutation: Mutation
    verdict: str
    by: str = ""
    how: str = ""
    tests: int = 0
    seconds: float = 0.0


@dataclass
class Bench:
    """One overlay of the sources below `root` and the server that runs tests on it. `imported`: what the server imports once for all runs, where that
    is not what the tests of this repository need. `marks`: an expression of pytest's, of the tests that are asked; all where it is empty."""

    root: Path
    source: str = "src"
    python: str = sys.executable
    limit_s: float | None = None
    imported: tuple[str, ...] = ()
    marks: str = ""
    server: subprocess.Popen[str] | None = None
    unreliable: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kept = self.root / ".mutation"
        self.overlay = self.kept / self.source
        self.kept.mkdir(exist_ok=True)
        self.lock = (self.kept / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one run at a time
        self._copy_sources()
        self.state = _hash(*(x for p in sorted(self.overlay.rglob("*.py")) for x in (p.relative_to(self.overlay).as_posix(), p.read_bytes())))
        helpers = [p for p in sorted((self.root / "tests").rglob("*")) if p.is_file() and not p.match("test_*.py") and p.suffix != ".pyc"]
        self.helpers = _hash(*(p.read_bytes() for p in helpers))

    def _copy_sources(self) -> None:
        wanted = {p.relative_to(self.root / self.source) for p in (self.root / self.source).rglob("*") if p.is_file() and p.suffix != ".pyc"}
        for old in [p for p in self.overlay.rglob("*") if p.is_file()]:
            plain = old.parent.parent / f"{old.name.partition('.')[0]}.py" if old.suffix == ".pyc" else old
            if plain.relative_to(self.overlay) not in wanted:
                old.unlink()
        for name in wanted:
            new, old = self.root / self.source / name, self.overlay / name
            if not old.exists() or old.read_bytes() != new.read_bytes():
                old.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(new, old)
        for folder in sorted((p for p in self.overlay.rglob("*") if p.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()
        subprocess.run([self.python, "-m", "compileall", "-q", str(self.overlay)], check=True)

    def test_hash(self, file: str) -> str:
        path = self.root / file
        return _hash(self.helpers, path.read_bytes()) if path.is_file() else ""

    @contextmanager
    def changed(self, texts: dict[Path, str]) -> Iterator[None]:
        """Within: files of the overlay hold these texts."""
        before = {path: (path.read_text(encoding="utf-8"), path.stat()) for path in texts}
        try:
            for path, text in texts.items():
                stat = before[path][1]
                path.write_text(text, encoding="utf-8")
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9 * (1 + int(_hash(text)[:5], 16))))  # no kept bytecode fits
            yield
        finally:
            for path, (text, stat) in before.items():
                path.write_text(text, encoding="utf-8")
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    # Running tests

    def run(
        self, files: Iterable[str], chosen: list[tuple[str, float]] | None, limit_s: float, *options: str, **environment: str
    ) -> tuple[int | None, list[Any]]:
        """Exit status (None: out of time) and journal of a run of the chosen tests, all of `files` where None."""
        journal, asked = self.kept / "journal.jsonl", self.kept / "run.json"
        journal.unlink(missing_ok=True)
        asked.write_text(json.dumps({"journal": str(journal), "chosen": chosen}))
        arguments = ["-q", "-p", "no:randomly", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "mutation.plugin", f"--rootdir={self.root}"]
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the server has imported plugins already
        given = {
            "NUMBA_CACHE_DIR": str(self.kept / "numba"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "MUTATION_RUN": str(asked),
            "PYTHONPATH": f"{self.overlay}{os.pathsep}{TOOLS}", **environment,
        }  # fmt: skip
        if self.server is None or self.server.poll() is not None:
            command = [self.python, "-m", "mutation.server", *self.imported]
            self.server = subprocess.Popen(command, cwd=self.root, env=os.environ | given, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.server.stdin is not None and self.server.stdout is not None
        job = {"arguments": [*arguments, *options, *files], "environment": given, "log": str(self.kept / "log.txt"), "limit_s": limit_s}
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        events = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        return answer["status"], events

    def close(self) -> None:
        if self.server is not None and self.server.stdin is not None:
            self.server.stdin.close()
            self.server.wait()
        self.lock.close()

    # Which test runs which line

    def record(self, drawn: Iterable[Mutation], files: Iterable[str]) -> dict[str, Any]:
        """Test -> `{"s": seconds, "lines": {source: lines run, 0 for the file}}` of every test that passes on the sources as they are.

        Kept by test file: what was recorded for the same modules, lines and test file is not run again. Modules without a drawn line may
        have changed since; a test that came to a line only then is missed, which can only lower the share.
        """
        asked: defaultdict[str, set[int]] = defaultdict(set)
        for mutation in drawn:
            asked[mutation.path.removeprefix(f"{self.source}/")].add(mutation.line)
        wanted = {"lines": {name: sorted(asked[name]) for name in sorted(asked)}}
        texts = [(self.overlay / name).read_bytes() for name in wanted["lines"]]
        store = self.kept / f"lines-{_hash(json.dumps(wanted['lines']), self.marks, *texts)}.json"
        known = json.loads(store.read_text()) if store.exists() else {}
        missing = [file for file in files if known.get(file, {}).get("hash") != self.test_hash(file)]
        if missing:
            known |= self._record(wanted, missing)
            store.write_text(json.dumps(known))
        return {test: entry for file in files for test, entry in known[file]["tests"].items()}

    def _record(self, wanted: dict[str, Any], files: list[str]) -> dict[str, Any]:
        out = self.kept / "recorded"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        texts = {name: (self.overlay / name).read_text(encoding="utf-8") for name in wanted["lines"]}
        with self.changed({self.overlay / name: probed(text, frozenset(wanted["lines"][name]), str(out), name) for name, text in texts.items()}):
            status, events = self.run(files, None, self.limit_s or 4 * 3600, "--timeout=1200", "-m", self.marks, **{RECORDING: "1"})
        if status not in (0, 1):
            raise RuntimeError(f"the tests cannot be recorded: status {status}, see {self.kept / 'log.txt'}")
        taken = {event[1]: event[2] for event in events if event[0] == "passed"}
        failed = [event[1] for event in events if event[0] == "failed"]
        if failed:  # another source by its text: once more as it is
            _, events = self.run(sorted({t.partition("::")[0] for t in failed}), [(t, 300.0) for t in failed], 4 * 3600)
            taken |= {event[1]: event[2] for event in events if event[0] == "passed"}
            for test in sorted(set(failed) - set(taken)):
                print(f"left out, fails on the sources as they are: {test}", flush=True)
        known: dict[str, Any] = {file: {"hash": self.test_hash(file), "tests": {}} for file in files}
        for test, seconds in taken.items():
            known[test.partition("::")[0]]["tests"][test] = {"s": seconds, "lines": {}}
        for tag, name, line in (json.loads(row) for part in out.iterdir() for row in part.read_text().splitlines()):
            match = PHASE.fullmatch(tag)
            test, phase = (match[1], match[2]) if match else (tag, "call")
            tests = known.get(test.partition("::")[0], {"tests": {}})["tests"]
            for entry in tests.values() if phase in ("collection", "setup") else [tests[test]] if test in tests else []:
                lines = entry["lines"].setdefault(f"{self.source}/{name}", [])
                if line not in lines:
                    lines.append(line)
        return known

    def tests_for(self, mutation: Mutation, touched: dict[str, Any]) -> list[str]:
        """Tests that run the line, quickest first; then those of the same test files that call something else of the module.

        The second kind is for results that an earlier test of the file has computed and kept. A line that runs at import, or that is
        compiled, has no probe: every test that calls something of the module counts, of a kernel also those in the folder of its name; where none
        does, those in that folder, or all.
        """
        lines = {test: entry["lines"].get(mutation.path, ()) for test, entry in touched.items()}
        seen = mutation.line in function_lines((self.root / mutation.path).read_text(encoding="utf-8")) and not mutation.compiled
        first = [test for test, ran in lines.items() if (mutation.line if seen else 0) in ran]
        if not seen and (mutation.compiled or not first):  # a kernel that other modules call leaves no mark of its own
            beside = [test for test in touched if Path(test.partition("::")[0]).parent.name == Path(mutation.path).parent.name]
            first = list(dict.fromkeys([*first, *beside])) or list(touched)
        files = {test.partition("::")[0] for test in first}
        second = [test for test, ran in lines.items() if 0 in ran and test.partition("::")[0] in files and test not in set(first)]
        return [t for part in (first, second) for t in sorted(part, key=lambda t: touched[t]["s"]) if t not in self.unreliable]

    # Verdicts

    def known(self, mutation: Mutation, touched: dict[str, Any], ledger: dict[str, Any]) -> Verdict | None:
        """What needs no run: no test is asked, or the ledger has a verdict of test files that have not changed since."""
        tests = self.tests_for(mutation, touched)
        if not tests:
            return Verdict(mutation, "untouched")
        entry = ledger.get(self._entry(mutation), {"passed": {}})
        by = entry.get("by", "")
        if by and by not in self.unreliable and entry["hash"] == self.test_hash(by.partition("::")[0]):
            return Verdict(mutation, "caught", by, entry["how"])
        return None if self._left(tests, entry) else Verdict(mutation, "survived", tests=len(tests))

    def judge(self, mutation: Mutation, touched: dict[str, Any], ledger: dict[str, Any]) -> Verdict:
        """Runs the mutant, or takes what is known."""
        if found := self.known(mutation, touched, ledger):
            return found
        tests = self.tests_for(mutation, touched)
        entry = ledger.setdefault(self._entry(mutation), {"passed": {}})
        start = time.monotonic()
        by, how, passed = self._caught(mutation, self._left(tests, entry), touched)
        entry["passed"] |= {test: self.test_hash(test.partition("::")[0]) for test in passed}
        if by:
            entry |= {"by": by, "how": how, "hash": self.test_hash(by.partition("::")[0])}
        return Verdict(mutation, "caught" if by else "survived", by, how, len(tests), time.monotonic() - start)

    def _entry(self, mutation: Mutation) -> str:
        return _hash(self.state, mutation.path, str(mutation.line), mutation.after)

    def _left(self, tests: Iterable[str], entry: dict[str, Any]) -> list[str]:
        """Tests that have not passed on the mutant as they are now."""
        return [test for test in tests if entry["passed"].get(test) != self.test_hash(test.partition("::")[0])]

    def _caught(self, mutation: Mutation, tests: list[str], touched: dict[str, Any]) -> tuple[str, str, list[str]]:
        """(test that noticed or nothing, how, tests that passed). The quickest few go first: to collect all files takes longer than they do."""
        by, how, passed = self._run_mutant(mutation, tests[:FIRST_TESTS], touched)
        if by or len(tests) <= FIRST_TESTS:
            return by, how, passed
        by, how, more = self._run_mutant(mutation, tests[FIRST_TESTS:], touched)
        return by, how, passed + more

    def _run_mutant(self, mutation: Mutation, tests: list[str], touched: dict[str, Any]) -> tuple[str, str, list[str]]:
        busy = min(MAX_BUSY_FACTOR, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))
        extra = COMPILING_S * busy if mutation.compiled else 0.0
        chosen = [(test, TIMES_LIMIT * touched[test]["s"] + TEST_EXTRA_S * busy + extra) for test in tests]
        limit_s = STARTUP_S * busy + extra + sum(TIMES_LIMIT * touched[test]["s"] + 0.1 for test in tests)
        environment = {}
        if mutation.compiled:
            environment["NUMBA_CACHE_DIR"] = str(self._cache_without(Path(mutation.path).stem))
        path = self.overlay / mutation.path.removeprefix(f"{self.source}/")
        with self.changed({path: mutation.apply(path.read_text(encoding="utf-8"))}):
            status, events = self.run(dict.fromkeys(test.partition("::")[0] for test in tests), chosen, limit_s, "-x", **environment)
        passed = [event[1] for event in events if event[0] == "passed"]
        failed = [event[1] for event in events if event[0] == "failed"]
        if status in (0, 5):
            return "", "", passed
        if failed:
            return failed[0], "failed", passed
        under_way = [event[1] for event in events if event[0] == "start"][-1:]
        return (under_way or tests)[0], "time ran out" if status in (None, UNHEARD) else f"ended with {status}", passed

    def _cache_without(self, changed: str) -> Path:
        """A copy of the cache of compiled kernels, without those of the changed module and of what imports it, at any distance.

        numba looks only at the file that a kernel stands in; what is inlined into it from other files may be older.
        """
        imports = {p.stem: " ".join(IMPORT.findall(p.read_text(encoding="utf-8"))) for p in self.overlay.rglob("*.py")}
        out, waiting = {changed}, [changed]
        while waiting:
            name = re.compile(rf"\b{re.escape(waiting.pop())}\b")
            new = {stem for stem, text in imports.items() if stem not in out and name.search(text)}
            out |= new
            waiting += new
        made = self.kept / "numba-mutant"
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(self.kept / "numba", made, ignore=lambda _, names: [n for n in names if n.partition(".")[0] in out])
        return made

    def confirm(self, verdicts: list[Verdict], touched: dict[str, Any]) -> list[Verdict]:
        """Those caught by a test that now fails on the sources as they are: judged wrongly, and that test is not asked again."""
        tests = sorted({v.by for v in verdicts if v.verdict == "caught" and v.by in touched})
        if not tests:
            return []
        limit_s = STARTUP_S + sum(TIMES_LIMIT * touched[test]["s"] + TEST_EXTRA_S for test in tests)
        chosen = [(test, TIMES_LIMIT * touched[test]["s"] + TEST_EXTRA_S) for test in tests]
        _, events = self.run(dict.fromkeys(test.partition("::")[0] for test in tests), chosen, limit_s)
        self.unreliable |= set(tests) - {event[1] for event in events if event[0] == "passed"}
        return [v for v in verdicts if v.by in self.unreliable]
