"""The time limit is a net: where it is not reached, plans do not depend on the clock; where it cuts, everything that is said says so.

Clocks here are made up: one runs faster than ours, as on a busy machine; one ticks with every reading, so that it cuts at the same place every time.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.frame import main
from meshwright.drive.plans import read_plan
from meshwright.errors import TimeLimit
from meshwright.io.plan.traffic import write_traffic_profile
from meshwright.kernels import effort
from meshwright.kernels.effort import cut_of
from meshwright.testing.traffic import traffic_profile

SHARDED = "tests/decide/layout/autoddl/sharding_problems.py:branches"

PLANS = {
    "collective, all candidates": "collective plan all-gather --fabric dgx1-v100:1 --size 1MiB",
    "collective, integer programs": "collective plan all-gather --fabric ndv2:1 --size 64KiB --strategy taccl",
    "collective groups": "collective groups --fabric dgx1-v100:1 --group all-reduce:1MiB:0-3/4-7",
    "pipeline, all candidates": "pipeline plan --stages 4 --microbatches 8",
    "pipeline search": "pipeline plan --stages 3 --microbatches 4 --strategy search --option cap=3 --option effort=20",
    "layout": f"layout plan {SHARDED} --fabric star:4",
    "layout by integer program": f"layout plan {SHARDED} --fabric star:4 --search ilp",
    "traffic": "traffic plan --profile profile.json",
    "memory pack": "memory pack storages.csv",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = Path(__file__).parents[2]
    (tmp_path / "tests").symlink_to(root / "tests")
    write_traffic_profile(tmp_path / "profile.json", traffic_profile(random.Random(14), 9, 3))
    for name, count in (("storages.csv", 120), ("many.csv", 1000)):
        rng = random.Random(3)
        rows = [(i, b := rng.randrange(300), b + rng.randrange(1, 160), 64 * rng.randrange(1, 2000) + rng.randrange(64)) for i in range(count)]
        (tmp_path / name).write_text("id,lower,upper,size\n" + "".join(f"{i},{a},{b},{s}\n" for i, a, b, s in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def out_of(command: str) -> str:
    return "placed.csv" if command.startswith("memory pack") else "made.json"


def made(command: str, *more: str) -> int:
    return main([*command.split(), "--out", out_of(command), *more])


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def hurry() -> None:
        began = time.monotonic()
        monkeypatch.setattr(effort, "monotonic", lambda: began + 50 * (time.monotonic() - began))

    return hurry


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", PLANS)
def test_plans_are_the_same_on_a_clock_that_runs_fifty_times_as_fast(
    here: Path, hurried: Callable[[], None], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for fast in (False, True):
        if fast:
            hurried()
        assert made(PLANS[what], "--time-limit", "1e7") == 0
        found.append(((here / out_of(PLANS[what])).read_bytes(), capsys.readouterr().out))
    assert found[0] == found[1]


class Ticking:
    """A clock that goes on by one second with every reading."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(effort, "monotonic", self)

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


CUTS = {  # a command and, by how often the clock may be read, a time limit that ends it half-way
    "collective plan all-reduce --fabric dgx1-v100:1 --size 16MiB": 100,
    "collective groups --fabric dgx1-v100:1 --group all-reduce:1MiB:0-3/4-7": 100,
    "collective replan all-gather --fabric dgx-a100:2 --size 16MiB --without box0/gpu5": 300,
    "pipeline plan --stages 8 --microbatches 16": 2_000,
    "layout plan " + SHARDED + " --fabric star:4": 60,
    "traffic plan --profile profile.json": 12,
    "memory pack storages.csv --effort 4": 3,
}


@pytest.mark.parametrize("command", CUTS)
def test_a_cut_is_said_by_the_exit_code_the_text_the_document_and_the_plan(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Ticking(monkeypatch)
    assert made(command, "--time-limit", str(CUTS[command])) == 5
    captured = capsys.readouterr()
    said = next(line for line in captured.out.splitlines() if line.startswith("time limit: looked at "))
    looked, of = int(said.split()[4]), int(said.split()[6])
    assert 0 <= looked < of and f"error: {said}" in captured.err and "hint: raise the time limit" in captured.err
    Ticking(monkeypatch)
    assert made(command, "--time-limit", str(CUTS[command]), "--json") == 5
    captured = capsys.readouterr()
    assert json.loads(captured.out)["cut"] == {"looked": looked, "of": of} and json.loads(captured.err)["exit_code"] == 5
    assert (here / out_of(command)).exists(), "the best so far is written"
    if command.split()[0] in ("collective", "pipeline"):
        plan = read_plan(here / "made.json")
        cut = cut_of(plan.decisions)
        assert cut is not None and cut.to_json() == {"looked": looked, "of": of}
        assert any(str(cut) in d["why"] for d in plan.decisions.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("command", "limit"), [
    ("pipeline compare --stages 8 --microbatches 16 --search 10", 2_000),
    ("collective compare all-reduce --fabric dgx1-v100:1 --sizes 1KiB:1GiB:32", 600),
    ("traffic compare --profile profile.json", 60),
    ("layout compare " + SHARDED + " --fabric star:4", 900),
])  # fmt: skip
def test_comparisons_show_what_they_have(here: Path, monkeypatch: pytest.MonkeyPatch, command: str, limit: int, capsys: Any) -> None:
    Ticking(monkeypatch)
    assert main([*command.split(), "--time-limit", str(limit), "--json"]) == 5
    cut = json.loads(capsys.readouterr().out)["cut"]
    assert 0 <= cut["looked"] < cut["of"]


@pytest.fixture
def quickly() -> Iterator[None]:
    """Ends within a minute of processor time: what is asked for takes many minutes."""
    began_s = time.process_time()
    yield
    assert time.process_time() - began_s < 120


@pytest.mark.parametrize("command", [
    "collective plan all-gather --fabric dgx-h100:64 --size 1GiB --strategy forestcoll",
    "pipeline plan --stages 48 --microbatches 256 --strategy v-min", "pipeline plan --stages 32 --microbatches 128",
    "layout plan " + SHARDED + " --fabric star:16 --search exact",
])  # fmt: skip
def test_a_limit_within_the_first_candidate_ends_it(here: Path, quickly: None, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(command, "--time-limit", "0.05") == TimeLimit.exit_code
    looked = re.search(r"time limit: (?:the search was cut short|looked at (\d+) of (\d+))", capsys.readouterr().err)
    assert looked and (looked[1] is None or int(looked[1]) < int(looked[2]))  # a fast machine ends some of the small ones


def test_packing_ends_with_what_was_placed(here: Path, quickly: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert made("memory pack many.csv --effort 100000", "--time-limit", "1") == 5
    assert re.search(r"time limit: looked at (1?[01]|[2-9]) of 12", capsys.readouterr().out)  # where kernels compile first, one of the quick ones
