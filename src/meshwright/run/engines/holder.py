"""Process 1 of a sandbox: starts its daemons in order, starts again what dies, reaps, and ends with its owner: `python holder.py FOLDER`. Standard library only.

It is process 1 of a PID namespace: when it ends, the kernel ends every daemon and every job in there, whatever killed it. FOLDER/daemons.json lists
`name`, `argv`, `ready` (a path to wait for, or "") and `keep`: without it the holder ends at the end of its standard input, which the owner holds.
"""

import json
import os
import select
import subprocess
import sys
import time

AGAIN_S = 0.5  # before a daemon that died is started again
MAX_AGAIN = 20  # of one daemon
MAX_READY_S = 10.0


def start(folder, daemon):
    with open(os.path.join(folder, daemon["name"] + ".out"), "ab") as out:
        return subprocess.Popen(daemon["argv"], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                                env=dict(os.environ, **daemon["env"]))


def wait_for(path):
    begun = time.monotonic()
    while path and not os.path.exists(path) and time.monotonic() - begun < MAX_READY_S:
        time.sleep(0.01)


def main(folder):
    with open(os.path.join(folder, "daemons.json")) as file:
        told = json.load(file)
    running, died, again = {}, {}, {}
    for daemon in told["daemons"]:
        running[daemon["name"]] = (daemon, start(folder, daemon))
        wait_for(daemon["ready"])
    while True:
        if not told["keep"] and select.select([0], [], [], 0.05)[0] and not os.read(0, 4096):
            return
        if told["keep"]:
            time.sleep(0.05)
        pids = {p.pid: name for name, (_, p) in running.items()}
        while True:  # everything in here that has no parent any more is ours
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in pids:
                died[pids[pid]] = time.monotonic()
        for name, at in list(died.items()):
            if time.monotonic() - at > AGAIN_S and again.get(name, 0) < MAX_AGAIN:
                again[name] = again.get(name, 0) + 1
                running[name] = (running[name][0], start(folder, running[name][0]))
                del died[name]


if __name__ == "__main__":
    main(sys.argv[1])
