"""Every reader of `io` on damaged files: a value or a typed error that says where, within its time and memory, and nothing opened, started or sent.

Readers run in a child process with a limit on memory; the parent waits for its answers. What is read from a damaged file and can be written is
written, read again, and must be equal; plans and programs are checked as well, which must end in a verdict.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ...kernels.object_code import kept_in
from .damage import DAMAGE, MAX_DAMAGED_BYTES
from .files import READERS, read_with, seeds

__all__ = ["damaged_files", "judged_file"]

Rng = np.random.Generator
FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect", "socket.bind", "os.remove", "os.rename")
MAX_READ_S = 10.0  # of processor time, for a file of `MAX_DAMAGED_BYTES`
MAX_ANSWER_S = 600.0  # of wall time: the machine may have much else to do
MAX_GROWTH_BYTES = 400 << 20  # of the child's largest size by one file
MEMORY_LIMIT_BYTES = 6 << 30  # of the child's address space
MAX_DAMAGES = 4  # operators one after another


def damaged_files(rng: Rng) -> Generator[dict[str, Any], None, None]:
    """Without end. Sometimes a file meets another reader than its own."""
    known = seeds()
    names, operators = sorted(READERS), sorted(DAMAGE)
    with tempfile.TemporaryDirectory(prefix="meshwright-soak-") as folder:
        child = _Child(Path(folder))
        try:
            while True:
                reader, name, data = known[int(rng.integers(len(known)))]
                chosen = [operators[int(k)] for k in rng.integers(len(operators), size=min(int(rng.geometric(0.6)), MAX_DAMAGES))]
                if rng.random() < 0.05:
                    reader, chosen = names[int(rng.integers(len(names)))], []
                for operator in chosen:
                    data = DAMAGE[operator](data, rng)[:MAX_DAMAGED_BYTES]
                case: dict[str, Any] = {"kind": reader, "operator": chosen[-1] if chosen else "another reader's file", "most": {}, "sums": {}}
                case["what"] = f"{name}: {', '.join(chosen)}"
                case["judge"] = lambda case=case, reader=reader, name=name, data=data: child.judge(reader, name, data, case)
                yield case
        finally:
            child.end()


class _Child:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.folder), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.ours.close()

    def judge(self, reader: str, name: str, data: bytes, case: dict[str, Any]) -> tuple[str, str]:
        path = self.folder / name
        path.write_bytes(data)
        begin = time.monotonic()
        try:
            self.ours.send((reader, name))
            told = self.ours.recv() if self.ours.poll(MAX_ANSWER_S) else None
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            self.end()
            self._start()
            return "crashed", f"the process ended with {code} on {_kept(reader, name, data)}"
        if told is None:
            self.end()
            self._start()
            return "hung", f"{time.monotonic() - begin:.0f} s on {_kept(reader, name, data)}"
        outcome, detail, took_s, grown = told
        case["most"].update(processor_s=round(took_s, 3), grown_bytes=grown)
        case["sums"].update(bytes=len(data))
        if outcome in ("read", "refused") and (took_s > MAX_READ_S or grown > MAX_GROWTH_BYTES):
            outcome, detail = "large", f"{took_s:.1f} s, {grown >> 20} MiB more"
        if outcome not in ("read", "refused"):
            detail += f" on {_kept(reader, name, data)}"
        return outcome, detail


def _kept(reader: str, name: str, data: bytes) -> str:
    """A file that shows a mistake stays, to be looked at."""
    folder = Path(tempfile.mkdtemp(prefix="meshwright-soak-kept-"))
    (folder / name).write_bytes(data)
    return f"{folder / name} ({reader})"


def _serve(theirs: Connection, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    forbidden: list[str] = []
    under = [False]

    kernels = f"{kept_in()}{os.sep}"  # a reader's kernel that is compiled is kept there

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if under[0] and event in FORBIDDEN and not (event in ("os.remove", "os.rename") and str(args[0]).startswith(kernels)):
            forbidden.append(f"{event} {str(args)[:100]}")

    sys.addaudithook(audit)
    while True:
        try:
            reader, name = theirs.recv()
        except EOFError:
            os._exit(0)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        under[0] = True
        outcome, detail = judged_file(reader, folder / name)
        under[0] = False
        took, grown = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if forbidden:
            outcome, detail = "crashed", forbidden[0]
            forbidden.clear()
        theirs.send((outcome, detail, took, grown << 10))


def judged_file(reader: str, path: Path) -> tuple[str, str]:
    """`read`, `refused` (a typed error), or a mistake."""
    from ...errors import MeshwrightError

    try:
        value = read_with(reader, path)
    except MeshwrightError as error:
        return ("refused", "") if str(error) and error.where else ("wrong", f"an error that says no place: {error}")
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {str(error)[:300]}"
    try:
        return _used(reader, value, path)
    except Exception as error:
        return "crashed", f"used after reading: {type(error).__name__}: {str(error)[:300]}"


def _used(reader: str, value: Any, path: Path) -> tuple[str, str]:
    """What was read is written and read again; plans and programs get a verdict."""
    from ...errors import MeshwrightError
    from ...io.fabric.document import fabric_document, fabric_from_document
    from ...io.plan.plan import plan_bytes, plan_from_bytes
    from ...plan.plan import Plan
    from ...program.program import Program

    if isinstance(value, Plan):
        from ...drive.claims import check_claims

        try:
            again = plan_from_bytes(plan_bytes(value))
        except MeshwrightError as error:
            return "wrong", f"read, but cannot be written: {error}"
        if plan_bytes(again) != plan_bytes(value):
            return "wrong", "another plan after writing"
        try:
            check_claims(value)
        except MeshwrightError:
            pass  # a fabric's name that does not exist, say
    elif isinstance(value, Program):
        from ...check.whole import check_program

        check_program(value)
    elif reader in ("fabric TOML", "fabric JSON", "cluster", "matrix", "edges"):
        document = json.loads(json.dumps(fabric_document(value)))
        if fabric_document(fabric_from_document(document)) != fabric_document(value):
            return "wrong", "another fabric after writing"
    return "read", ""
