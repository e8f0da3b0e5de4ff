"""`python -m meshwright.lab.impair_trial`: exit 0 if the kernel has netem, tried in namespaces of our own."""

from __future__ import annotations

import subprocess
import sys

from . import namespaces as ns

__all__ = ["main"]


def main() -> int:
    try:
        ns.unshare(ns.NEWNET)
    except OSError:
        try:
            ns.become_root_of_user_namespace()
            ns.unshare(ns.NEWNET)
        except OSError:
            return 1
    try:
        return subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"], capture_output=True, check=False).returncode
    except OSError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
