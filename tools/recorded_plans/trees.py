"""A tree of sources that makes plans: folders that commands run in, and the processes that run them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from plan_set import HERE, Case, Command

INPUTS = HERE / "inputs"
COSTS = INPUTS / "step-costs.json"  # of operators: times that a step's plan rests on, measured once
LINKED = ("examples", "benchmarks", "tests")
PRICED = {("memory", "plan"), ("train", "plan"), ("train", "replan")}  # the commands that may ask for measured operators
PRINTED = "printed.json"
INFEASIBLE = 3  # the exit code of an answer: nothing fits, and what would


class RunError(Exception):
    """A command of the set does not run."""


@dataclass(frozen=True)
class Made:
    """What a case made: a plan's file, or what was said where nothing fits."""

    path: Path
    seconds: float
    measured: int = 0  # operators that step-costs.json does not have

    def data(self) -> bytes:
        return self.path.read_bytes()


@dataclass
class Tree:
    """`root`: a checkout; `folder`: an empty one that all its files go into."""

    root: Path
    folder: Path
    locks: dict[tuple[Command, ...], threading.Lock] = field(default_factory=dict)
    made: dict[tuple[Command, ...], Path] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[subprocess.Popen[str]] = field(default_factory=list)
    given: dict[Path, set[str]] = field(default_factory=dict)  # operators whose costs a folder was given
    environment_lock: threading.Lock = field(default_factory=threading.Lock)
    environment: dict[str, str] = field(default_factory=dict)  # of measured operators, as this tree writes it

    def make(self, case: Case, *, again: bool = False) -> Made:
        """Raises: RunError."""
        if again:
            del self.made[case.chain]
        folder, seconds = self._run(case.chain)
        last = case.chain[-1]
        path = folder / "error.txt"
        if not path.exists():
            path = folder / (last.out or PRINTED)
        return Made(path, seconds, self._measured(folder) if self._priced(last) else 0)

    def _run(self, chain: tuple[Command, ...]) -> tuple[Path, float]:
        """The folder after a chain of commands; what a shorter chain wrote is made once and copied."""
        with self.lock:
            lock = self.locks.setdefault(chain, threading.Lock())
            number = list(self.locks).index(chain)
        with lock:
            if chain in self.made:
                return self.made[chain], 0.0
            folder, before = self.folder / str(number), 0.0
            shutil.rmtree(folder, ignore_errors=True)  # of the time before
            if len(chain) > 1:
                start, before = self._run(chain[:-1])
                shutil.copytree(start, folder, symlinks=True)
                if (folder / "error.txt").exists():
                    raise RunError(f"{chain[-2]}: {(folder / 'error.txt').read_text()}")
            else:
                self._prepare(folder)
            if self._priced(chain[-1]):
                self._give_costs(folder)
            seconds = self._call(chain[-1], folder)
            self.made[chain] = folder
            return folder, before + seconds

    def _prepare(self, folder: Path) -> None:
        for name in ("docs", "quickstart-results"):
            (folder / name).mkdir(parents=True)
        for name in LINKED:
            if (self.root / name).exists():
                (folder / name).symlink_to(self.root / name)
        for path in INPUTS.glob("*.*"):
            (folder / path.name).symlink_to(path)

    def _call(self, command: Command, folder: Path) -> float:
        with self._server() as server:
            job = {
                "words": command.words, "folder": str(folder), "out": str(folder / PRINTED), "err": str(folder / "said.txt"), "torch": command.torch,
                "environment": {"XDG_CACHE_HOME": str(folder / "cache")},
            }  # fmt: skip
            assert server.stdin is not None and server.stdout is not None
            print(json.dumps(job), file=server.stdin, flush=True)
            line = server.stdout.readline()
            if not line:
                raise RunError(f"the process that runs commands ended at: {command}")
            answer = json.loads(line)
        said = (folder / "said.txt").read_text(encoding="utf-8", errors="replace")
        if answer["exit"] == INFEASIBLE:
            (folder / "error.txt").write_text(said, encoding="utf-8")
        elif answer["exit"] != 0:
            raise RunError(f"exit {answer['exit']}: {command}\n{said.strip()[-2000:]}")
        elif command.out and not (folder / command.out).exists():
            raise RunError(f"did not write {command.out}: {command}")
        return float(answer["seconds"])

    @contextmanager
    def _server(self) -> Iterator[subprocess.Popen[str]]:
        with self.lock:
            server = self.idle.pop() if self.idle else None
        if server is None:
            server = self._start()
        yield server
        with self.lock:
            self.idle.append(server)

    def _start(self) -> subprocess.Popen[str]:
        changed = {"PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": "0", "COLUMNS": "80"}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | changed
        environment["MESHWRIGHT_PROGRESS"] = "0"  # what is said of the progress depends on the clock
        environment.setdefault("NUMBA_CACHE_DIR", str(Path(sys.prefix) / "numba-cache"))
        words = [sys.executable, str(HERE / "server.py")]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=self.folder)

    def close(self) -> None:
        for server in self.idle:
            assert server.stdin is not None and server.stdout is not None
            server.stdin.close()
            server.wait()
            server.stdout.close()
        self.idle = []

    # Costs of operators are measured once, by whoever records, and given to every command as its user's cache: plans do not rest on this machine.

    @staticmethod
    def _priced(command: Command) -> bool:
        return command.verb in PRICED

    def _costs_file(self, folder: Path) -> Path:
        return folder / "cache" / "meshwright" / "step-costs.json"

    def _give_costs(self, folder: Path) -> None:
        file = self._costs_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        document = json.loads(COSTS.read_text()) if COSTS.exists() else {"costs": {}}
        self.given[folder] = set(document["costs"])
        file.write_text(json.dumps({**document, "environment": self._environment()}))

    def _measured(self, folder: Path) -> int:
        """How many operators it did not find among what it was given."""
        return len(json.loads(self._costs_file(folder).read_text())["costs"].keys() - self.given[folder])

    def keep_costs(self, folder: Path) -> None:
        """Into step-costs.json, beside what it has, without what it says of this machine."""
        document = json.loads(self._costs_file(folder).read_text())
        known = json.loads(COSTS.read_text())["costs"] if COSTS.exists() else {}
        costs = dict(sorted((document["costs"] | known).items()))
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(cost)}" for key, cost in costs.items())
        COSTS.write_text(f'{{"schema": {json.dumps(document["schema"])}, "version": {document["version"]}, "costs": {{\n{lines}\n}}}}\n')

    def _environment(self) -> dict[str, str]:
        """What this tree writes of the machine beside measured costs, found by having it measure a model of one layer."""
        with self.environment_lock:
            if not self.environment:
                folder = self.folder / "environment"
                self._prepare(folder)
                words = ("memory", "plan", "--model", "one_layer.py:net", "--strategy", "keep", "--costs", "costs.json", "--out", "out.json")
                self._call(Command(words, "out.json"), folder)
                self.environment = json.loads((folder / "costs.json").read_text())["environment"]
        return self.environment


def checkout(path: str) -> Path:
    """The root of a checkout, given as itself or as its src."""
    found = Path(path).resolve()
    found = found.parent if found.name == "src" and (found / "meshwright").is_dir() else found
    if not (found / "src" / "meshwright").is_dir():
        raise RunError(f"{path}: no checkout of meshwright (no src/meshwright)")
    return found

