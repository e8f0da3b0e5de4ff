"""Interpreters that need not start: `subprocess.Popen([sys.executable, ...])` in a test forks a server that has imported torch and meshwright.

An interpreter with torch takes 1.5 to 3 s of CPU to start, a fork some milliseconds. What is forked is a process like any other: a child
of the caller, with the command line, the environment, the folder, the streams and the session that the caller asked for, and its own
ordinary end of an interpreter. What the fork cannot give (another PYTHON* variable, a function before exec, another user) starts a real
interpreter, as does everything under `@pytest.mark.interpreter` and `real_interpreters()`.

One server per pytest process, started by the first test that needs it; the workers of a run are forks of their caller's, each with a
server of its own, forked while it was as good as new. Linux only: elsewhere every interpreter is a real one.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import compiled_once

__all__ = ["PRELOADED", "SWITCH", "install", "real_interpreters", "remove", "server_pid"]

PRELOADED = (
    "numpy.ma", "numba", "msgspec", "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.tensor.parallel",
    "torch.distributed.nn", "torch.fx.experimental.symbolic_shapes", "torch.export", "torch.optim", "torch._dynamo", "safetensors.torch",
    # what a first capture imports, 0.8 s: networkx comes with the partitioners
    "torch._functorch.partitioners", "torch.export._trace", "torch._inductor.fx_passes", "torch._inductor.compiler_bisector", "torch._export.db",
    "meshwright.cli.frame", "meshwright.drive.plans", "meshwright.drive.training.training", "meshwright.run.dtensor.worker",
    "meshwright.run.group.worker", "meshwright.run.launch.rank", "meshwright.run.launch.train_run", "meshwright.run.ranks.worker",
    "meshwright.simulate", "meshwright.torch",
)  # fmt: skip
# Read once, when an interpreter or a library starts: a caller that sets one differently gets a real interpreter.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS", "NUMBA_", "TORCH", "PYTORCH", "KMP_", "MALLOC_", "LANG", "LC_")
# Of those, what is read when it is used, so that a fork takes it on: torch's inductor sets some when a test compiles, torchrun others.
READ_WHEN_USED = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_WARM_POOL", "KMP_DUPLICATE_LIB_OK", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
OWN_PACKAGES = ("meshwright", "torch", "numpy", "numba", "sitecustomize.py", "usercustomize.py")  # a PYTHONPATH with one needs a new interpreter
# A process that lives for seconds need not look for garbage as often as one that lives for days. (100_000, 20, 50) takes no less: what is made stays.
GC_THRESHOLDS = (20_000, 20, 20)
EXECUTABLE = sys.executable
SWITCH = "MESHWRIGHT_TEST_WARM"  # set to 0: only real interpreters
LONGEST_COMMAND_BYTES = 16384
HIGH_FD, MOST_FDS = 500, 64
MOST_REQUEST_BYTES = 100_000
STARTS_NONE = "meshwright.run.ranks.worker"  # forks its ranks, and starts no interpreter
XDIST_WORKER = "import sys;exec(eval(sys.stdin.readline()))"  # what execnet has an interpreter run that is to be a worker
CLONE_SYSCALL = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
PR_GET_TID_ADDRESS = 40
MADV_HUGEPAGE, MADV_COLLAPSE, HUGE_PAGE_BYTES = 14, 25, 2 << 20


class _Server:
    """The caller's end of one server process."""

    def __init__(self, ours: socket.socket, process: subprocess.Popen[bytes] | None, started_with: dict[str, str]) -> None:
        self.socket, self.process, self.started_with = ours, process, started_with
        self.lock, self.ready = threading.Lock(), False

    @classmethod
    def start(cls) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), json.dumps(_places), "x" * LONGEST_COMMAND_BYTES]
            process = _real_popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        return cls(ours, process, _read_at_start(os.environ, str(Path.cwd())))

    def fork(self, request: dict[str, Any], fds: list[int]) -> int | None:
        """The new process's number; None when the server cannot fork."""
        data = json.dumps(request).encode()
        if len(data) > MOST_REQUEST_BYTES:
            return None
        with self.lock:
            try:
                if not self.ready and self.socket.recv(16) != b"ready":
                    raise RuntimeError("the server of warm interpreters did not start: see its error output; MESHWRIGHT_TEST_WARM=0 does without")
                self.ready = True
                socket.send_fds(self.socket, [data], fds)
                return int(self.socket.recv(64)) or None
            except OSError:
                return None

    def close(self) -> None:
        self.socket.close()
        if self.process is None:
            return
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_real_popen = subprocess.Popen
_server: _Server | None = None
_places: list[str] = []  # of the tests that workers will run, if this process starts some
of_tests = set[str]()  # in the server: modules of tests that it has imported
asked_by_tests: list[str] = []  # in the server: folders that those put on the search path; a worker, where they are imported, must have them too
_of_server: list[str] = []  # in the server: its folders of PYTHONPATH
_installing = threading.Lock()
_suspended = False


@contextmanager
def real_interpreters() -> Iterator[None]:
    """Within: every interpreter is a new one. What is imported when, or how an interpreter ends, is not seen in a fork."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before


def server_pid() -> int | None:
    return None if _server is None or _server.process is None else _server.process.pid


def install(places: list[str] | None = None) -> None:
    """`places`: files and folders of the tests that workers of this process will run."""
    _places[:] = places or []
    if sys.platform == "linux" and CLONE_SYSCALL and os.environ.get(SWITCH) != "0":
        subprocess.Popen = _WarmPopen  # type: ignore[misc]


def remove() -> None:
    global _server
    subprocess.Popen = _real_popen  # type: ignore[misc]
    if _server is not None:
        _server.close()
        _server = None


def _running_server() -> _Server:
    global _server
    with _installing:
        if _server is None or (_server.process is not None and _server.process.poll() is not None):
            _server = _Server.start()
        return _server


def _read_at_start(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """What an interpreter that starts in `folder` reads. Of PYTHONPATH the folders of preloaded packages; a fork takes on the others."""
    told = {k: v for k, v in environment.items() if k.startswith(READ_AT_START) and not k.startswith(READ_WHEN_USED)}
    told["PYTHONPATH"] = os.pathsep.join(x for x in _python_path(environment, folder) if any(Path(x, name).exists() for name in OWN_PACKAGES))
    if told.get("PYTHONWARNINGS") == "ignore":  # the one value that a fork takes on
        del told["PYTHONWARNINGS"]
    return told


def package_place() -> str:
    """The folder that `meshwright` lies in. A PYTHONPATH that names it where the tests need none asks for no other package than the fork has."""
    file = getattr(sys.modules.get("meshwright"), "__file__", None)
    return str(Path(file).parents[1]) if file else ""


class _WarmPopen(_real_popen):  # type: ignore[type-arg]
    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any) -> None:
        (_, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid, umask, new_session, group) = rest
        plain = not (shell or executable or preexec_fn or gid or gids or uid) and umask == -1 and group in (-1, None) and close_fds
        command = None if _suspended or not plain else _python_command(args)
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        folder = os.fsdecode(cwd) if cwd is not None else str(Path.cwd())
        if command is not None and Path(folder).is_dir():
            server = _running_server()
            read = _read_at_start(environment, folder)
            if server.started_with in (read, {**read, "PYTHONPATH": ""} if read["PYTHONPATH"] == package_place() else read):
                streams = [p2cread if p2cread != -1 else 0, c2pwrite if c2pwrite != -1 else 1, errwrite if errwrite != -1 else 2]
                request = {
                    "command": command, "environment": environment, "folder": folder, "new_session": bool(new_session), "pass_fds": list(pass_fds),
                    "cpus": sorted(os.sched_getaffinity(0)), "nice": os.getpriority(os.PRIO_PROCESS, 0),
                }  # fmt: skip
                pid = server.fork(request, [*streams, *pass_fds])
                if pid is not None:
                    if new_session:
                        _wait_for_session(pid)
                    self._child_created = True
                    self.pid = pid
                    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
                    return
        super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)


def _wait_for_session(pid: int) -> None:
    """A caller may end the whole session at once: an interpreter that is executed has it when Popen returns."""
    while os.getsid(pid) != pid and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.0005)


def _python_path(environment: Mapping[str, str], folder: str) -> list[str]:
    """The folders of PYTHONPATH as an interpreter that starts in `folder` has them: whole paths, each once."""
    told = environment.get("PYTHONPATH")
    return list(dict.fromkeys(os.path.normpath(Path(folder, x)) for x in told.split(os.pathsep))) if told else []


def _python_command(args: Any) -> list[str] | None:
    """The command as text where it starts this interpreter with -c, -m or a script; None otherwise."""
    if isinstance(args, str | bytes) or not isinstance(args, list | tuple) or len(args) < 2:
        return None
    words = [os.fsdecode(a) for a in args]
    if words[0] != EXECUTABLE or sum(len(w.encode()) + 1 for w in words) > LONGEST_COMMAND_BYTES:
        return None
    rest = words[3:] if words[1:3] == ["-W", "ignore"] else words[2:] if words[1] == "-u" else words[1:]
    good = rest and ((rest[0] in ("-c", "-m") and len(rest) > 1) or rest[0].endswith(".py"))
    return words if good else None


# What follows runs in the server and in what it forks.


def _preload() -> None:
    compiled_once.install()
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # moved: slower, and a test of its own says so
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()  # what numba imports when the first kernel is loaded
    cpu_target.target_context.refresh()
    from meshwright.run.train.data import python_source

    python_source()  # the text that ranks train on is kept per process
    gc.set_threshold(*GC_THRESHOLDS)


def _preload_tests(places: list[str]) -> None:
    """Import test modules as pytest would, with its assertions: the workers of a run are forks and need not do it one by one.

    What cannot be imported, or only with a warning, is left to the workers: they say so.
    """
    if not places:
        return
    from _pytest.assertion.rewrite import AssertionRewritingHook
    from _pytest.config import _prepareconfig, apply_warning_filters
    from _pytest.pathlib import import_path

    path, before = list(sys.path), set(sys.modules)
    try:
        config = _prepareconfig(["-s", "-p", "no:cacheprovider", *places])
    except BaseException:
        return
    files = {file for place in places for file in (Path(place).rglob("test_*.py") if Path(place).is_dir() else [Path(place)])}
    # Helpers lie beside a conftest.py.
    above = {folder for file in files for folder in file.parents if config.rootpath in folder.parents and (folder / "conftest.py").exists()}
    sys.path[:0] = [str(folder) for folder in sorted(above)]
    for file in sorted(files):
        known = Counter([*sys.path, str(file.parent)])
        with warnings.catch_warnings(), suppress(BaseException):
            apply_warning_filters(config.getini("filterwarnings"), [])
            import_path(file, root=config.rootpath, consider_namespace_packages=False)
        asked_by_tests.extend(Counter(sys.path) - known)
    sys.meta_path[:] = [hook for hook in sys.meta_path if not isinstance(hook, AssertionRewritingHook)]  # every worker has its own
    sys.path[:] = path
    sys.modules.pop("conftest", None)
    of_tests.update(
        name for name in set(sys.modules) - before if str(config.rootpath / "tests") in str(getattr(sys.modules[name], "__file__", ""))
    )


def _in_huge_pages() -> None:
    """Moves what this process has made into pages of 2 MiB where the kernel can (Linux 6.1): a fork copies one entry of the page table for 512.

    What the child writes is still copied 4 KiB at a time. A fork and its end took 50 ms of the system with 330 MB, 38 ms with huge pages.
    """
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access, _, _, _, *name = line.split()
        begin, end = (int(x, 16) for x in where.split("-"))
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        begin, end = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for place in range(begin, end, HUGE_PAGE_BYTES):
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):  # what is refused stays as it is
                advise(ctypes.c_void_p(place), ctypes.c_size_t(HUGE_PAGE_BYTES), advice)


def _serve(server: socket.socket) -> dict[str, Any]:
    """Answer requests; returns only in a forked process, with what it is to be."""
    # A thread would be lost in a fork, and what it holds would stay held.
    alone = len(list(Path("/proc/self/task").iterdir())) == 1
    server.send(b"ready" if alone else b"threads")
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(server, MOST_REQUEST_BYTES + 1, MOST_FDS)
        except ConnectionResetError:  # the caller ended without having asked
            data = b""
        if not data:
            os._exit(0)
        pid = _clone_sibling()
        if pid == 0:
            server.close()
            return {**json.loads(data), "fds": fds}
        for fd in fds:
            os.close(fd)
        server.send(str(max(pid, 0)).encode())


def _own_server(fds: list[int], started_with: dict[str, str]) -> None:
    """A server of this process's own, forked while it is as good as new: a command may start interpreters too (`train run` starts ranks)."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        for fd in fds:
            os.close(fd)
        told = _serve(theirs)
        _become(told)
    theirs.close()
    _server = _Server(ours, None, started_with)
    install()


def _clone_sibling() -> int:
    """fork(), but the new process is a child of our parent, who can wait for it like for any other."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi  # PyDLL: the interpreter's lock stays held
    libc.syscall.restype = ctypes.c_long
    flags, zero, address = CLONE_PARENT | signal.SIGCHLD, ctypes.c_void_p(0), ctypes.c_void_p()
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0:  # where libc keeps the thread's number, as its fork() does
        flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
    last = (address, zero) if platform.machine() == "x86_64" else (zero, address)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(ctypes.c_long(CLONE_SYSCALL or 0), ctypes.c_long(flags), zero, zero, *last))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(told: dict[str, Any]) -> None:
    """Take on the streams, the folder, the environment and the command line of the request, and run it."""
    command, fds = told["command"], told["fds"]
    if told["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Who starts none needs no server; a rank that starts an interpreter after all gets a real one.
    alone = "-c" in command[:3] or STARTS_NONE in command or "RANK" in told["environment"]
    if not alone or command[-1] == XDIST_WORKER:
        _own_server(fds, _read_at_start(told["environment"], told["folder"]))
    if command[-1] != XDIST_WORKER:
        for name in of_tests:
            sys.modules.pop(name, None)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in fds]  # numbers that no caller asks for
    for number, fd in zip([0, 1, 2, *told["pass_fds"]], high, strict=True):
        os.dup2(fd, number)
    for fd in {*high, *fds} - {0, 1, 2, *told["pass_fds"]}:
        os.close(fd)
    os.chdir(told["folder"])
    os.sched_setaffinity(0, told["cpus"])
    os.setpriority(os.PRIO_PROCESS, 0, told["nice"])
    for name in set(os.environ) - set(told["environment"]):
        del os.environ[name]
    os.environ.update(told["environment"])
    tempfile.tempdir = None  # of this environment, not of the server's
    _rename(command)
    _new_streams(command)
    importlib.invalidate_caches()
    _fresh_random_numbers()
    _end(_run, command)


def _end(run: Callable[[list[str]], None], command: list[str]) -> None:
    """Run, and end like an interpreter that does not stop to free its memory (torch's takes 0.2 s). What is not plain ends the ordinary way."""
    status: int | None = 0
    try:
        run(command)
    except SystemExit as error:
        status = (error.code or 0) if isinstance(error.code, int | None) else None
        if status is None:
            raise
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(status)  # the ordinary end says what could not be written
    ctypes.CDLL(None).fflush(None)
    os._exit(status & 0xFF)


def _rename(command: list[str]) -> None:
    """Write the command over this process's own, where /proc and `ps` read it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    text = b"".join(os.fsencode(w) + b"\0" for w in command)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _new_streams(command: list[str]) -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in command[1:2]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = os.fdopen(number, "rb" if number == 0 else "wb", -1, closefd=False)
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered and number > 0)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fresh_random_numbers() -> None:
    import numpy as np

    np.random.seed()  # Python's own generator seeds itself after a fork


def _run(command: list[str]) -> None:
    words = command[1:]
    if words[:2] == ["-W", "ignore"] or os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
        words = words[2:] if words[0] == "-W" else words
    words = words[1:] if words[0] == "-u" else words
    kind, rest = words[0], words[1:]
    sys.orig_argv = command
    sys.path[1:] = _search_path(sys.path[1:], _of_server, _python_path(os.environ, str(Path.cwd())))
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), _main_names())
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        for name in (rest[0], f"{rest[0]}.__main__"):
            sys.modules.pop(name, None) if not hasattr(sys.modules.get(name), "__path__") else None
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(kind).resolve().parent)
        names = _main_names()
        names["__file__"] = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), names)


def _search_path(path: list[str], of_server: list[str], ours: list[str]) -> list[str]:
    """The server's search path with our folders of PYTHONPATH in place of its own."""
    return [*ours, *(x for x in path if x not in of_server and x not in ours)]


def _main_names() -> dict[str, Any]:
    """The names of a new `__main__`."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module.__dict__


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end us
    sys.modules["warm_interpreters"] = sys.modules["__main__"]  # a fork that imports it finds the server that it was given
    _of_server[:] = _python_path(os.environ, str(Path.cwd()))
    _preload()
    _preload_tests(json.loads(sys.argv[2]))
    gc.collect()
    gc.freeze()
    _in_huge_pages()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
