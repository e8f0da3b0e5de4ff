"""Places that are not what one expects: a full disk, no home, an ASCII locale, names with spaces and umlauts, one device, an old Python."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import meshwright
from meshwright.cli import frame, main

FABRIC = """schema = "meshwright.fabric"
version = 1
name = "büro"
devices = [{ name = "gerät", count = 2 }]
links = [{ src = "gerät0", dst = "gerät1", rate = "1GB/s", both_ways = true }]
"""


def started(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """In an environment of its own: no HOME, no locale, nothing of ours but what is needed."""
    own = {name: os.environ[name] for name in ("PATH", "NUMBA_CACHE_DIR", "MESHWRIGHT_PROGRESS")}
    own["PYTHONPATH"] = str(Path(meshwright.__file__).parents[1])
    command = [sys.executable, "-m", "meshwright", *words]
    return subprocess.run(command, cwd=cwd, env=own | environment, capture_output=True, timeout=120, check=False)


def test_a_full_disk_is_said_with_a_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["collective", "plan", "all-gather", "--fabric", "laptop:2", "--size", "1KiB", "--strategy", "ring", "--out", "p.json"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["report", "p.json", "-o", "/dev/full"]) == 1
    assert capsys.readouterr().err == "error: /dev/full: cannot write: No space left on device\nhint: free space, or name a place on another disk\n"


def test_without_home_in_an_ascii_locale_names_read_as_they_were_typed(tmp_path: Path) -> None:
    place = tmp_path / "mit Leerzeichen ü"
    place.mkdir()
    (place / "größe 1.toml").write_text(FABRIC, encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    done = started("fabric", "show", "größe 1.toml", cwd=place, **ascii_only)
    assert done.returncode == 0 and done.stdout.startswith(b"fabric b\\xfcro\n") and not done.stderr
    done = started("fabric", "show", "größe 1.toml", cwd=place)  # the C locale, in which Python takes UTF-8
    assert done.returncode == 0 and done.stdout.startswith("fabric büro\n".encode()) and not done.stderr
    done = started("fabric", "show", "größe 2.toml", cwd=place, **ascii_only)
    assert done.returncode == 2 and done.stderr.startswith("error: größe 2.toml: cannot read".encode())


def test_a_closed_standard_output_is_nobody_who_listens(tmp_path: Path) -> None:
    """`>&-`, as daemons start programs: the command works, nothing is said, and no file gets the number of standard output."""
    script = 'exec "$0" -m meshwright collective bound all-gather --fabric laptop:2 --size 1KiB >&- 2>&-'
    own = os.environ | {"PYTHONPATH": str(Path(meshwright.__file__).parents[1])}
    done = subprocess.run(["sh", "-c", script, sys.executable], cwd=tmp_path, env=own, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr, list(tmp_path.iterdir())) == (0, b"", b"", [])


def test_a_folder_is_no_fabric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "show", str(tmp_path)]) == 2
    assert "is a folder, not a fabric" in capsys.readouterr().err


def test_a_name_that_the_locale_cannot_express_is_no_bug_of_ours() -> None:
    error = frame._as_typed(UnicodeEncodeError("utf-8", "net\udcc3\udca4.py", 3, 5, "surrogates not allowed"))
    assert error.exit_code == 2 and "cannot express" in error.message and "LC_ALL=C.UTF-8" in error.hint
    assert "bug in meshwright" in frame._as_typed(UnicodeEncodeError("ascii", "ä", 0, 1, "ordinal not in range")).hint


@pytest.mark.parametrize("verb", ["plan", "bound", "compare"])
def test_one_device_has_no_collective(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--sizes", "1KiB"] if verb == "compare" else ["--size", "1KiB"]
    assert main(["collective", verb, "all-reduce", "--fabric", "laptop:1", *size]) == 2
    assert capsys.readouterr().err == "error: a collective needs at least 2 ranks, got 1\nhint: name more devices\n"


def test_one_device_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "show", "laptop:1"]) == 0 and "devices   1" in capsys.readouterr().out


def test_a_word_inside_a_preset_is_answered_by_specification(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "show", "h100"]) == 2
    assert "hint: near by specification: dgx-h100" in capsys.readouterr().err


def test_an_old_python_is_refused_in_one_line() -> None:
    """The first lines are read by Python 3.8, and stop it: by an exception where it is imported, by a line where it is a command."""
    tree = ast.parse(Path(meshwright.__file__).read_text(), feature_version=(3, 8))
    (check,) = [n for n in tree.body if isinstance(n, ast.If) and "version_info" in ast.unparse(n.test)]
    assert tree.body.index(check) < next(i for i, n in enumerate(tree.body) if isinstance(n, ast.ImportFrom) and n.level)
    code = compile(ast.Module([check], []), "front", "exec")
    for argv, kind, said in ((["-m", "x"], SystemExit, "error: meshwright needs"), (["own.py"], ImportError, "meshwright needs")):
        with pytest.raises(kind, match=f"^{said} Python 3.11 or newer, this is Python 3.9: "):
            exec(code, {"sys": SimpleNamespace(version_info=(3, 9, 2), argv=argv)})
    exec(code, {"sys": SimpleNamespace(version_info=(3, 13, 0), argv=["-m"])})
