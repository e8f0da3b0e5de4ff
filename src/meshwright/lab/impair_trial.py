"""`python -m meshwright.lab.impair_trial` prints what the kernel's packet schedulers can do, tried in namespaces of our own."""

from __future__ import annotations

import subprocess
import sys

from . import namespaces as ns

__all__ = ["main"]


TRIALS = {
    "netem": ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"],
    "priorities": [
        "qdisc add dev lo root handle 2: htb default 2",
        "class add dev lo parent 2: classid 2:1 htb rate 1gbit quantum 60000 prio 0",
        "filter add dev lo parent 2: protocol ip prio 1 u32 match u8 0x06 0xff at 9 flowid 2:1",
    ],
}


def main() -> int:
    try:
        ns.unshare(ns.NEWNET)
    except OSError:
        try:
            ns.become_root_of_user_namespace()
            ns.unshare(ns.NEWNET)
        except OSError:
            return 1
    found = [name for name, lines in TRIALS.items() if all(_works(line) for line in lines)]
    sys.stdout.write(" ".join(found))
    return 0


def _works(line: str) -> bool:
    try:
        return subprocess.run(["tc", *line.split()], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
