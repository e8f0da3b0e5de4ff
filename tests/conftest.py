"""What holds for every test: the same cases in CI every time, a hard time limit, no process and no file left behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

import before_torch  # noqa: F401
import captured
import compiled_once
import documents
import warm_interpreters
from effort import FULL, PROFILE, SHARE_OF_EXAMPLES, few
from meshwright.run.machine.process import batch_scheduling
from without_torch import TORCH, WithoutTorch

# "ci": the same examples in every run, no time limit per example (two cores, other load), a share of what a test asks for: what the others
# find, they found when the test was written. "full": all of them. "soak": fresh ones, many.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.register_profile("full", settings.get_profile("ci"))
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", deadline=None, max_examples=20_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(PROFILE)
MIN_EXAMPLES = 10  # of a test of properties, if it asks for so many
if PROFILE == "ci":
    # Else examples hold constants of those modules of ours that were imported by then: others after other tests, and after every change of a source.
    # To read all sources for them took each worker of a fresh clone 5 s of processor time.
    vars(providers).update(_get_local_constants=lambda: providers._local_constants)

# Compiled kernels are kept beside the environment, so that every worker and every later run finds them.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(sys.prefix) / "numba-cache"))
# Relative folders are those of the folder that the tests were started in; what tests start in others has the same packages.
if path := os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(x).absolute()) for x in path.split(os.pathsep))
# No test reads what an earlier run kept, nor leaves anything where users keep caches.
os.environ["MESHWRIGHT_CACHE"] = "0"
# What a command says of its progress depends on the clock; the tests of it say it by hand.
os.environ["MESHWRIGHT_PROGRESS"] = "0"
faulthandler.enable()
LAB_GOES_FIRST_BY = 15  # in the kernel's scale of nice values: some 28 times the share of a core that others get
SHARED_BY = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "randomly_reset_seed"):
        config.option.randomly_reset_seed = False  # it mixes the order; what tests draw is the same in every run (`same_numbers`)
    batch_scheduling()  # for ranks that are threads or processes of a test's own as for those of the launcher
    if TORCH:
        workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
        warm_interpreters.install([str(config.invocation_params.dir / x.partition("::")[0]) for x in config.args] if workers else [])
        if not workers:  # a process that only starts workers runs no test: torch is not imported for it
            import traced

            traced.install()
    else:
        config.pluginmanager.register(WithoutTorch())
    documents.install()
    if hasattr(config, "workerinput"):  # one of several
        compiled_once.install()
        sys.path.extend(x for x in dict.fromkeys(warm_interpreters.asked_by_tests) if x not in sys.path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the collector does not look through its million objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*warm_interpreters.GC_THRESHOLDS)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In CI a test of properties tries a share of its examples, and a test marked `sample` runs some of its cases."""
    room_by_room(items)
    if FULL:
        return
    for function in {id(f): f for f in (getattr(getattr(i, "obj", None), "__func__", getattr(i, "obj", None)) for i in items)}.values():
        if is_hypothesis_test(function):  # a function that many cases share is told once
            asked = function._hypothesis_internal_use_settings
            most = few(asked.max_examples, least=MIN_EXAMPLES, share=SHARE_OF_EXAMPLES)
            function._hypothesis_internal_use_settings = settings(asked, max_examples=most)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {id(item) for alike in cases.values() for item in unchosen(alike)}
    if left:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
        items[:] = [item for item in items if id(item) not in left]


def room_by_room(items: list[pytest.Item]) -> None:
    """Tests of a folder one after another, their files in mixed order: one worker has most of them, and captures and plans what they share once.

    Files with tests of the lab come first. They wait for seconds on links; begun last, one of them would keep a worker busy when the others are done.
    """
    waiting = {item.path for item in items if item.get_closest_marker("lab") is not None}
    met: dict[Path, int] = {}
    place: dict[Path, list[int]] = {}
    for path in dict.fromkeys(item.path for item in items):
        for folder in path.parents:
            met.setdefault(folder, len(met))
        place[path] = [met[folder] for folder in reversed(path.parents)]
    items.sort(key=lambda item: (item.path not in waiting, place[item.path]))


def unchosen(alike: list[pytest.Item]) -> list[pytest.Item]:
    """All cases of a test but as many as it asks for: each of those brings most values of parameters not seen yet, or lies far from the others."""
    alike = sorted(alike, key=lambda item: tuple(item.callspec.indices.values()))  # type: ignore[attr-defined]  # as written: the order is mixed
    marker = alike[0].get_closest_marker("sample")
    assert marker is not None
    wanted, seen, chosen = marker.args[0], set[tuple[str, str]](), set[int]()

    def brings(at: int) -> tuple[int, int]:
        values = {(name, repr(value)) for name, value in alike[at].callspec.params.items()}  # type: ignore[attr-defined]
        return len(values - seen), min((abs(at - other) for other in chosen), default=len(alike))

    while len(chosen) < min(wanted, len(alike)):
        at = max((i for i in range(len(alike)) if i not in chosen), key=brings)
        chosen.add(at)
        seen |= {(name, repr(value)) for name, value in alike[at].callspec.params.items()}  # type: ignore[attr-defined]
    return [item for at, item in enumerate(alike) if at not in chosen]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of the process that starts the workers: what they share in this run is forgotten when all have ended."""
    node.config.stash[SHARED_BY] = node.workerinput["testrunuid"]


def pytest_unconfigure(config: pytest.Config) -> None:
    warm_interpreters.remove()
    if run := config.stash.get(SHARED_BY, ""):
        captured.forget(run)


def same_numbers(text: str) -> None:
    """Whoever draws without a seed draws by this text: not by the run, nor by what other tests of the process drew before."""
    seed = zlib.crc32(text.encode())
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)  # the processor's alone: to seed accelerators takes a look at the whole stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Under `@pytest.mark.interpreter` no interpreter is a fork of the warm one. Tests of the lab go before others. What is captured is kept, but
    where capturing is tested."""
    same_numbers(item.nodeid)
    if kept := sys.modules.get("traced"):
        kept.remember("capture" not in item.path.parts)
    with (
        warm_interpreters.real_interpreters() if item.get_closest_marker("interpreter") else nullcontext(),
        going_first() if item.get_closest_marker("lab") else nullcontext(),
    ):
        return (yield)


@contextmanager
def going_first() -> Iterator[None]:
    """What this thread starts comes before the other workers' tests on a core. A lab's links pass what they should only if their senders and
    receivers run in time: with four workers on two cores a link passed 75 % of its rate. For root alone, as is the lab."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, before - LAB_GOES_FIRST_BY)
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def children() -> set[int]:
    """Processes whose parent is this one. Zombies count: somebody forgot to wait for them."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208  # twice for every test: no objects for paths
        try:
            with open(f"/proc/self/task/{task}/children") as said:  # noqa: PTH123
                found.update(map(int, said.read().split()))
        except OSError:  # the thread ended meanwhile, or the kernel does not say
            continue
    return found


def commands(pids: set[int]) -> dict[int, str]:
    """Number -> command line, of those that are still there."""
    found: dict[int, str] = {}
    for pid in pids:
        try:
            command = Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        found[pid] = command or "(ended, not waited for)"
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of a test that passed nobody reads what it printed and by which words it is found: a worker need not send that, three times a test."""
    report = yield
    if report.passed and hasattr(item.config, "workerinput"):
        report.sections, report.keywords = [], {}
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A document that a command made in a test of commands, and that is not of its published form, fails it."""
    documents.told()
    same_numbers(f"{item.nodeid} itself")  # fixtures were the other tests', perhaps
    outcome = yield
    if (wrong := documents.told()) and "cli" in item.path.parts:
        pytest.fail("\n".join(wrong))
    return outcome


@pytest.fixture(autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves child processes; they get a minute to end by themselves and are ended then.

    multiprocessing's resource tracker and the server of warm interpreters live as long as the interpreter and are not the test's.
    """
    before = children()
    yield
    deadline = time.monotonic() + 60
    while True:
        ours = {*before, warm_interpreters.server_pid()}
        left = {pid: command for pid, command in commands(children() - ours).items() if "resource_tracker" not in command}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left:
        try:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        except OSError:
            continue
    if left:
        pytest.fail(f"left {len(left)} process(es) behind: " + "; ".join(f"{pid}: {command[:120]}" for pid, command in left.items()))
