"""Runs `python -m meshwright WORDS` in a forked child per request, so that torch is imported once and not for every plan.

A request is a line of JSON on the standard input: `words`, `folder` (where to run), `out` and `err` (files for what is printed), `environment`
(changes to it) and `torch` (whether to import it first). The answer is a line of JSON: `exit` (minus the signal's number where one ended it), and
`seconds` of processor time. `meshwright` itself is imported in the child only.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any

ALWAYS = ("numpy", "msgspec", "numba", "highspy")
WITH_TORCH = ("torch", "torch.export", "torch._dynamo", "torch._inductor", "torch.fx.experimental.proxy_tensor")


def warm(modules: tuple[str, ...]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:  # whoever needs it says so
            pass


def child(job: dict[str, Any]) -> int:
    """The command, in this process; its exit code."""
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    sys.argv = ["meshwright", *job["words"]]
    code = 0
    try:
        runpy.run_module("meshwright", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 70
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def main() -> None:
    sys.path.pop(0)  # this folder: its modules are not the command's
    answers = os.fdopen(os.dup(1), "w")
    warm(ALWAYS)
    for line in sys.stdin:
        job = json.loads(line)
        if job["torch"]:
            warm(WITH_TORCH)
        pid = os.fork()
        if not pid:
            os._exit(child(job))
        _, status, used = os.wait4(pid, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status), "seconds": used.ru_utime + used.ru_stime}), file=answers, flush=True)


if __name__ == "__main__":
    main()
