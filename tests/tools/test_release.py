"""tools/release refuses what is no release, and says why; what it builds works without torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import one_interpreter

ROOT = Path(__file__).parents[2]
_loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "tools" / "release"))
_spec = importlib.util.spec_from_loader("release", _loader)
assert _spec
release = importlib.util.module_from_spec(_spec)
_loader.exec_module(release)

LOG = "# Changelog\n\n## 0.2.0 (2026-01-02)\n\n- new\n\n## 0.1.0 (unreleased)\n\n- first\n"


def test_the_version_is_the_same_everywhere() -> None:
    assert len(set(release.versions().values())) == 1 and len(release.versions()) == 3


def test_notes_are_the_section_of_the_version() -> None:
    assert release.notes(LOG, "0.2.0") == ("2026-01-02", "- new\n")
    assert release.notes(LOG, "0.1.0") == ("unreleased", "- first\n")
    with pytest.raises(release.Refused, match=r"no section for 0\.3\.0"):
        release.notes(LOG, "0.3.0")


def test_a_version_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "versions", lambda: {"a": "1", "b": "2"})
    with pytest.raises(release.Refused, match="a says 1, b says 2"):
        release.checked_version([])


def test_a_command_that_fails_ends_the_release(tmp_path: Path) -> None:
    with pytest.raises(release.Refused, match="exit 3 failed"):
        release.run("sh", "-c", "exit 3", cwd=tmp_path)


def test_a_wheel_with_strangers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without_pip(*command: str, cwd: Path, env: object = None) -> str:
        with zipfile.ZipFile(tmp_path / "meshwright-0.1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tests/x.py", "")
            wheel.writestr("meshwright/__init__.py", "")
        return ""

    monkeypatch.setattr(release, "run", without_pip)
    with pytest.raises(release.Refused, match=r"py\.typed.*tests"):
        release.built(tmp_path)


@pytest.mark.interpreter
def test_without_torch_the_package_plans_bounds_and_checks(tmp_path: Path) -> None:
    """The commands that a release runs in an environment without torch, with torch made impossible to import."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1))" + one_interpreter.PROGRAM + one_interpreter.SAYS
    asked = [*release.WITHOUT_TORCH, ("train", "capture", "--model", f"{ROOT}/examples/gpt.py:tiny", "--out", "g.json")]
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(asked)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    *good, (refused, _, why) = json.loads(done.stdout)
    for words, (status, _, err) in zip(release.WITHOUT_TORCH, good, strict=True):
        assert status == 0, (words, err)
    assert refused == 2 and "pip install" in why and "Traceback" not in why
