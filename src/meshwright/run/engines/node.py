"""Starts the processes of one job on one server, and writes down what it found: `python node.py FOLDER ATTEMPT [SERVER]`. Standard library only, for it
travels with the job; Python 3.8.

FOLDER holds `ranks-ATTEMPT.json`. Without SERVER the engine's own name of the node counts (SLURMD_NODENAME, MESHWRIGHT_NODE). It ends with
75 where an earlier attempt still runs, 76 where this attempt was started here before, 77 where the job was not meant to be; nothing is started then.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time

EARLIER, AGAIN, ELSEWHERE = 75, 76, 77
MAX_PORT_S = 60.0  # until rank 0 has said its port
MAX_TERM_S = 5.0  # between asking and killing
POLL_S = 0.02


def write(path, document):
    with open(path + ".part", "w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def locked(folder, attempt):
    """A lock held as long as this process lives; None where an earlier attempt holds its own."""
    for earlier in range(1, attempt):
        with open(os.path.join(folder, "lock-%d" % earlier), "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return None
    file = open(os.path.join(folder, "lock-%d" % attempt), "a")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def port_of(folder, attempt, first, given):
    """The port of rank 0: a free one that rank 0's server writes down, unless one is given."""
    path = os.path.join(folder, "port-%d" % attempt)
    if given:
        return given
    if first:
        with socket.socket() as free:
            free.bind(("", 0))
            write(path, free.getsockname()[1])
    begun = time.monotonic()
    while not os.path.exists(path):
        if time.monotonic() - begun > MAX_PORT_S:
            sys.exit("rank 0 has not said its port within %d s" % MAX_PORT_S)
        time.sleep(POLL_S)
    with open(path) as file:
        return json.load(file)


def processes(folder, attempt, job, server, mine, out):
    port = port_of(folder, attempt, mine[0][0] == 0, job["port"])
    shared = dict(os.environ, WORLD_SIZE=str(len(job["ranks"])), LOCAL_WORLD_SIZE=str(len(mine)), MASTER_PORT=str(port),
                  MASTER_ADDR=job["addresses"].get(job["ranks"][0]["server"], job["ranks"][0]["server"]), MESHWRIGHT_JOB=job["job"],
                  MESHWRIGHT_RANKS=os.path.join(folder, "ranks-%d.json" % attempt))
    if job["plan"]:
        shared["MESHWRIGHT_PLAN"] = os.path.join(folder, job["plan"])
    for local, (rank, _) in enumerate(mine):
        environment = dict(shared, RANK=str(rank), LOCAL_RANK=str(local))
        with open(os.path.join(out, "out-%d-%d.txt" % (attempt, rank)), "ab") as file:
            yield subprocess.Popen(job["command"], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def outcome(running, ending):
    """Exit codes of all; when one fails, the others are ended."""
    asked = 0.0
    while any(p.poll() is None for p in running):
        failed = any(p.poll() not in (None, 0) for p in running) or ending
        if failed and not asked:
            asked = time.monotonic()
            for p in running:
                if p.poll() is None:
                    p.terminate()
        elif asked and time.monotonic() - asked > MAX_TERM_S:
            for p in running:
                if p.poll() is None:
                    p.kill()
        time.sleep(POLL_S)
    return [p.returncode if p.returncode >= 0 else 128 - p.returncode for p in running]


def main(folder, attempt, server):
    begun = time.time()
    server = server or os.environ.get("SLURMD_NODENAME") or os.environ.get("MESHWRIGHT_NODE") or socket.gethostname()
    out = os.environ.get("MESHWRIGHT_OUT", folder)  # where FOLDER can only be read
    with open(os.path.join(folder, "ranks-%d.json" % attempt)) as file:
        job = json.load(file)
    mine = [(n, r["gpus"]) for n, r in enumerate(job["ranks"]) if r["server"] == server]
    if not mine:
        write(os.path.join(out, "elsewhere-%d-%s.json" % (attempt, server)), {"time_s": begun, "server": server})
        return ELSEWHERE
    lock = locked(out, attempt)
    if lock is None:
        return EARLIER
    try:
        os.close(os.open(os.path.join(out, "claim-%d-%s" % (attempt, server)), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return AGAIN
    numbers = sorted({g for _, gpus in mine for g in gpus})
    if job["own_gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    started = {"time_s": begun, "server": server, "host": socket.gethostname(), "ranks": [n for n, _ in mine], "cuda_visible_devices": seen}
    write(os.path.join(out, "started-%d-%s.json" % (attempt, server)), started)
    ending = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.append(True))
    try:
        codes = outcome(list(processes(folder, attempt, job, server, mine, out)), ending)
    except OSError as error:
        print("cannot start %s: %s" % (job["command"][0], error), file=sys.stderr)  # noqa: T201
        codes = [127]
    code = max(codes)
    write(os.path.join(out, "ended-%d-%s.json" % (attempt, server)), {"time_s": time.time(), "code": code})
    lock.close()
    return code


if __name__ == "__main__":
    if len(sys.argv) > 3:
        try:
            socket.sethostname(sys.argv[3]) if os.environ.pop("MESHWRIGHT_NAME_HOST", "") else None
        except OSError:
            pass
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
