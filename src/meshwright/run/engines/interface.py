"""What every engine can be asked. `session.Session` is its only caller: it writes the journal, repeats what was lost, and tells nobody twice."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

from ...cluster.allocation import Given
from ...cluster.placed import Placed
from ...cluster.servers import Servers
from ...errors import EngineAway, RunError, UsageError
from ...io.cluster.job_folder import GRACE_S

__all__ = ["UNKNOWN", "Commands", "Engine", "Seen", "Work"]

UNKNOWN = "?"  # what the name of a GPU begins with where an engine's books say how many, and not which
LEAVE = "leave-{}"  # file in the folder of a job, by its attempt: the launcher that sees it asks its processes to end
MAX_CALL_S = 60.0  # of one command of an engine; a busy controller of Slurm was seen to take 4 s

State = Literal["held", "waiting", "running", "done", "failed", "gone"]


class Seen(NamedTuple):
    """What an engine says of a job. `gone`: it knows no such job. `given`: what the job has there now or had, by the engine's own books; where an
    engine has no books of something (cores, memory) the number is 0. Times, seconds since 1970, where no launcher's notes can be read; else 0."""

    state: State
    given: tuple[Given, ...] = ()
    code: int = 0
    why: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """`key`: a name of this attempt that no other run has; `ids`: the engine's names of its objects, once it holds them; `node`: the launcher's
    path; `grace_s`: between asking its processes to end and killing them; `fresh`: the engine was never told of it."""

    placed: Placed
    folder: Path
    key: str
    command: tuple[str, ...]
    node: Path
    plan: str = ""
    ids: tuple[str, ...] = ()
    grace_s: float = GRACE_S
    fresh: bool = False

    def ask(self) -> None:
        """Its launchers are told by a file, which none can miss: one that starts later starts nothing."""
        (self.folder / LEAVE.format(self.placed.attempt)).touch()


class Engine(Protocol):
    """`picks_gpus`: the numbers of GPUs on a server are as decided; without it the engine picks them. `resizes`: cores and memory of what runs
    change. `launches`: the launcher sets the GPUs that a job sees. `notes`: what is not as it should be, e.g. limits that cannot be set here. `said`:
    commands of a dry run."""

    name: ClassVar[str]
    picks_gpus: ClassVar[bool]
    resizes: ClassVar[bool]
    launches: ClassVar[bool]
    notes: list[str]
    said: list[str]

    def discover(self) -> Servers:
        """Servers as the engine has them. Raises: EngineAway, UsageError."""
        ...

    def addresses(self, servers: Sequence[str]) -> Mapping[str, str]:
        """Under which rank 0 is reached from the others."""
        ...

    def remember(self, ids: Sequence[str]) -> None:
        """Names of objects that the journal of this run holds."""
        ...

    def hold(self, work: Work) -> tuple[str, ...]:
        """Make the engine's objects, none of which runs yet; if they are there already, just name them. Raises: EngineAway, RunError."""
        ...

    def start(self, works: Sequence[Work]) -> None:
        """Let them go, first one first. Raises: EngineAway, RunError."""
        ...

    def look(self, works: Sequence[Work]) -> list[Seen]:
        """Raises: EngineAway."""
        ...

    def down(self) -> set[str]:
        """Servers that take no jobs now. Raises: EngineAway."""
        ...

    def cancel(self, work: Work) -> None:
        """End it now, and take its objects away."""
        ...

    def leave(self, work: Work) -> None:
        """Ask its command to end, with time to save what it needs; `look` says when it has gone, or that it had ended before. Asked again, nothing
        changes. Raises: EngineAway, RunError."""
        ...

    def suspend(self, work: Work) -> None: ...

    def resume(self, work: Work) -> None: ...

    def resize(self, work: Work, given: tuple[Given, ...]) -> None:
        """Raises: Unsupported where the engine cannot."""
        ...

    def close(self) -> None: ...


@dataclass
class Commands:
    """Runs an engine's commands. `dry`: they are written into `said` and not run. `away`: texts in their errors that mean: ask again later."""

    dry: bool = False
    away: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    said: list[str] = field(default_factory=list)

    def require(self, program: str, *, engine: str, hint: str) -> None:
        """Raises: UsageError where the program is not installed."""
        if not self.dry and shutil.which(program, path=None if self.environment is None else self.environment.get("PATH")) is None:
            raise UsageError(f"there is no {engine} here: the program {program!r} is not installed", where="--engine", hint=hint)

    def call(self, words: Sequence[str], text: str = "", *, hint: str = "") -> str:
        """Its output. Raises: EngineAway, RunError with what it says and the hint."""
        if self.dry:
            self.said.append(shlex.join(words) + (f" <<'END'\n{text.rstrip()}\nEND" if text else ""))
            return ""
        try:
            done = subprocess.run(
                list(words), input=text, capture_output=True, text=True, timeout=MAX_CALL_S, check=False, env=self.environment, errors="replace"
            )
        except subprocess.TimeoutExpired:
            raise EngineAway(f"no answer within {MAX_CALL_S:.0f} s", where=words[0]) from None
        except OSError as error:
            raise RunError(f"cannot run it: {error.strerror}", where=words[0], hint="install the engine's programs") from error
        if done.returncode < 0:  # scontrol of 22.05 was seen to end with signal 11 while its controller was killed
            raise EngineAway(f"ended by signal {-done.returncode}", where=words[0])
        if done.returncode or any(x in done.stderr for x in self.away):
            told = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}")[-2000:]
            if any(x in told for x in self.away):
                raise EngineAway(told.splitlines()[-1], where=words[0], hint=hint)
            raise RunError(told, where=shlex.join(words)[:200], hint=hint)
        return done.stdout
