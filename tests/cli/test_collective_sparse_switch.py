"""`collective sparse-switch`: levels, memory and the best way, as text and as JSON; wrong arguments."""

from __future__ import annotations

import json

import pytest

from meshwright.cli.frame import main

WORDS = ["collective", "sparse-switch", "--tree", "2,4", "--density", "0.01", "--size", "1MiB", "--rate", "100Gbit/s"]


def test_what_it_says(capsys):
    assert main(WORDS) == 0
    said = capsys.readouterr().out
    assert "8 hosts, 262144 elements" in said and "4 hosts" in said and "down: " in said and said.count("* ") == 1
    assert main([*WORDS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hosts"] == 8 and [level["hosts_below"] for level in document["levels"]] == [1, 4]
    assert document["chosen"] == min(document["times_s"], key=document["times_s"].get)


@pytest.mark.parametrize(
    ("words", "where"),
    [(["--tree", "2,x"], "--tree"), (["--tree", "0"], "--tree"), (["--density", "2"], "density"), (["--packet", "1B"], "packet"),
     (["--size", "0"], "holds no element"), (["--tree", "65536,65536,65536,65536", "--density", "0"], "elements of all hosts together")],
)
def test_wrong_arguments(capsys, words, where):
    assert main([*WORDS, *words]) == 2
    assert where in capsys.readouterr().err
