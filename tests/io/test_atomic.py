"""Files are written whole or not at all."""

import os
import stat

import pytest

from meshwright.errors import MeshwrightError, UsageError
from meshwright.io.atomic import write_bytes, write_text


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "f"
    write_bytes(path, b"one")
    write_text(path, "zwölf")
    assert path.read_text() == "zwölf" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_bytes(path, b"old")

    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):

        def fail(fd, error=error):
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises((MeshwrightError, KeyboardInterrupt)) as caught:
            write_bytes(path, b"new")
        if isinstance(error, OSError):
            assert str(caught.value) == f"{path}: cannot write: No space left on device"
        assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_modes(tmp_path):
    path = tmp_path / "f"
    before = os.umask(0o027)
    try:
        write_bytes(path, b"x")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_bytes(path, b"y")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"y")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "y"


def test_a_pipe_is_written_directly(tmp_path):
    reader, writer = os.pipe()
    write_bytes(f"/dev/fd/{writer}", b"through")
    os.close(writer)
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_refused(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        write_bytes(tmp_path, b"")
    with pytest.raises(UsageError, match="does not exist"):
        write_bytes(tmp_path / "no" / "f", b"")
    (tmp_path / "f").write_text("")
    with pytest.raises(UsageError, match="cannot write: Not a directory"):
        write_bytes(tmp_path / "f" / "g", b"")
