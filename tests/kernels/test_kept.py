"""Compiled kernels find a place where nothing else can be written: read-only package and home, no home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.kernels import kept


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No place can be written but a temporary folder, which is given."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none")
    monkeypatch.setattr(kept, "_writable", lambda place: False)
    monkeypatch.setattr(kept, "_fallback", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_this_users_alone(nowhere: Path) -> None:
    kept.ensure_place()
    folder = Path(kept.fallback_in_use())
    assert folder.parent == nowhere and os.environ["NUMBA_CACHE_DIR"] == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    kept.ensure_place()
    assert kept.fallback_in_use() == str(folder), "the same one is used again"


@pytest.mark.parametrize("trap", ["open to others", "a link"])
def test_a_folder_that_others_could_write_is_not_used(nowhere: Path, trap: str) -> None:
    """numba runs what it finds there."""
    expected = nowhere / f"meshwright-kernels-{os.getuid()}"
    if trap == "a link":
        (nowhere / "elsewhere").mkdir(mode=0o700)
        expected.symlink_to(nowhere / "elsewhere")
    else:
        expected.mkdir()
        expected.chmod(0o777)
    kept.ensure_place()
    assert Path(kept.fallback_in_use()) != expected and Path(kept.fallback_in_use()).stat().st_mode & 0o777 == 0o700


def test_nothing_is_done_where_there_is_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "to be made"))
    monkeypatch.setattr(kept, "_fallback", "")
    kept.ensure_place()
    assert kept.fallback_in_use() == "" and os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "to be made")
    assert not (tmp_path / "to be made").exists()


def test_what_can_be_written(tmp_path: Path) -> None:
    assert kept._writable(tmp_path) and kept._writable(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert not kept._writable(tmp_path / "file")


def test_the_users_cache_is_named_only_where_it_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a home, and where it is read-only, what would be kept is not."""
    from meshwright.probe.steps.costs import costs_file
    from meshwright.run.group.plan_cache import cache_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.user_cache("meshwright") == tmp_path / "meshwright" and not (tmp_path / "meshwright").exists()
    assert costs_file() == tmp_path / "meshwright" / "step-costs.json" and cache_folder("") == tmp_path / "meshwright" / "plans"
    monkeypatch.setattr(kept, "_writable", lambda place: False)
    assert kept.user_cache("meshwright") is costs_file() is cache_folder("") is None
    monkeypatch.undo()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert kept.user_cache("meshwright") is costs_file() is cache_folder("") is None


@pytest.mark.interpreter
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, to mount folders read-only")
@pytest.mark.parametrize("home", ["/root", None])
def test_kernels_are_made_where_package_and_home_are_read_only(home: str | None, tmp_path: Path) -> None:
    """It is said in one line where they are; numba alone would refuse."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts are not allowed here")
    package, temporary = Path(kept.__file__).parents[1], tmp_path / "größe mit leer"
    temporary.mkdir()
    read_only = "".join(f"mount --bind {p} {p} && mount -o remount,bind,ro {p} || exit 9; " for p in (package, "/root"))
    code = "import meshwright.kernels.select; from meshwright.cli.frame import _say_where_kernels_are_kept as say; say()"
    a_kernel = f"compile('@njit(cache=True)\\ndef f(): pass', '{package}/kernels/select.py', 'exec')"
    alone = f"from numba import njit; exec({a_kernel})"
    environment = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "PYTHONPYCACHEPREFIX")}
    environment |= {"PYTHONPATH": str(package.parent), "TMPDIR": str(temporary), **({"HOME": home} if home else {})}
    said = {}
    for what in (code, alone):
        command = ["unshare", "--mount", "bash", "-c", f'{read_only} exec "{sys.executable}" -c "$0"', what]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode != 9, done.stderr
        said[what] = (done.returncode, done.stderr)
    assert said[alone][0] == 1 and "no locator available" in said[alone][1]
    assert said[code][0] == 0, said[code][1]
    assert said[code][1].count("\n") == 1 and said[code][1].startswith(f"note: compiled kernels are kept in {temporary}/meshwright-kernels-0")
