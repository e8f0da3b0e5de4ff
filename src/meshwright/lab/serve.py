"""What the first process of a lab does after building it: start processes in namespaces, end them, run `ip` and `tc`, reap.

A run is the processes started under one run id. They carry it in their environment (and their children inherit it), so that all of
a run can be found and ended, whatever they forked. A run ends at the latest when the connection that started it closes, which is
how a killed `lab run` takes its processes along.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from . import namespaces as ns
from .batches import HERE, run_batches
from .wire_format import receive, send

__all__ = ["RUN_VARIABLE", "Server"]

RUN_VARIABLE = "MESHWRIGHT_LAB_RUN"
MAX_CLIENT_SILENCE_S = 10.0  # a client that stops within a message is dropped
MAX_END_S = 5.0  # until the killed processes of a run must be gone; then those left are counted


class Server:
    """Serves until the owner ends or somebody says `stop`."""

    def __init__(self, folder: Path, namespace_names: list[str], hostnames: list[str], owner: int) -> None:
        self.hostnames, self.owner = hostnames, owner
        self.nets = [os.open(HERE / name, os.O_RDONLY | os.O_CLOEXEC) if name else -1 for name in namespace_names]
        self.clients: dict[socket.socket, set[str]] = {}  # connection -> the runs that live as long as it
        self.exits: dict[int, int] = {}  # our child -> pipe that is told its exit status
        self.sessions: dict[str, set[int]] = {}  # run -> sessions (numbers of the processes that lead them)
        self.running, self.kept = True, False
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = Path.cwd()
        os.chdir(folder)  # a socket's path may have at most 107 bytes
        try:
            self.listener.bind("control.sock")
        finally:
            os.chdir(before)
        self.listener.listen(16)

    def serve(self) -> None:
        wake, noise = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(noise, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(self.listener, select.POLLIN)
        if self.owner >= 0:
            poll.register(self.owner, select.POLLIN)
        while self.running:
            self.reap()
            for fd, _ in poll.poll():
                if fd == wake:
                    os.read(wake, 4096)
                elif fd == self.listener.fileno():
                    client = self.listener.accept()[0]
                    client.settimeout(MAX_CLIENT_SILENCE_S)
                    self.clients[client] = set()
                    poll.register(client, select.POLLIN)
                elif fd == self.owner:
                    if not self.kept:
                        return
                    poll.unregister(fd)
                else:
                    client = next(c for c in self.clients if c.fileno() == fd)
                    if not self._hear(client):
                        poll.unregister(client)
                        self._forget(client)

    # ---- requests --------------------------------------------------------------------------------------------------
    def _hear(self, client: socket.socket) -> bool:
        """Answer one request; False when the client is gone."""
        fds: list[int] = []
        try:
            heard = receive(client)
            if heard is None:
                return False
            request, fds = heard
            answer, back = self._answer(client, request, fds)
            send(client, answer, back)
            for fd in back:
                os.close(fd)
            return True
        except (OSError, ValueError):
            return False
        finally:
            for fd in fds:
                try:
                    os.close(fd)
                except OSError:
                    pass

    def _answer(self, client: socket.socket, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        kind = request["do"]
        if kind == "start":
            return self._start(client, request, fds)
        if kind == "end":
            return {"left": self.end(request["run"])}, []
        if kind == "batches":
            return {"problem": run_batches(request["batches"])}, []
        if kind == "read":
            return self._read(request["commands"]), []
        if kind == "port":
            return {"port": self._free_port(request["actor"])}, []
        if kind == "keep":  # the lab outlives the process that built it
            self.kept = True
            return {}, []
        if kind == "stop":
            self.running = False
            return {}, []
        return {"pid": os.getpid()}, []

    def _forget(self, client: socket.socket) -> None:
        for run in self.clients.pop(client):
            self.end(run)
        client.close()

    def _read(self, commands: list[list[str]]) -> dict[str, Any]:
        outputs = []
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode:
                return {"problem": {"command": " ".join(command), "message": done.stderr.strip()}}
            outputs.append(done.stdout)
        return {"problem": None, "outputs": outputs}

    def _free_port(self, actor: int) -> int:
        # Entered for a moment: this process has one thread, so nothing else of it runs in there.
        own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        ns.setns(self.nets[actor], ns.NEWNET)
        try:
            with socket.socket() as sock:
                sock.bind(("0.0.0.0", 0))
                return int(sock.getsockname()[1])
        finally:
            ns.setns(own, ns.NEWNET)
            os.close(own)

    # ---- processes -------------------------------------------------------------------------------------------------
    def _start(self, client: socket.socket, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Descriptors: stdin, stdout, stderr, and the pipe that gets the exit status. The answer carries a pidfd."""
        said, says = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                self._become(request, fds)
            except BaseException as error:
                os.write(says, str(error.strerror if isinstance(error, OSError) else error).encode())
            finally:
                os._exit(127)
        os.close(says)
        with os.fdopen(said, "rb") as words:
            problem = words.read().decode()
        # The pipe is close-on-exec: it ends without a word when the program runs, and with one when it could not be started.
        if problem:
            os.waitpid(pid, 0)
            return {"message": problem}, []
        self.exits[pid] = os.dup(fds[3])
        self.sessions.setdefault(request["run"], set()).add(pid)
        self.clients[client].add(request["run"])
        return {"pid": pid}, [os.pidfd_open(pid)]

    def _become(self, request: dict[str, Any], fds: list[int]) -> None:
        """In the new process: take its place and turn into the program."""
        # A session of its own, so that the keyboard's interrupts do not reach it and its members are found by it.
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for path in request["groups"]:
            Path(path).write_text("0")
        if request["actor"] is not None:
            ns.setns(self.nets[request["actor"]], ns.NEWNET)
            ns.unshare(ns.NEWUTS)
            ns.set_hostname(self.hostnames[request["actor"]])
        os.chdir(request["folder"])
        os.umask(request["umask"])
        for target, fd in enumerate(fds[:3]):
            os.dup2(fd, target)  # what is duplicated survives exec, everything else of ours is close-on-exec
        os.execvpe(request["argv"][0], request["argv"], request["environment"] | {RUN_VARIABLE: request["run"]})

    def start_helpers(self, helpers: list[list[str]]) -> None:
        """Processes that belong to the lab itself, such as relays. They end with it. Raises: ValueError when one does not say `ready`."""
        for argv in helpers:
            said, says = os.pipe2(os.O_CLOEXEC)
            if os.fork() == 0:
                try:
                    os.dup2(says, 1)
                    os.execvp(argv[0], argv)
                finally:
                    os._exit(127)
            os.close(says)
            with os.fdopen(said, "rb") as words:
                if words.readline() != b"ready\n":
                    raise ValueError(f"{' '.join(argv[1:3])} could not start")

    def reap(self) -> None:
        """Collect ended children, and orphans, which are ours as process 1, and tell those who asked."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (pipe := self.exits.pop(pid, None)) is not None:
                try:
                    os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
                except OSError:  # nobody listens any more
                    pass
                os.close(pipe)

    def end(self, run: str) -> int:
        """Kill all processes of a run; how many were still there after five seconds."""
        deadline = time.monotonic() + MAX_END_S
        while True:
            found = self._members(run)
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.reap()
            if not found or time.monotonic() > deadline:
                self.sessions.pop(run, None)
                return len(found)
            time.sleep(0.002)

    def _members(self, run: str) -> list[int]:
        mark = f"{RUN_VARIABLE}={run}".encode()
        sessions = self.sessions.get(run, set())
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or entry.name == "1":
                continue
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if fields[0] in "ZX":
                    continue
                if int(fields[3]) in sessions or mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended while we looked, or may not be looked at
                continue
        return found
