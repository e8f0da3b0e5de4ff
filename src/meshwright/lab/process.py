"""A process inside a lab, seen from outside: like `subprocess.Popen`, but the lab's holder started it and reaps it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

__all__ = ["LabProcess"]


class LabProcess:
    """`pid` is its number outside the lab. `returncode` is None while it runs, negative for a signal.

    A process whose lab was torn down counts as killed (-9): the kernel ends it with the lab.
    """

    def __init__(self, args: Sequence[str], device: int | None, pidfd: int, exit_pipe: int, stdout: BinaryIO | None, stderr: BinaryIO | None) -> None:
        self.args, self.device = list(args), device
        self.returncode: int | None = None
        self.stdout, self.stderr = stdout, stderr
        self._pidfd, self._exit_pipe = pidfd, exit_pipe
        self.pid = _outer_pid(pidfd)

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._look(left)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """All of its output, after it has ended. Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        parts: dict[BinaryIO, list[bytes]] = {stream: [] for stream in (self.stdout, self.stderr) if stream is not None}
        open_streams = set(parts)
        while open_streams:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select(list(open_streams), [], [], left)[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for stream in ready:
                data = os.read(stream.fileno(), 1 << 16)
                parts[stream].append(data)
                if not data:
                    open_streams.discard(stream)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        out, err = (b"".join(parts.get(stream, ())) if stream is not None else b"" for stream in (self.stdout, self.stderr))
        return out, err

    def send_signal(self, number: int) -> None:
        """Does nothing once it has ended; never hits another process that got the same number."""
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def fileno(self) -> int:
        """Becomes readable when the process has ended."""
        return self._exit_pipe

    def close(self) -> None:
        """Give back the descriptors; the process is not touched."""
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        for fd in (self._pidfd, self._exit_pipe):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._exit_pipe = -1

    def __del__(self) -> None:
        if hasattr(self, "_exit_pipe"):
            self.close()

    def __enter__(self) -> LabProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait(10)
        self.close()

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._exit_pipe >= 0 and select.select([self._exit_pipe], [], [], timeout)[0]:
            said = os.read(self._exit_pipe, 32)
            self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode


def _outer_pid(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1
