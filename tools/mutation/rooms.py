"""Which source belongs to a room, and which tests are the room's: the one place that knows paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """Source globs below the package, and (part of the source's path, test paths): a source's tests are those of every part that it starts with.

    Paths that do not exist are skipped; `{part}` in a test path is the source's folder below the room (`decide/memory/...`: `memory`), any for a
    source at its top.
    """

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    package: str = "src/meshwright"
    elsewhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of sources whose path below the package begins so

    def files(self, root: Path) -> list[str]:
        found = {p for glob in self.sources for p in (root / self.package).glob(glob) if p.suffix == ".py"}
        return sorted(p.relative_to(root).as_posix() for p in found)

    def tests_of(self, root: Path, source: str) -> list[str]:
        below = source.removeprefix(f"{self.package}/").split("/")
        part = below[1] if len(below) > 2 else "*"
        more = [test for place, tests in self.elsewhere.items() if "/".join(below).startswith(place) for test in tests]
        paths = sorted({p for test in (*self.tests, *more) for p in root.glob(test.format(part=part))})
        return [p.relative_to(root).as_posix() for p in paths if not any(other in p.parents for other in paths)]


# Tests of a checker that stand beside what it checks.
CHECKED_ELSEWHERE = (
    "tests/lower/test_folded.py", "tests/io/test_msccl*", "tests/interop/test_msccl*", "tests/decide/memory/test_static.py",
    "tests/decide/pipeline/test_fill.py", "tests/run/**/test_compressed_plans.py", "tests/run/**/test_segment_steps.py",
)  # fmt: skip
# The memory of one step is simulated for that decision, folded programs beside their lowering.
SIMULATED_ELSEWHERE = ("tests/check/test_check_step_memory.py", "tests/decide/memory/test_lifetimes.py", "tests/lower/test_folded.py")
# Programs that were lowered are run, and proved, in these.
LOWERED_ELSEWHERE = (
    "tests/run/train", "tests/run/dtensor", "tests/run/sparse", "tests/check/test_training_schedules.py", "tests/check/test_check_folded.py",
)  # fmt: skip
# Layouts from profiles are decided for that page; rings on a torus are a topology's; bounds of pipelines are tested with who checks them.
DECIDED_ELSEWHERE = {
    "decide/layout/profiled": ("tests/profile/test_profiled*.py",), "decide/collective/classic": ("tests/decide/topology/test_hammingmesh.py",),
    "decide/pipeline/bound": ("tests/check/test_pipeline_bound.py",),
}  # fmt: skip
# A layer of experts is one for users (`nn`), its runtime is of this room.
RUN_ELSEWHERE = {"run/experts": ("tests/nn",)}

ROOMS = {
    room.name: room
    for room in (
        Room("check", ("check/**/*",), ("tests/check", "tests/contract", *CHECKED_ELSEWHERE)),
        Room("simulate", ("simulate/**/*",), ("tests/simulate", *SIMULATED_ELSEWHERE)),
        Room("lower", ("lower/**/*",), ("tests/lower", *LOWERED_ELSEWHERE)),
        Room("run", ("run/**/*",), ("tests/run",), elsewhere=RUN_ELSEWHERE),
        Room(
            "decide", ("decide/**/*",),
            ("tests/decide/{part}", "tests/contract/test_{part}_contract.py", "tests/{part}_search", "tests/decide/test_decisions_on_record.py"),
            elsewhere=DECIDED_ELSEWHERE,
        ),
    )
}
