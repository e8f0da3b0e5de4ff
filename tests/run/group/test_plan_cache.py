"""Plans kept between runs: what was put comes back for the same question only; whatever is damaged, foreign or too large is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group import plan_cache
from meshwright.run.group.plan_cache import PlanCache, cache_folder
from meshwright.run.group.plans import GroupPlans
from meshwright.run.group.settings import Settings

QUESTION = {"fabric": {"name": "f", "links": [1, 2]}, "op": "all-reduce", "class_bytes": 1 << 20}


class Store(dict[str, object]):
    """What a group asks of its rendezvous store."""

    def set(self, key: str, value: object) -> None:
        self[key] = value


def planner(folder: Path, **more: object) -> tuple[GroupPlans, Store]:
    store = Store()
    fabric = load_fabric("two-islands:2")
    settings = Settings(cache=str(folder), strategies=("ring", "rooted-tree"), builtin=False, **more)  # type: ignore[arg-type]
    return GroupPlans(settings, store, 0, 4, devices=[d.name for d in fabric.devices], fabric=fabric, timeout_s=60.0), store


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_an_answer_comes_back_for_its_question_alone(tmp_path: Path) -> None:
    kept = PlanCache(tmp_path / "a" / "b")
    assert kept.get(QUESTION) is None
    kept.put(QUESTION, b"answer\nmore")
    assert kept.get(QUESTION) == b"answer\nmore"
    for field, value in (("op", "broadcast"), ("class_bytes", 1 << 21), ("more", 1)):
        assert kept.get({**QUESTION, field: value}) is None
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@given(st.data())
def test_damage_is_a_miss(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        kept = PlanCache(Path(folder))
        kept.put(QUESTION, b"x" * 200)
        path = files(Path(folder))[0]
        whole = path.read_bytes()
        if data.draw(st.booleans()):
            at, bits = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
            damaged = whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :]
        else:
            damaged = whole[: data.draw(st.integers(0, len(whole) - 1))] + data.draw(st.binary(max_size=3))
        path.write_bytes(damaged)
        found = kept.get(QUESTION)
        assert found is None or damaged == whole or found == b"x" * 200  # white space in the header may change
        kept.put(QUESTION, b"new")
        assert kept.get(QUESTION) == b"new"


def test_another_version_of_this_package_asks_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = PlanCache(tmp_path)
    kept.put(QUESTION, b"old")
    monkeypatch.setattr(plan_cache, "_package", lambda: "other files")
    assert kept.get(QUESTION) is None


def test_folders_that_others_may_write_to_are_not_used(tmp_path: Path) -> None:
    kept = PlanCache(tmp_path)
    kept.put(QUESTION, b"mine")
    tmp_path.chmod(0o777)
    assert kept.get(QUESTION) is None
    kept.put({"op": "other"}, b"not written")
    tmp_path.chmod(0o700)
    assert len(files(tmp_path)) == 1 and kept.get(QUESTION) == b"mine"


def test_large_answers_are_not_kept_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(plan_cache, "MAX_FOLDER_BYTES", 2000)
    kept = PlanCache(tmp_path)
    kept.put(QUESTION, b"x" * 1000)
    assert files(tmp_path) == []
    for i in range(3):
        kept.put({"i": i}, b"x" * 500)
        for path in files(tmp_path):  # clocks are coarse: make what is there older
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
        assert kept.get({"i": 0}) is not None, "used last, so it stays"
    assert kept.get({"i": 1}) is None and kept.get({"i": 2}) is not None


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = PlanCache(tmp_path / "file" / "plans")
    kept.put(QUESTION, b"x")
    assert kept.get(QUESTION) is None
    assert PlanCache(None).get(QUESTION) is None


def test_which_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder("0") is None and cache_folder("off") is None
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "meshwright" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("") is None


def test_the_second_group_does_not_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, said = planner(tmp_path)
    chosen = first.choose("all-reduce", 0, 1 << 20)
    assert not isinstance(chosen, str) and len(files(tmp_path)) == 1

    def no(*_: object) -> bytes:
        raise MeshwrightError("planned again")

    monkeypatch.setattr(GroupPlans, "_plan", no)
    again, heard = planner(tmp_path)
    found = again.choose("all-reduce", 0, 1 << 20)
    assert not isinstance(found, str) and (found.name, found.predicted_s) == (chosen.name, chosen.predicted_s)
    answers, as_before = ({k: v for k, v in x.items() if not k.startswith("beats/")} for x in (said, heard))
    assert answers == as_before and answers
    other, _ = planner(tmp_path, tune=2)
    assert other.choose("all-reduce", 0, 1 << 20) == "planned again"


def test_a_kept_plan_that_is_wrong_is_planned_again(tmp_path: Path) -> None:
    first, _ = planner(tmp_path)
    chosen = first.choose("all-reduce", 0, 1 << 20)
    question = first._question("all-reduce", 0, 1 << 20)
    right = first.cache.get(question)
    assert right is not None and not isinstance(chosen, str)
    renamed = [right.replace(b'"walk"', b'"talk"'), right.replace(b'"bytes"', b'"bites"')]
    for wrong in (b"{}", b"no json", b'{"plans":[{"bytes":3}]}\nabc', right[:-2], *renamed):
        first.cache.put(question, wrong)
        again, _ = planner(tmp_path)
        found = again.choose("all-reduce", 0, 1 << 20)
        assert not isinstance(found, str) and found.name == chosen.name
        assert first.cache.get(question) == right
