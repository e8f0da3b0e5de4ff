"""Bringing a lab up and down: privileges, the holder process, gc."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import FormatError, MeshwrightError, RunError, UnknownName, Unsupported
from ..run.machine import cpu_quota
from .commands import Command, batches
from .state import LabState, known_labs, read_state, remove, runtime_folder
from .wiring import Wiring

__all__ = ["collect", "start_holder", "stop_holder", "tool_path"]

MAX_START_S = 300.0  # until the holder has built a lab; a folder younger than this may still be building
MAX_STOP_S = 20.0  # until a holder that was told to end has ended; then it is killed
_SYSTEM_PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin")


def tool_path() -> str:
    """A search path on which `ip` and `tc` are. Raises: Unsupported when they are nowhere."""
    path = os.pathsep.join(dict.fromkeys([*os.environ.get("PATH", "").split(os.pathsep), *_SYSTEM_PATHS]))
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=path) is None]
    if sys.platform != "linux" or missing:
        what = " and ".join(repr(x) for x in missing) if missing else "Linux"
        raise Unsupported(f"a lab needs {what}", hint="install the package iproute2 (Debian, Ubuntu) or iproute (Fedora)", data={"missing": missing})
    return path


def start_holder(
    folder: Path, wiring: Wiring, commands: Sequence[Command], *, owner: int, helpers: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """Start the process that is the lab and wait until its network stands. Returns its pid and whether it is in a user namespace.

    Raises: Unsupported when we may not make namespaces or the kernel lacks something; RunError.
    """
    path = tool_path()
    (folder / "hosts").write_text(_hosts(wiring))
    setup = {
        "owner": owner,
        "batches": list(batches(commands)),
        "namespaces": list(wiring.namespaces),
        "hostnames": [wiring.hostname(a) for a in range(len(wiring.namespaces))],
        "helpers": [list(argv) for argv in helpers],
    }
    kept = ("LANG", "LC_", "PYTHON", "VIRTUAL_ENV", "NUMBA_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k.startswith(kept)} | {"PATH": path}
    if "PYTHONPATH" in environment:  # relative to our folder, which is not the holder's
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(x).absolute()) for x in environment["PYTHONPATH"].split(os.pathsep))
    if "NUMBA_CACHE_DIR" in environment:
        environment["NUMBA_CACHE_DIR"] = str(Path(environment["NUMBA_CACHE_DIR"]).absolute())
    command = [sys.executable, "-m", "meshwright.lab.holder", str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd="/", start_new_session=True
    )  # fmt: skip
    try:
        output, errors = process.communicate(json.dumps(setup).encode(), timeout=MAX_START_S)
    except BaseException:
        process.kill()  # its child, the lab, finds that nobody listens and ends
        process.communicate()
        raise
    try:
        answer = json.loads(output)
    except ValueError:
        last = errors.decode(errors="replace").strip().splitlines()
        raise RunError("the lab's process could not start", hint=last[-1][:300] if last else "") from None
    if "error" in answer:
        raise _problem(answer, folder)
    return dict(answer)


def _hosts(wiring: Wiring) -> str:
    try:
        text = Path("/etc/hosts").read_text(errors="replace")
    except OSError:
        text = "127.0.0.1 localhost\n"
    named = [(wiring.address(device), wiring.hostname(device)) for device in range(len(wiring.fabric.devices))]
    lines = [f"{prefix}{address} {name}" for prefix in ("", "::ffff:") for address, name in named]
    return text.rstrip("\n") + "\n" + "\n".join(lines) + "\n"


def _problem(answer: dict[str, Any], folder: Path) -> MeshwrightError:
    if answer["error"] == "privileges":
        return Unsupported(
            f"namespaces may not be made here ({answer['message']}; in a user namespace: {answer['user_namespace']})",
            hint="run as root or with CAP_SYS_ADMIN, or allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone)",
            data={"missing": "CAP_SYS_ADMIN", "root": answer["message"], "user_namespace": answer["user_namespace"]},
        )
    if answer["error"] == "command":
        unknown = any(x in answer["message"] for x in ("Unknown device type", "qdisc kind is unknown", "not supported"))
        kind = Unsupported if unknown else RunError
        hint = "the running kernel lacks it: sch_tbf, veth and bridge are needed" if unknown else "`lab up --dry-run` prints all commands"
        return kind(f"{answer['message']}", where=answer["command"], hint=hint)
    log = (folder / "holder.log").read_text(errors="replace").strip().splitlines() if (folder / "holder.log").exists() else []
    return RunError(f"the lab could not be built: {answer['message']}", hint=log[-1][:300] if log else "")


def stop_holder(state: LabState) -> None:
    """Kill the lab's first process, which makes the kernel end all others and free the namespaces. Raises: RunError."""
    if not state.alive:
        return
    try:
        pidfd = os.pidfd_open(state.holder)
    except ProcessLookupError:
        return
    try:
        if not state.alive:  # the number was given to another process between the look and the open
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], MAX_STOP_S)[0]:
            raise RunError(f"process {state.holder} of the lab would not end", where=state.name, hint="a process of it may be stuck in the kernel")
    except ProcessLookupError:
        return
    except PermissionError:
        raise RunError("the lab belongs to somebody else", where=state.name, hint="stop it as the user who started it") from None
    finally:
        os.close(pidfd)


def collect() -> list[str]:
    """Remove what dead labs left: folders without a holder, holders whose owner is gone, CPU groups. Returns what was removed.

    A live lab is never touched, whoever started it.
    """
    removed = []
    for folder in runtime_folder().glob(".*.*"):  # a removal that was killed half-way
        shutil.rmtree(folder, ignore_errors=True)
    for folder in known_labs():
        try:
            state = read_state(folder)
        except (UnknownName, FormatError):
            if time.time() - folder.stat().st_mtime < MAX_START_S:
                continue  # somebody may be building it right now
            remove(folder)
            removed.append(folder.name)
            continue
        owner_gone = bool(state.owner) and cpu_quota.process_start_ticks(state.owner) != state.owner_start
        building = not state.holder and not owner_gone
        if (state.alive and not owner_gone) or building:
            continue
        stop_holder(state)
        remove(folder)
        removed.append(folder.name)
    return removed + cpu_quota.gc()
