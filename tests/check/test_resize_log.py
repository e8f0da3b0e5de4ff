"""The checker of resize logs: right ones pass, every kind of mistake is found with window and tenant."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from meshwright.check.resize import check_resize_log
from meshwright.cluster.demand import synthetic_demand
from meshwright.cluster.resize import ResizeLog, Rules
from meshwright.decide.cluster.resize import NAMES
from meshwright.drive.resize import resize_simulated
from meshwright.errors import FormatError, UsageError
from meshwright.io.cluster.resize import PriorFile, read_prior, read_resize_log, write_prior, write_resize_log
from meshwright.io.limits import MaxBytes


def a_log() -> ResizeLog:
    tenants, demand = synthetic_demand(3, 40, seed=4, day_windows=20, window_s=4320.0)
    start = np.maximum(1, np.array(tenants.most) // 4)
    tenants = msgspec.structs.replace(tenants, node=(0, 1, 0), capacity=(int(start[0] + start[2]) + 1, 40), critical=(False, True, False))
    rules = Rules(hold_windows=2, explore=0.2)
    log = resize_simulated(tenants, demand, NAMES["squarecb"](gamma=0.1), rules=rules, start=start, record=True).log
    assert log is not None
    return log


LOG = a_log()


def changed(number: int, **columns) -> ResizeLog:
    """The log with entries of a window changed: column -> (tenant, value)."""
    row = LOG.windows[number]
    new = {}
    for name, (i, value) in columns.items():
        entries = list(getattr(row, name))
        entries[i] = value
        new[name] = tuple(entries)
    rows = list(LOG.windows)
    rows[number] = msgspec.structs.replace(row, **new)
    return msgspec.structs.replace(LOG, windows=tuple(rows))


def test_a_right_log_passes_and_has_seen_everything():
    assert check_resize_log(LOG).ok
    assert {k for row in LOG.windows for k in row.chosen} >= {0, 1, 2} and LOG.total is not None and LOG.total.violations > 0
    part = msgspec.structs.replace(LOG, total=None)
    assert check_resize_log(part).ok and "did not come to its end" in check_resize_log(part).notes[0]


@pytest.mark.parametrize(
    ("number", "columns", "said"),
    [
        (5, {"before": (0, 999)}, "allowed are"), (5, {"propensity": (0, (0.5, 0.4, 0.0, 0.0))}, "add up to"),
        (5, {"propensity": (1, (0.0, 0.9, 0.1, 0.0)), "allowed": (1, 6)}, "is explored"),
        (5, {"propensity": (0, (0.0, 0.0, 0.0, 1.0))}, "not allowed"),
        (5, {"chosen": (0, 3)}, "has no propensity"), (5, {"allowed": (0, 15)}, "the rules allow"), (5, {"violated": (1, True)}, "the rules allow"),
        (5, {"used": (0, float("nan"))}, "cannot be"), (5, {"chosen": (0, 7)}, "cannot be"), (5, {"propensity": (0, (1.0,))}, "not one entry"),
    ],
)  # fmt: skip
def test_mistakes_are_found(number, columns, said):
    if "violated" in columns and LOG.windows[number].violated[columns["violated"][0]]:
        columns = {"violated": (columns["violated"][0], False)}
    verdict = check_resize_log(changed(number, **columns))
    assert verdict.status == "wrong" and any(said in f.message for f in verdict.findings), verdict.findings
    assert all("window" in f.witness or "total" in f.message for f in verdict.findings)


def test_rows_that_do_not_follow_and_totals_that_do_not_add_up():
    rows = (*LOG.windows[:5], *LOG.windows[6:])
    assert "does not follow" in check_resize_log(msgspec.structs.replace(LOG, windows=rows)).findings[0].message
    i, number = next((i, n) for n, row in enumerate(LOG.windows[:-1]) for i, k in enumerate(row.chosen) if k == 2)
    row = LOG.windows[number + 1]
    stays = tuple(b - 1 if k == i else b for k, b in enumerate(row.before))  # it was to grow
    late = msgspec.structs.replace(LOG, windows=(*LOG.windows[: number + 1], msgspec.structs.replace(row, before=stays), *LOG.windows[number + 2 :]))
    assert any("and has" in f.message for f in check_resize_log(late).findings)
    for wrong in ({"unit_hours": LOG.total.unit_hours * 1.01}, {"violations": LOG.total.violations + 1}):
        total = msgspec.structs.replace(LOG, total=msgspec.structs.replace(LOG.total, **wrong))
        assert any("the total says" in f.message for f in check_resize_log(total).findings)
    tight = msgspec.structs.replace(LOG, tenants=msgspec.structs.replace(LOG.tenants, capacity=(1, 40)))
    assert any("more are given" in f.message for f in check_resize_log(tight).findings)


def test_files_come_back_and_a_killed_run_leaves_its_windows(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    write_resize_log(path, LOG)
    assert read_resize_log(path) == LOG
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 5])
    assert read_resize_log(path) == msgspec.structs.replace(LOG, total=None)
    lines = data.split(b"\n")
    for wrong in (b"", b"{}\n", lines[0], b"\n".join([lines[0], b'{"window": 1}', b""]), b"\n".join([lines[1], b""])):
        path.write_bytes(wrong)
        with pytest.raises(FormatError):
            read_resize_log(path)
    with pytest.raises(UsageError):
        write_resize_log(tmp_path / "no/such/folder", LOG)
    with monkeypatch.context() as small, pytest.raises(FormatError, match="larger than"):
        path.write_bytes(data)
        small.setattr(MaxBytes, "RESIZE_LOG", 100)
        read_resize_log(path)
    prior = PriorFile(resource="cpu", knots=(1.0,), squares=((1.0, 0.0), (0.0, 2.0)), products=(0.5, 0.25), rows=2.0)
    write_prior(tmp_path / "p.json", prior)
    assert read_prior(tmp_path / "p.json") == prior
    write_prior(tmp_path / "p.json", msgspec.structs.replace(prior, products=(1.0,)))
    with pytest.raises(FormatError, match="as long as"):
        read_prior(tmp_path / "p.json")
