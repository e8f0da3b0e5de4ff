"""The client's side of a lab's holder: one connection, requests that are answered in turn."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import RunError, UsageError
from .process import LabProcess
from .wire_format import receive, send

__all__ = ["Control"]

MAX_REQUEST_S = 150.0  # that the holder may take to answer one request


class Control:
    """Requests to one holder; may be used from several threads. Raises RunError when the lab is gone."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._lock = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock.settimeout(MAX_REQUEST_S)
        try:
            handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                self._sock.connect(f"/proc/self/fd/{handle}/control.sock")  # the path itself may be too long for a socket
            finally:
                os.close(handle)
        except OSError as error:
            self._sock.close()
            raise self._gone() from error

    def _gone(self) -> RunError:
        return RunError(f"the lab {self.name!r} is gone", hint="`meshwright lab gc` removes what is left; `meshwright lab up` builds it again",
                        data={"lab": self.name})  # fmt: skip

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        """Raises: RunError."""
        with self._lock:
            try:
                send(self._sock, request, fds)
                heard = receive(self._sock)
            except (OSError, ValueError) as error:
                raise self._gone() from error
        if heard is None:
            raise self._gone()
        return heard

    def do(self, batches: Sequence[tuple[str, str, Sequence[Sequence[str]]]]) -> None:
        """Run commands inside the lab. Raises: RunError naming the command that failed."""
        problem = self.ask({"do": "batches", "batches": list(batches)})[0]["problem"]
        if problem is not None:
            raise RunError(problem["message"], where=problem["command"], data={"lab": self.name})

    def read(self, commands: Sequence[Sequence[str]]) -> list[str]:
        """Output of commands run inside the lab. Raises: RunError."""
        answer = self.ask({"do": "read", "commands": [list(c) for c in commands]})[0]
        if answer["problem"] is not None:
            raise RunError(answer["problem"]["message"], where=answer["problem"]["command"], data={"lab": self.name})
        return list(answer["outputs"])

    def free_port(self, device: int) -> int:
        return int(self.ask({"do": "port", "actor": device})[0]["port"])

    def start(
        self, run: str, actor: int | None, argv: Sequence[str], environment: Mapping[str, str], *, folder: Path | None = None,
        groups: Sequence[Path] = (), stdin: int | None = None, stdout: int | BinaryIO | None = None, stderr: int | BinaryIO | None = None,
    ) -> LabProcess:  # fmt: skip
        """Start a process in an actor's namespace (None: in the lab's own).

        Streams as in `subprocess.Popen`: None is ours, PIPE (-1) a pipe, STDOUT (-2) the same as stdout, DEVNULL (-3) nothing.
        Raises: UsageError when the program cannot be started; RunError when the lab is gone.
        """
        opened: list[int] = []
        pipes: list[BinaryIO | None] = []
        try:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            opened.append(null)
            sent = [null if stdin is None else stdin]
            for number, stream in ((1, stdout), (2, stderr)):
                reads: BinaryIO | None = None
                if stream is None:
                    sent.append(number)
                elif stream == -1:
                    pipe, write = os.pipe2(os.O_CLOEXEC)
                    opened.append(write)
                    sent.append(write)
                    reads = os.fdopen(pipe, "rb", buffering=0)
                elif stream == -2:
                    sent.append(sent[1])
                elif stream == -3:
                    sent.append(null)
                else:
                    sent.append(stream if isinstance(stream, int) else stream.fileno())
                pipes.append(reads)
            exits, tells = os.pipe2(os.O_CLOEXEC)
            opened.append(tells)
            answer, fds = self.ask(
                {"do": "start", "run": run, "actor": actor, "argv": [os.fspath(x) for x in argv], "environment": dict(environment),
                 "folder": str(folder or Path.cwd()), "umask": _umask(), "groups": [str(x) for x in groups]},
                [*sent, tells],
            )  # fmt: skip
        finally:
            for fd in opened:
                os.close(fd)
        if "message" in answer:
            os.close(exits)
            for reads in pipes:
                if reads is not None:
                    reads.close()
            raise UsageError(f"cannot start {argv[0]!r}: {answer['message']}", hint="name a program that is there, with its path if need be")
        return LabProcess(argv, actor, fds[0], exits, pipes[0], pipes[1])

    def end(self, run: str) -> None:
        """Kill every process of a run. Raises: RunError when some are left."""
        left = self.ask({"do": "end", "run": run})[0]["left"]
        if left:
            hint = f"`meshwright lab down {self.name}` ends the lab with them"
            raise RunError(f"{left} processes of the run would not end", where=self.name, hint=hint)

    def close(self) -> None:
        """Ends the runs that were started through this connection."""
        self._sock.close()


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
