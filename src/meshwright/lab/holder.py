"""The process that is a lab: `python -m meshwright.lab.holder FOLDER`, setup as JSON on stdin, one JSON line back on stdout.

It makes new mount, network, PID and host name namespaces (and, without privileges, a user namespace around them), forks, and the
child - process 1 of the lab - builds the network and serves `FOLDER/control.sock`. Every process of the lab is its descendant in its
PID namespace, and no network namespace has a name outside its mount namespace. So whatever ends it, kill -9 included, the kernel
ends all of them and frees every namespace; nothing can stay behind but files, which `lab gc` removes.

It ends when told, or when its owner (if it has one) ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from . import namespaces as ns
from .batches import HERE, run_batches
from .serve import Server

__all__ = ["main"]


def main() -> None:
    folder = Path(sys.argv[1])
    setup = json.loads(sys.stdin.read())
    owner = os.pidfd_open(setup["owner"]) if setup["owner"] else -1
    user_namespace = False
    flags = ns.NEWNS | ns.NEWNET | ns.NEWPID | ns.NEWUTS
    try:
        ns.unshare(flags)
    except OSError as first:
        try:
            ns.become_root_of_user_namespace()
            ns.unshare(flags)
            user_namespace = True
        except OSError as second:
            _answer({"error": "privileges", "message": str(first), "user_namespace": str(second)})
            return
    ready, done = os.pipe()
    # NEWPID holds for children only: this one is process 1 of the lab, and when it ends the kernel ends all others in there.
    child = os.fork()
    if child == 0:
        os.close(ready)
        _first_process(folder, setup, owner, done)
    os.close(done)
    # Ends when the child has closed its end: by an answer, or by dying without one.
    said = os.fdopen(ready, "rb").read()
    if not said:
        said = json.dumps({"error": "died", "message": "the first process of the lab ended"}).encode()
    answer = json.loads(said)
    if "error" in answer:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    _answer(answer | {"pid": child, "user_namespace": user_namespace} if "error" not in answer else answer)


def _answer(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _first_process(folder: Path, setup: dict[str, Any], owner: int, done: int) -> None:
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(folder / "holder.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        _mounts(folder)
        problem = run_batches(setup["batches"])
        if problem is not None:
            os.write(done, json.dumps({"error": "command"} | problem).encode())
            os._exit(1)
        server = Server(folder, setup["namespaces"], setup["hostnames"], owner)
        server.start_helpers(setup["helpers"])
        os.write(done, json.dumps({"control": "control.sock"}).encode())
        os.close(done)
    except BaseException as error:
        try:
            kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
            os.write(done, json.dumps({"error": "setup", "message": f"{kind}{error}"}).encode())
        finally:
            os._exit(1)
    try:
        server.serve()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _mounts(folder: Path) -> None:
    """Our own view of /proc, of the names of network namespaces, and of /etc/hosts."""
    # Nothing that is mounted from here on is seen outside; what is mounted outside still comes in.
    ns.mount("none", "/", "", ns.MS_REC | ns.MS_SLAVE)
    _make_place(folder)
    ns.mount("tmpfs", str(HERE), "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=755")
    ns.mount("proc", "/proc", "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
    if Path("/etc/hosts").exists():
        ns.bind(str(folder / "hosts"), "/etc/hosts")


def _make_place(folder: Path) -> None:
    """The folder in which `ip` looks for names. Where we may not make it, /run is an empty one of our own, with the lab's folder in it."""
    try:
        HERE.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        # Held open, as the mount below may hide it: a bind from /proc/self/fd brings it back.
        ours = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        ns.mount("tmpfs", "/run", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=755")
        HERE.mkdir(parents=True)
        if not folder.exists():
            folder.mkdir(parents=True)
            ns.bind(f"/proc/self/fd/{ours}", str(folder))
        os.close(ours)


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


if __name__ == "__main__":
    main()
