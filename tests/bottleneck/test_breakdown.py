"""Planted causes in CUDA-like traces are found and named; clocks are recovered; the path tiles the run; what does not belong together is refused."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from cuda_traces import Maker, Settings, write_ranks

from meshwright.bottleneck.breakdown import break_down
from meshwright.bottleneck.from_trace import rank_view
from meshwright.bottleneck.lanes import Kind
from meshwright.bottleneck.table import COLUMNS
from meshwright.cli.frame import main
from meshwright.errors import FormatError, UsageError
from meshwright.io.trace.read import read_trace


def broken_down(folder, settings):
    return break_down([rank_view(read_trace(p)) for p in write_ranks(folder, settings)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("plant", "kind", "where"),
    [
        ({"slow_data_rank": 1, "slow_data_us": 900.0}, "data stall", "load data on rank 1"),
        ({"copy_in": (2, 900.0)}, "copies", "module layers.2"),
        ({"slow_rank": (1, 2.5)}, "slow rank", "rank 1"),
        ({"kernel_us": 2.0, "collective_us": 5.0, "data_us": 5.0, "launch_us": 12.0}, "launch-bound", "stage forward"),
        ({"collective_us": 1500.0}, "exposed communication", "allreduce of group 0"),
    ],
)
def test_the_planted_cause_comes_first(tmp_path, plant, kind, where, seed):
    found = broken_down(tmp_path, Settings(seed=seed, ranks=2 + seed, skew_us=50.0 * seed, **plant))
    first = found.causes[0]
    assert (first.kind, first.where) == (kind, where)
    assert 0 < first.gain_s <= first.path_s <= found.step_s


def test_the_path_tiles_the_run_and_tables_add_up(tmp_path):
    found = broken_down(tmp_path, Settings(ranks=3, seed=5))
    links = found.path.links
    assert (links.start[1:] == links.end[:-1]).all() and (links.end > links.start).all()
    assert int(links.start[0]) == found.path.start and int(links.end[-1]) == found.path.end
    assert found.path.start == min(int(v.host.start[0]) for v in found.views)
    assert found.path.end == max(max(int(v.host.end[-1]), int(v.device.work.end.max())) for v in found.views)
    for times in found.times:
        assert sum(times.total[c] for c in COLUMNS) == pytest.approx(times.step_s, rel=1e-12)
        assert sum(sum(s.values()) for s in times.stages.values()) == pytest.approx(times.step_s, rel=1e-12)
        assert 0 < times.overlap_s < times.communication_s < times.step_s


@pytest.mark.parametrize("skew_us", [0.0, 333.0, -2500.0])
def test_clocks_are_recovered_within_what_is_stated(tmp_path, skew_us):
    found = broken_down(tmp_path, Settings(ranks=4, skew_us=skew_us, seed=1))
    for rank in range(1, 4):
        error = abs(found.clocks.shift_ns[rank] + 1000 * skew_us * rank)
        assert error < 2000 and error <= found.clocks.uncertain_ns[rank]


@pytest.mark.parametrize("seed", range(2))
def test_ranks_of_one_machine_share_its_clock(tmp_path, seed):
    """A rank that leaves collectives late, as gloo's do on busy cores, seems to have another clock, unless the trace names its machine."""
    late, ahead = (1, 60.0), (0.0, 0.0, 900.0, 900.0)
    told = broken_down(tmp_path, Settings(ranks=4, seed=seed, leaves_late=late, hosts=("a", "a", "b", "b"), skews_us=ahead))
    assert told.clocks.shift_ns[:2] == (0, 0) and told.clocks.uncertain_ns[:2] == (0, 0)
    assert told.clocks.shift_ns[2] == told.clocks.shift_ns[3] == pytest.approx(-900_000, abs=1000)
    assert told.clocks.spread_ns[1] == pytest.approx(60_000, abs=1000)
    untold = broken_down(tmp_path, Settings(ranks=4, seed=seed, leaves_late=late, skews_us=ahead))
    assert untold.clocks.shift_ns[1] == pytest.approx(-60_000, abs=1000)


def test_equal_host_names_of_two_machines_do_not_join_their_clocks(tmp_path):
    """All containers may be called localhost. No one shift fits then, so each rank has its own."""
    found = broken_down(tmp_path, Settings(ranks=3, seed=1, hosts=("localhost",) * 3, skews_us=(0.0, 40_000.0, -70_000.0)))
    assert found.clocks.shift_ns == (0, pytest.approx(-40_000_000, abs=2000), pytest.approx(70_000_000, abs=2000))


def test_one_machine_is_said(tmp_path, capsys):
    paths = write_ranks(tmp_path, Settings(ranks=2, seed=1, hosts=("a", "a"), leaves_late=(1, 60.0)))
    assert main(["trace", "breakdown", *map(str, paths)]) == 0
    assert "rank 1: on the machine of rank 0, so on its clock; ends of collectives differ by 60 us in the middle" in capsys.readouterr().out


def test_no_clock_within_the_interval_breaks_causality_and_one_outside_does(tmp_path):
    settings = Settings(ranks=2, seed=3)
    views = [rank_view(read_trace(p)) for p in write_ranks(tmp_path, settings)]
    found = break_down(views)
    a, b = found.views[0].meetings, found.views[1].meetings
    slack = min(int((a.leaves - b.arrives).min()), int((b.leaves - a.arrives).min()))
    assert slack >= 0
    reach = max(int((a.leaves - b.arrives).min()), int((b.leaves - a.arrives).min()))
    assert found.clocks.uncertain_ns[1] == reach  # the further end of the interval


def test_stragglers_are_named_per_collective_and_in_total(tmp_path):
    found = broken_down(tmp_path, Settings(ranks=3, slow_rank=(2, 2.0), seed=2))
    assert {s.rank for s in found.stragglers} == {2} and all(s.sure for s in found.stragglers)
    arrives = np.array([v.meetings.arrives for v in found.views])
    for i, s in enumerate(found.stragglers):
        times = np.sort(arrives[:, i])
        assert s.gain_s == pytest.approx((times[-1] - times[-2]) / 1e9)
        assert s.waited_s == pytest.approx(float((times[-1] - times).sum()) / 1e9)


def test_links_of_waiting_never_hide_work(tmp_path):
    """Kinds on the path are work or transfers: no link waits for something that the traces explain."""
    found = broken_down(tmp_path, Settings(ranks=2, seed=4))
    length = found.path.links.end - found.path.links.start
    assert length[np.isin(found.path.links.kind, (Kind.WAIT, Kind.IDLE))].sum() < 0.02 * length.sum()


# ---- bad input
def test_one_rank_cut_short_is_told(tmp_path):
    one, two = write_ranks(tmp_path, Settings(steps=4))
    text = gzip.decompress(two.read_bytes())
    two.write_bytes(gzip.compress(text[: int(0.6 * len(text))]))
    found = break_down([rank_view(read_trace(p), rank=i) for i, p in enumerate((one, two))])
    said = " ".join(found.warnings)
    assert "rank 1 has 2 of 4 steps" in said and "ends early" in said


def test_no_steps_no_operators_and_foreign_ranks(tmp_path, capsys):
    one, _ = write_ranks(tmp_path, Settings())
    document = json.loads(gzip.decompress(one.read_bytes()))
    bare = {**document, "traceEvents": [e for e in document["traceEvents"] if not e["name"].startswith("ProfilerStep")]}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    assert main(["trace", "breakdown", str(tmp_path / "bare.json")]) == 0
    assert "no ProfilerStep in the trace: the whole of it counts as one step" in capsys.readouterr().out
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    assert main(["trace", "breakdown", str(tmp_path / "empty.json")]) == 1
    assert "holds no operator of a host thread" in capsys.readouterr().err
    assert main(["trace", "breakdown", str(one), str(one)]) == 2
    assert "rank 0 is there more than once" in capsys.readouterr().err
    for r, other in enumerate(Maker(Settings(ranks=3)).documents()[:2]):
        (tmp_path / f"other{r}.json").write_text(json.dumps(other))
    assert main(["trace", "breakdown", str(one), str(tmp_path / "other1.json")]) == 2
    assert "different numbers of ranks" in capsys.readouterr().err
    assert main(["trace", "breakdown", str(one)]) == 0
    assert "1 of 2 ranks are missing (1)" in capsys.readouterr().out
    assert main(["trace", "breakdown", str(one), "--limit", "0"]) == 2
    (tmp_path / "none").mkdir()
    assert main(["trace", "breakdown", str(tmp_path / "none")]) == 2
    assert "holds no trace" in capsys.readouterr().err
    assert main(["trace", "breakdown", str(tmp_path / "none"), str(one)]) == 2
    assert "give it alone" in capsys.readouterr().err


def test_a_folder_of_traces_is_its_files(tmp_path, capsys):
    files = write_ranks(tmp_path, Settings(ranks=3))
    (tmp_path / "modules.json").write_text('{"schema": "meshwright.module-tree"}')
    assert main(["trace", "breakdown", *map(str, files), "--json"]) == 0
    by_name = capsys.readouterr().out
    assert main(["trace", "breakdown", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == by_name


def test_ranks_of_different_runs_are_refused(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    one, _ = write_ranks(tmp_path / "a", Settings(steps=4))
    _, two = write_ranks(tmp_path / "b", Settings(steps=4, kernel_us=500.0, seed=9))
    with pytest.raises(FormatError, match="no shift of rank 1's clock fits"):
        break_down([rank_view(read_trace(p)) for p in (one, two)])
    document = json.loads(gzip.decompress(two.read_bytes()))
    document["baseTimeNanoseconds"] += 7200 * 10**9
    path = tmp_path / "later.json"
    path.write_text(json.dumps(document))
    with pytest.raises((UsageError, FormatError)):
        break_down([rank_view(read_trace(p)) for p in (one, path)])
    same = write_ranks(tmp_path, Settings())
    document = json.loads(gzip.decompress(same[1].read_bytes()))
    document["baseTimeNanoseconds"] += 7200 * 10**9
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="differ by 7200 s: these are not of one run"):
        break_down([rank_view(read_trace(p)) for p in (same[0], path)])
    document["traceEvents"] = [e for e in document["traceEvents"] if "nccl" not in e["name"]]
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="no collective in common"):
        break_down([rank_view(read_trace(p)) for p in (same[0], path)])


def test_document(tmp_path, capsys):
    paths = write_ranks(tmp_path, Settings(slow_data_rank=0, slow_data_us=800.0))
    assert main(["trace", "breakdown", *map(str, paths), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"]) == ("meshwright.trace-breakdown", 1)
    assert document["bottlenecks"][0]["kind"] == "data stall" and document["bottlenecks"][0]["rank"] == 1
    assert len(document["stragglers"]["collectives"]) == 6
    assert {"idle_total_s", "overlap_share"} <= document["ranks"][0]["device"].keys()
