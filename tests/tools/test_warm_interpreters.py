"""A fork of the warm interpreter and a real one cannot be told apart by who starts them, except that torch is there at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import warm_interpreters
from compiled_once import lock_of
from warm_interpreters import PRELOADED, real_interpreters

needs_forks = pytest.mark.usefixtures("forks")
SEEN = """
import json, os, sys, tempfile, warnings
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "temporary": tempfile.gettempdir(),
    "cwd": os.getcwd(), "name": __name__, "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)), "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "said": os.environ.get("SAID"), "home": os.environ.get("HOME"), "threads": len(os.listdir("/proc/self/task")), "stdin": sys.stdin.read(),
    "warns": [f[0] for f in warnings.filters][:1],
}))
"""
WARM = "import sys; print('torch' in sys.modules)"


@pytest.fixture
def forks() -> None:
    """Asked by the worker: this module may have been imported before it was forked."""
    if subprocess.Popen is warm_interpreters._real_popen:
        pytest.skip("interpreters are not forked here (another system, or MESHWRIGHT_TEST_WARM=0)")


def both(*words: str, **options: Any) -> tuple[Any, Any]:
    """What a fork and what a real interpreter give."""
    forked = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200, **options)
    with real_interpreters():
        real = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200, **options)
    return forked, real


def with_path(*folders: str) -> str:
    """A PYTHONPATH with these before what the tests were started with: without that a real interpreter would be needed."""
    told = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*folders, *([told] if told else [])])


@needs_forks
def test_forks_have_torch_and_real_interpreters_do_not() -> None:
    forked, real = both("-c", WARM)
    assert (forked.stdout, real.stdout) == ("True\n", "False\n")


@needs_forks
def test_a_path_to_the_package_that_is_loaded_needs_no_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "meshwright").mkdir()
    for place, warm in ((warm_interpreters.package_place(), "True\n"), (str(tmp_path), "False\n")):
        environment = os.environ | {"PYTHONPATH": place}
        assert subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, timeout=200, env=environment).stdout == warm


@pytest.mark.interpreter
def test_under_the_mark_interpreters_are_real() -> None:
    assert subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, timeout=200).stdout == "False\n"


@pytest.mark.parametrize("how", ["code", "module", "script", "quiet", "unbuffered", "path", "package"])
def test_a_fork_sees_what_a_real_interpreter_sees(how: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    words = {
        "code": ["-c", SEEN], "module": ["-m", "seen"], "script": [str(tmp_path / "seen.py")], "quiet": ["-W", "ignore", "-c", SEEN],
        "unbuffered": ["-u", "-c", SEEN], "path": ["-m", "seen"], "package": ["-c", SEEN],
    }[how]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "HOME"} | {"SAID": "a b", "TMPDIR": str(tmp_path)}
    if how == "path":
        environment["PYTHONPATH"] = with_path(str(tmp_path / "first"), "second", "", "second/../third", "second")
    if how == "package":
        environment["PYTHONPATH"] = warm_interpreters.package_place()
    done = both(*words, "x", "y z", cwd=tmp_path, env=environment, input="in", start_new_session=how == "code")
    assert [d.stderr for d in done] == ["", ""]
    forked, real = (json.loads(d.stdout) for d in done)
    assert forked["parent"] == os.getpid() and forked["said"] == "a b" and forked["home"] is None and forked["stdin"] == "in"
    del forked["open"][3:], real["open"][3:]  # a script may hold its file open
    if how != "quiet":
        del forked["warns"], real["warns"]
    assert forked == real


@pytest.mark.parametrize(
    ("code", "status"),
    [("import sys; sys.exit(7)", 7), ("raise SystemExit", 0), ("import sys; sys.exit('gone')", 1), ("1 / 0", 1), ("raise KeyboardInterrupt", -2),
     ("import os; os.kill(os.getpid(), 9)", -9), ("import os; os._exit(3)", 3), ("import sys; sys.exit(300)", 300 & 0xFF),
     ("import atexit, threading, time; atexit.register(print, 'end'); threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()", 0),
     ("import sys; sys.excepthook = lambda *e: print('hook', e[0].__name__); 1 / 0", 1)],
)  # fmt: skip
def test_ends_are_the_same(code: str, status: int) -> None:
    forked, real = both("-c", code)
    assert forked.returncode == real.returncode == status
    assert forked.stdout == real.stdout
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_fork_is_a_child_like_any_other(tmp_path: Path) -> None:
    """Signals, pipes that are passed on, output into a file, waiting with a limit."""
    read, write = os.pipe()
    code = f"import os, time; print('said', flush=True); os.write({write}, b'here'); time.sleep(600)"
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=out, pass_fds=[write])
    os.close(write)
    assert os.read(read, 10) == b"here"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)
    assert child.poll() is None and (tmp_path / "out").read_text() == "said\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    assert os.read(read, 10) == b""
    os.close(read)


@needs_forks
def test_what_a_fork_cannot_give_is_a_real_interpreter(tmp_path: Path) -> None:
    def warm(**options: Any) -> bool:
        done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, timeout=200, **options)
        return done.stdout == "True\n"

    assert warm(env=os.environ | {"PYTHONWARNINGS": "ignore"}) and warm(env=os.environ | {"ANY": "x"})
    assert warm(env=os.environ | {"PYTHONPATH": with_path(str(tmp_path)), "TORCHINDUCTOR_CACHE_DIR": "x", "TORCHELASTIC_RUN_ID": "1"})
    (tmp_path / "meshwright").mkdir()
    assert not warm(env=os.environ | {"PYTHONPATH": with_path(str(tmp_path))})
    assert not warm(env=os.environ | {"PYTHONHASHSEED": "1"}) and not warm(env=os.environ | {"OMP_NUM_THREADS": "7"})
    assert not warm(preexec_fn=os.getpid)
    with pytest.raises(FileNotFoundError):
        warm(cwd=tmp_path / "nowhere")


def test_folders_of_a_server_with_a_path_of_its_own(tmp_path: Path) -> None:
    """Tests may be started with PYTHONPATH=src: a fork needs the same packages, and has of that path only what it is told itself."""
    (tmp_path / "src" / "meshwright").mkdir(parents=True)

    def started(path: str, folder: Path = tmp_path) -> dict[str, str]:
        return warm_interpreters._read_at_start({"PYTHONPATH": path}, str(folder))

    server = started("src")
    assert server == started(str(tmp_path / "src")) == started(f"{tmp_path / 'other'}{os.pathsep}src/../src{os.pathsep}src")
    assert server != started("") == started("src", tmp_path / "src") == warm_interpreters._read_at_start({}, str(tmp_path))
    assert warm_interpreters._search_path(["/src", "/of server", "/lib", "/site"], ["/src", "/of server"], ["/mine", "/src"]) == [
        "/mine", "/src", "/lib", "/site",
    ]  # fmt: skip


@needs_forks
def test_what_a_fork_starts_is_forked_too_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(
        f"import os, subprocess, sys\ncode = {WARM!r} + '; import os; print(os.getppid())'\n"
        "done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)\nprint(os.getpid(), *done.stdout.split())\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "outer.py")], capture_output=True, text=True, timeout=200, check=True)
    outer, warm, parent = done.stdout.split()
    assert warm == "True" and outer == parent


@needs_forks
def test_folders_that_tests_put_on_the_search_path_are_kept_for_workers(tmp_path: Path) -> None:
    """A worker has the module already, and its first lines do not run again: helpers in that folder would be missing."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("")
    (tmp_path / "tests" / "test_of_a_folder.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path / 'helpers')!r})\n")
    code = f"import sys, warm_interpreters as w; known = len(w.asked_by_tests); w._preload_tests([{str(tmp_path / 'tests')!r}])\n"
    code += "print(w.asked_by_tests[known:], 'test_of_a_folder' in sys.modules)"  # a fork knows those of the suite
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == f"{[str(tmp_path / 'helpers')]} True\n"


def test_random_numbers_of_two_forks_differ() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200).stdout.split() for _ in range(2)]
    assert all(a != b for a, b in zip(*said, strict=True))


@pytest.mark.parametrize("name", PRELOADED)
def test_what_is_imported_ahead_is_there(name: str) -> None:
    assert find_spec(name) is not None


KERNEL = """
import sys
from numba import njit

@njit(cache=True)
def total(values):
    found = 0.0
    for x in values:
        found += x * x if x > 1 else x
    return found

import numpy as np
print("ready", flush=True)
sys.stdin.readline()
total(np.ones(3))
print(sum(total.stats.cache_misses.values()), sum(total.stats.cache_hits.values()))
"""


@needs_forks
def test_ranks_that_need_a_kernel_at_once_compile_it_once(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(KERNEL)
    command = [sys.executable, str(tmp_path / "job.py")]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    said = sorted(rank.communicate(timeout=200)[0].strip() for rank in ranks)
    for kept in Path(os.environ["NUMBA_CACHE_DIR"]).glob(f"{tmp_path.name}_*"):
        shutil.rmtree(kept)
    lock_of(str(tmp_path / "job.py"), "total").unlink(missing_ok=True)
    assert said == ["0 1", "0 1", "1 0"]
