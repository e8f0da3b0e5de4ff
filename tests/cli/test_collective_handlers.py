"""`collective handlers`: the table, the choice under a memory, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.cli.frame import main

SMALL = ["collective", "handlers", "--children", "8", "--rate", "25Gbit/s", "--size", "32KiB", "--clusters", "4", "--quiet"]


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*SMALL, *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_fastest_that_fits_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys)
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == 6 and found["schema"] == "meshwright.handlers" and found["add_cycles"] == 1024
    assert found["chosen"]["time_s"] == min(row["time_s"] for row in rows.values())
    assert all(row["time_s"] >= found["line_time_s"] for row in rows.values())
    assert rows["tree"]["service_cycles"] == 1024 * 7 / 8
    least = min(row["memory_bytes"] for row in rows.values())
    tight = document(capsys, "--memory", f"{least}B")["chosen"]
    assert tight["memory_bytes"] == least
    assert document(capsys, "--reproducible")["chosen"]["design"] == "tree"


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and sum(line.startswith("* ") for line in lines) == 1


def test_what_fits_nowhere_is_infeasible(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--memory", "1B"]) == 3
    assert "no design fits" in capsys.readouterr().err


def test_a_message_without_elements_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--size", "3"]) == 2
    assert "a message of 3 bytes holds no element" in capsys.readouterr().err
