"""`meshwright cluster resize` as a user calls it."""

from __future__ import annotations

import json

import pytest

from meshwright.cli import main
from meshwright.errors import RunError
from meshwright.run.machine.limits import Limits


def allowed() -> bool:
    try:
        with Limits(cores=0.5):
            return True
    except RunError:
        return False


@pytest.mark.real
@pytest.mark.skipif(not allowed(), reason="no control groups with cpu can be made here")
def test_a_command_its_log_another_strategy_and_orders(capfd, tmp_path):
    words = ["cluster", "resize", "--cpu", "0.1-0.4", "--window", "0.1s", "--windows", "8", "--strategy", "squarecb", "--out", str(tmp_path)]
    assert main([*words, "--json", "--", "sleep", "1000"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["windows"], found["codes"], found["oom_kills"]) == (8, {"copy0": None}, 0)
    assert main(["cluster", "resize", "--from", str(tmp_path / "cpu.jsonl"), "--evaluate", "linucb", "--as", "kubernetes:prod/app", "--json"]) == 0
    read = json.loads(capfd.readouterr().out)
    assert read["status"] == "ok" and read["evaluated"]["of"] == 7 and read["orders"][0].startswith("kubectl patch pod copy0 --namespace prod ")
    assert main([*words, "--prior", str(tmp_path / "cpu.prior.json"), "--", "true"]) == 0
    assert "core-hours" in capfd.readouterr().out
    log = tmp_path / "cpu.jsonl"
    log.write_text(log.read_text().replace('"before":[4]', '"before":[3]', 1))
    assert main(["cluster", "resize", "--from", str(log)]) == 4 and "copy0" in capfd.readouterr().err


def test_virtual_time_and_refusals(capsys, tmp_path):
    assert main(["cluster", "resize", "--simulate", "20x2", "--option", "waste=0.002", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wanted_cores"] < found["mean_cores"] < found["most_cores"] and 0 < found["violations"] == round(found["rate"] * 20 * 288)
    assert main(["cluster", "resize", "--simulate", "20x2", "--prior", str(tmp_path / "cpu.prior.json")]) == 0
    assert "users asked for" in capsys.readouterr().out
    for wrong in (
        [], ["--simulate", "0x2"], ["--simulate", "20x2", "--option", "waste=x"], ["--simulate", "20x2", "--option", "colour=1"],
        ["--simulate", "20x2", "--strategy", "magic"], ["--", "true"], ["--cpu", "2-1", "--", "true"], ["--cpu", "x", "--", "true"],
        ["--memory", "1MiB-1", "--", "true"], ["--cpu", "1-2", "--copies", "0", "--", "true"], ["--from", str(tmp_path / "none")],
        ["--cpu", "1-2", "--windows", "0", "--", "true"], ["--seed", "-1", "--simulate", "20x2"],
    ):  # fmt: skip
        assert main(["cluster", "resize", *wrong]) == 2, wrong
        out, err = capsys.readouterr()
        assert not out and err.startswith("error: "), wrong
