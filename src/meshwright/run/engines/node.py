"""Starts the processes of one job on one server, and writes down what it found: `python node.py FOLDER ATTEMPT [SERVER]`. Standard library only,
for it travels with the job; Python 3.8.

FOLDER holds `ranks-ATTEMPT.json`. Without SERVER the engine's own name of the node counts (SLURMD_NODENAME, MESHWRIGHT_NODE). It ends with
75 where an earlier attempt still runs, 76 where this attempt was started here before, 77 where the job was not meant to be, 78 where it was asked to
leave before it began (`leave-ATTEMPT` lies in FOLDER); nothing is started then.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TYPE_CHECKING = False  # importing typing takes a tenth of the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TextIO

EARLIER, AGAIN, ELSEWHERE, LEAVING = 75, 76, 77, 78
MAX_PORT_S = 60.0  # until rank 0 has said its port
MAX_TERM_S = 5.0  # between asking and killing the others when one has failed
LOOK_S = 0.5  # between looks at whether it is asked to leave
POLL_S = 0.02


def write(path: Path, document: Any) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def locked(folder: Path, attempt: int) -> TextIO | None:
    """A lock held as long as this process lives; None where an earlier attempt holds its own."""
    for earlier in range(1, attempt):
        with (folder / f"lock-{earlier}").open("a") as before:
            try:
                fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return None
    file = (folder / f"lock-{attempt}").open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def port_of(folder: Path, attempt: int, first: bool, given: int) -> int:
    """The port of rank 0: a free one that rank 0's server writes down, unless one is given."""
    path = folder / f"port-{attempt}"
    if given:
        return given
    if first:
        with socket.socket() as free:
            free.bind(("", 0))
            write(path, free.getsockname()[1])
    begun = time.monotonic()
    while not path.exists():
        if time.monotonic() - begun > MAX_PORT_S:
            sys.exit(f"rank 0 has not said its port within {MAX_PORT_S:.0f} s")
        time.sleep(POLL_S)
    return int(json.loads(path.read_text()))


def processes(folder: Path, attempt: int, job: Any, mine: list[int], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    port = port_of(out, attempt, mine[0] == 0, job["port"])
    first = job["ranks"][0]["server"]
    shared = dict(
        os.environ, WORLD_SIZE=str(len(job["ranks"])), LOCAL_WORLD_SIZE=str(len(mine)), MASTER_PORT=str(port),
        MASTER_ADDR=job["addresses"].get(first, first), MESHWRIGHT_JOB=job["job"], MESHWRIGHT_RANKS=str(folder / f"ranks-{attempt}.json"),
        MESHWRIGHT_ATTEMPT=str(attempt), MESHWRIGHT_STATE=os.environ.get("MESHWRIGHT_KEEP", str(out)),
    )  # fmt: skip
    if job["plan"]:
        shared["MESHWRIGHT_PLAN"] = str(folder / job["plan"])
    for local, rank in enumerate(mine):
        environment = dict(shared, RANK=str(rank), LOCAL_RANK=str(local))
        with (out / f"out-{attempt}-{rank}.txt").open("ab") as file:
            yield subprocess.Popen(job["command"], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def outcome(running: list[subprocess.Popen[bytes]], ending: list[bool], leave: Path, grace_s: float) -> list[int]:
    """Exit codes of all; when one fails, or all are to leave, they are asked to end, and later killed."""
    asked = looked = 0.0
    while any(p.poll() is None for p in running):
        if not ending and time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            if leave.exists():
                ending.append(True)
        failed = any(p.poll() not in (None, 0) for p in running) or bool(ending)
        if failed and not asked:
            asked = time.monotonic()
            for p in running:
                if p.poll() is None:
                    p.terminate()
        elif asked and time.monotonic() - asked > (grace_s if ending else MAX_TERM_S):
            for p in running:
                if p.poll() is None:
                    p.kill()
        time.sleep(POLL_S)
    return [p.returncode if p.returncode >= 0 else 128 - p.returncode for p in running]


def main(folder: Path, attempt: int, server: str) -> int:
    begun = time.time()
    server = server or os.environ.get("SLURMD_NODENAME") or os.environ.get("MESHWRIGHT_NODE") or socket.gethostname()
    out = Path(os.environ.get("MESHWRIGHT_OUT", folder))  # where FOLDER can only be read
    job = json.loads((folder / f"ranks-{attempt}.json").read_text())
    mine = [n for n, r in enumerate(job["ranks"]) if r["server"] == server]
    if not mine:
        write(out / f"elsewhere-{attempt}-{server}.json", {"time_s": begun, "server": server})
        return ELSEWHERE
    lock = locked(out, attempt)
    if lock is None:
        return EARLIER
    leave = folder / f"leave-{attempt}"
    if leave.exists():
        return LEAVING
    try:
        os.close(os.open(out / f"claim-{attempt}-{server}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return AGAIN
    if job["own_gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted({g for n in mine for g in job["ranks"][n]["gpus"]})))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    note = {"time_s": begun, "server": server, "host": socket.gethostname(), "ranks": mine, "cuda_visible_devices": seen}
    write(out / f"started-{attempt}-{server}.json", note)
    ending: list[bool] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.append(True))
    try:
        codes = outcome(list(processes(folder, attempt, job, mine, out)), ending, leave, job.get("grace_s", MAX_TERM_S))
    except OSError as error:
        print(f"cannot start {job['command'][0]}: {error}", file=sys.stderr)  # noqa: T201
        codes = [127]
    write(out / f"ended-{attempt}-{server}.json", {"time_s": time.time(), "code": max(codes), "asked": bool(ending)})
    lock.close()
    return max(codes)


if __name__ == "__main__":
    where = sys.argv[3] if len(sys.argv) > 3 else ""
    if where and os.environ.pop("MESHWRIGHT_NAME_HOST", ""):
        with contextlib.suppress(OSError):
            socket.sethostname(where)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), where))
