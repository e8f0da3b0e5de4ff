"""`strategies list` and `strategies check`, and strategies that other packages bring: loaded when named, refused when they are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.cli import main
from meshwright.decide import collective, memory
from meshwright.decide.strategies import cite_of, options_given, outside
from meshwright.drive.strategies import decisions, listed, of_package
from meshwright.errors import StrategyNotLoaded, UnknownName

RIGHT = '''
from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.cite import FOLKLORE
from meshwright.decide.collective import CollectivePlan, CollectiveProblem, CollectiveStrategy, collective_bound
from meshwright.decide.collective.classic.direct import Direct


@dataclass(frozen=True, kw_only=True)
class Theirs(CollectiveStrategy):
    """Everybody to everybody; only all-gathers."""

    name: ClassVar[str] = "theirs"
    cite = FOLKLORE
    operations: ClassVar[tuple[str, ...]] = ("all-gather",)
    unroll: bool = True

    def plan(self, problem, *, rng):
        from meshwright.decide.collective.problem import options_of, require_operation

        collective_bound(problem)  # devices that cannot reach each other are reported as such, whatever is asked of them
        require_operation(problem, self.name, OPERATIONS)
        return replace(Direct().plan(problem, rng=rng), strategy=self.name, options=options_of(self))


OPERATIONS = Theirs.operations
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package where Python finds it: its module, and the entry points of its distribution."""

    def made(module: str, source: str, entries: str, package: str = "their-package") -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entries)
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(collective.__file__).parents[3]}")
    return made


def install_theirs(install, source: str = RIGHT) -> None:
    install("theirs", source, "[meshwright.collective]\ntheirs = theirs:Theirs\n")


def test_every_strategy_is_listed_once_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert len(rows) == sum(map(len, decisions().values())) == len({(r["decision"], r["question"], r["name"]) for r in rows})
    ring = next(r for r in rows if r["name"] == "ring")
    assert ring["options"]["bidirectional"] is False and ring["cite"]["key"] == "patarasuk2009ring" and ring["package"] == "meshwright"
    assert main(["strategies", "list", "pipeline"]) == 0
    text = capsys.readouterr().out
    assert "zbv" in text and "ring" not in text and "no options" in text
    assert main(["strategies", "list", "weather"]) == 2
    assert "there is no decision 'weather'" in capsys.readouterr().err


def test_theirs_is_loaded_when_it_is_named_and_only_then(install, capsys: pytest.CaptureFixture[str]) -> None:
    install_theirs(install)
    assert "theirs" in [found.name for found in outside("collective", collective.STRATEGIES)] and "theirs" not in sys.modules
    words = ["all-gather", "--fabric", "laptop:3", "--size", "3KiB"]
    assert main(["collective", "plan", *words, "--json"]) == 0
    assert "theirs" not in capsys.readouterr().out and "theirs" not in sys.modules
    assert main(["collective", "plan", *words, "--strategy", "theirs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "theirs"
    assert cite_of("collective", collective.STRATEGIES, "theirs") is collective.strategy("theirs").cite
    assert main(["collective", "plan", *words, "--strategy", "his"]) == 2
    assert "theirs" in capsys.readouterr().err  # among those there are
    assert main(["strategies", "list", "collective"]) == 0
    assert "[package their-package]" in capsys.readouterr().out


def test_a_plan_without_its_package_has_no_citation_of_it() -> None:
    assert cite_of("collective", collective.STRATEGIES, "theirs") is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise OSError('no disk')", "OSError: no disk"), ("", "AttributeError"), ("Theirs = 3", "not a dataclass"),
        (RIGHT.replace('= "theirs"', '= "ours"'), "its name is 'ours'"), (RIGHT.replace("cite = FOLKLORE", "cite = 'me'"), "no `cite`"),
        (RIGHT.replace("def plan(", "plan = 3\n\n    def other("), "no method `plan`"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_names_its_package(install, source: str, says: str) -> None:
    install_theirs(install, source)
    with pytest.raises(StrategyNotLoaded, match="their-package") as refused:
        collective.strategy("theirs")
    assert says in str(refused.value) and refused.value.data["package"] == "their-package" and refused.value.hint
    with pytest.raises(StrategyNotLoaded):
        listed("collective")


def test_an_option_needs_a_default(install) -> None:
    install_theirs(install, RIGHT.replace("unroll: bool = True", "unroll: bool"))
    with pytest.raises(StrategyNotLoaded, match="option without a default"):
        listed("collective")


def test_a_name_is_taken_once(install, capsys: pytest.CaptureFixture[str]) -> None:
    install("theirs", RIGHT, "[meshwright.collective]\nring = theirs:Theirs\n")
    assert main(["collective", "plan", "all-gather", "--fabric", "laptop:2", "--size", "2KiB", "--strategy", "ring"]) == 2
    assert "package their-package" in (said := capsys.readouterr().err) and "'ring' is taken by meshwright" in said


def test_two_packages_do_not_share_a_name(install) -> None:
    install_theirs(install)
    install("others", RIGHT, "[meshwright.collective]\ntheirs = others:Theirs\n", "other-package")
    with pytest.raises(StrategyNotLoaded, match=r"taken by (their|other)-package"):
        collective.strategy("theirs")


def test_a_strategy_answers_its_own_question(install) -> None:
    install("theirs", RIGHT, "[meshwright.memory]\ntheirs = theirs:Theirs\n")
    with pytest.raises(UnknownName, match="answers None, not 'step'"):
        memory.strategy("theirs", "step")


def test_options_given_are_those_that_differ_and_those_that_are_told() -> None:
    classic = collective.strategy("classic")()  # one of its defaults is made anew
    assert options_given(classic) == {} and options_given(classic, ("unroll",)) == {"unroll": True}
    assert options_given(collective.Ring(rings=2)) == {"rings": 2}


@pytest.mark.slow
def test_the_battery_passes_what_is_right_and_stops_what_is_not(install, capsys: pytest.CaptureFixture[str]) -> None:
    install_theirs(install)
    assert main(["strategies", "check", "their_package", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["strategies"] == {"collective": ["theirs"]} and len(found["tests"]) >= 10
    assert {t["outcome"] for t in found["tests"]} == {"passed"} and {t["strategy"] for t in found["tests"]} == {"Theirs"}


@pytest.mark.slow
def test_the_battery_stops_what_says_wrong_things_of_itself(install, capsys: pytest.CaptureFixture[str]) -> None:
    install_theirs(install, RIGHT.replace("OPERATIONS = Theirs.operations", "OPERATIONS = ('all-gather', 'broadcast')"))
    assert main(["strategies", "check", "their-package"]) == 4
    text = capsys.readouterr().out
    assert "failed: collective test_what_it_says_of_itself_is_true [Theirs]" in text and "DID NOT RAISE" in text


def test_what_cannot_be_checked(install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["strategies", "check", "numpy"]) == 2
    assert "no installed package 'numpy' brings strategies" in capsys.readouterr().err
    install_theirs(install)
    with pytest.raises(UnknownName, match="brings strategies") as refused:
        of_package("numpy")
    assert "their-package" in refused.value.hint
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="", stderr="Killed\n", returncode=-9))
    assert main(["strategies", "check", "their-package"]) == 1
    assert "the batteries did not run: Killed" in capsys.readouterr().err
    there = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "pytest" else there(name))
    assert main(["strategies", "check", "their-package"]) == 2
    assert "needs the package 'pytest'" in capsys.readouterr().err


def test_the_battery_says_what_is_wrong_with_a_package(install) -> None:
    """Called by itself, it answers in the same form."""
    install_theirs(install, "raise OSError('no disk')")
    done = subprocess.run([sys.executable, "-m", "meshwright.testing.contracts", "their-package"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["code"] == "strategy-not-loaded"
