"""Lists and help are readable in 80 columns, and one line each where nothing says how wide lines may be."""

from __future__ import annotations

import pytest

from meshwright.cli import main


@pytest.mark.parametrize("command", ["--help", "train --help", "fabric list"])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> None:
    def lines(columns: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", columns)
        assert main(command.split()) == 0
        return capsys.readouterr().out.splitlines()

    narrow, wide = lines("80"), lines("100000")
    assert max(map(len, narrow)) <= 80 < max(map(len, wide)) and len(narrow) > len(wide)
    assert " ".join(narrow).split() == " ".join(wide).split()
