"""Profiles of commands: few points give the whole matrix; noise is made monotone; a real command under real limits."""

from __future__ import annotations

import itertools
import json
import sys

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.errors import RunError, UsageError
from meshwright.io.cluster import read_queue
from meshwright.probe.speeds.sensitivity import Timing, isotonic, measure_rate, profiled
from meshwright.run.machine.limits import Limits

CORES, MEMORY = (1, 2, 3, 4, 5, 6, 7, 8), (10, 20, 30)


def can_limit() -> bool:
    try:
        with Limits(cores=0.5, memory_bytes=64 << 20):
            return True
    except RunError:
        return False


limited = pytest.mark.skipif(not can_limit(), reason="no control groups with cpu and memory can be made here")


def test_isotonic_is_the_nearest():
    for seed in range(20):
        values = np.random.default_rng(seed).integers(0, 4, 5).astype(float)
        found = isotonic(values.tolist())
        assert (np.diff(found) >= -1e-12).all()
        # The best block means over all ways to cut the sequence into blocks.
        best = min(
            sum(((values[a:b] - values[a:b].mean()) ** 2).sum() for a, b in itertools.pairwise((0, *cuts, 5)))
            for n in range(5) for cuts in itertools.combinations(range(1, 5), n)
            if (np.diff([values[a:b].mean() for a, b in itertools.pairwise((0, *cuts, 5))]) >= -1e-12).all()
        )  # fmt: skip
        assert ((found - values) ** 2).sum() == pytest.approx(best)


def test_few_points_give_the_matrix():
    def rate(c: float, m: int) -> float:
        return min(2.0 * min(c, 4), {10: 3.0, 20: 6.0, 30: 100.0}[m])

    found = profiled(rate, name="p", cores=CORES, memory_bytes=MEMORY, share=(2.0, 30))
    whole = profiled(rate, name="p", cores=CORES, memory_bytes=MEMORY, share=(2.0, 30), full=True)
    assert len(found.points) < len(whole.points) == found.grid == 24
    assert np.allclose(found.profile.speed, whole.profile.speed, rtol=0.1) and found.profile.at(2, 30) == 1.0


def test_noise_is_made_monotone_and_bad_shares_are_refused():
    noisy = profiled(lambda c, m: c + (0.5 if c == 3 else 0), name="n", cores=(1, 2, 3, 3.2, 4), memory_bytes=(5,), share=(2.0, 5), differ=0.0)
    column = [row[0] for row in noisy.profile.speed]
    assert column == sorted(column) and column[2] == pytest.approx(3.35 / 2)
    with pytest.raises(UsageError, match="none of the points"):
        profiled(lambda c, m: c, name="x", cores=(1, 2), memory_bytes=(5,), share=(1.5, 5))
    with pytest.raises(RunError, match="does not run at its share"):
        profiled(lambda c, m: 0.0, name="x", cores=(1, 2), memory_bytes=(5,), share=(1.0, 5))
    with pytest.raises(UsageError, match="at most"):
        profiled(lambda c, m: c, name="x", cores=range(1, 5000), memory_bytes=(5,), share=(1.0, 5))


@pytest.mark.real
@limited
def test_commands_that_fail_say_how():
    timing = Timing(steps="step", warm_up_s=0.0, seconds=0.2, limit_s=30)
    with pytest.raises(RunError, match=r"ends with 3.*oops"):
        measure_rate(["sh", "-c", "echo oops; exit 3"], timing, cores=1.0, memory_bytes=64 << 20)
    with pytest.raises(RunError, match="0 steps"):
        measure_rate(["sh", "-c", "echo nothing"], timing, cores=1.0, memory_bytes=None)
    with pytest.raises(RunError, match="longer than"):
        measure_rate(["sleep", "100"], Timing(limit_s=0.1), cores=1.0, memory_bytes=None)
    with pytest.raises(UsageError, match="no pattern"):
        measure_rate(["true"], Timing(steps="("), cores=1.0, memory_bytes=None)
    eat = [sys.executable, "-S", "-c", "x = bytearray(200 << 20)"]
    assert measure_rate(eat, Timing(limit_s=60), cores=1.0, memory_bytes=32 << 20) == 0.0
    assert measure_rate(["true"], Timing(limit_s=60), cores=1.0, memory_bytes=None) > 0


@pytest.mark.real
@limited
def test_the_command_line_writes_a_profile(tmp_path, capsys):
    out = tmp_path / "p.json"
    work = "import time\nwhile True:\n    sum(range(20000)); print('step', flush=True)"
    words = ["--cores", "0.1,0.4", "--memory", "64MB", "--share", "0.1,64MB", "--steps", "^step", "--warm-up", "100ms", "--seconds", "500ms"]
    code = main(["cluster", "profile", *words, "--name", "adder", "--out", str(out), "--json", "--", sys.executable, "-S", "-c", work])
    said = json.loads(capsys.readouterr().out)
    assert code == 0 and said["name"] == "adder" and len(said["points"]) == 2 and said["speed"][0] == [1.0] and said["speed"][1][0] >= 1.0
    profile = read_queue(out).profiles[0]
    assert profile.name == "adder" and profile.cores == (0.1, 0.4)


@pytest.mark.parametrize(("words", "says"), [
    ([], "there is no command"), (["--cores", "x", "--", "true"], "--cores"), (["--cores", "0", "--", "true"], "--cores"),
    (["--memory", "5", "--", "true"], "--memory"), (["--share", "q,1GB", "--", "true"], "--share"), (["--seconds", "5", "--", "true"], "--seconds"),
    (["--read-rate", "fast", "--", "true"], "--read-rate"), (["--share", "9,1GB", "--", "true"], "none of the points"),
])  # fmt: skip
def test_refusals(words, says, capsys):
    assert main(["cluster", "profile", *words]) == 2
    assert says in capsys.readouterr().err
