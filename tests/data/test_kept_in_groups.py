"""The budget of a cache in a real control group: what processes leave of the limit; more than that is warned of. The kernel is the oracle.

It may take pages of any file at any time, for reasons of its own: what it took of members is counted apart, beside how often the limit was met.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import RunError
from meshwright.run.machine.limits import Limits

LIMIT_BYTES, FILES, FILE_BYTES = 96 << 20, 120, 1 << 20

READER = """
import json, sys, warnings
from pathlib import Path
import numpy as np
from meshwright.data import Kept
sys.path.insert(0, sys.argv[4])
from page_cache import as_if_nothing_was_taken, taken_bytes
if sys.argv[5] == "alone":
    as_if_nothing_was_taken()

class Files:
    def __init__(self, folder):
        self.paths = sorted(map(str, folder.iterdir()))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return Path(self.paths[index]).read_bytes()

def read_bytes():
    return next(int(x.split()[1]) for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("read_bytes"))

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    kept = Kept(Files(Path(sys.argv[1])), int(sys.argv[2]) or None)
    early, order, found, taken, more = len(seen), np.random.default_rng(0), [], [], b""
    for epoch in range(4):
        before, gone = read_bytes(), 0
        for index in order.permutation(len(kept)):
            gone += taken_bytes(kept.paths[index])
            kept[int(index)]
        found.append(read_bytes() - before)
        taken.append(gone)
        more = more or bytes(b"1" * int(sys.argv[3]))  # what the process takes after its cache was made
    print(json.dumps({
        "members": kept.members, "budget": kept.budget_bytes, "read": found, "taken": taken, "holds": kept.check().holds,
        "early": [str(w.message) for w in seen[:early]], "late": [str(w.message) for w in seen[early:]],
    }))
"""


def limited() -> bool:
    try:
        with Limits(memory_bytes=LIMIT_BYTES):
            return True
    except RunError:
        return False


pytestmark = [pytest.mark.real, pytest.mark.skipif(not limited(), reason="no control group with the memory controller can be made here")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("files")
    for i in range(FILES):
        (made / f"{i:03d}").write_bytes(os.urandom(FILE_BYTES))
    os.sync()
    return made


def times_met(limits: Limits) -> int:
    """How often the group held as much as it may."""
    place = limits._of["memory"]
    if place.version == 1:
        return int((place.folder / "memory.failcnt").read_text())
    return next(int(x.split()[1]) for x in (place.folder / "memory.events").read_text().splitlines() if x.startswith("max "))


def read_in_group(folder, budget_bytes: int, more_bytes: int = 0, *, taken: str = "seen") -> dict:
    """`taken`: "seen", or "alone" where members are looked at as if the kernel had taken none."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # pages that others hold would be free of charge in the group
        os.close(fd)
    with Limits(memory_bytes=LIMIT_BYTES) as limits:
        line = [sys.executable, "-c", READER, str(folder), str(budget_bytes), str(more_bytes), str(Path(__file__).parent), taken]
        process = limits.start(line, stdout=subprocess.PIPE, text=True)
        out, _ = process.communicate()
        met = times_met(limits)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1]) | {"met": met}


def test_a_budget_left_out_is_what_the_process_leaves_of_its_group(folder):
    found = read_in_group(folder, 0, taken="alone")
    assert found["met"] == 0  # so the kernel took nothing for the limit
    assert not found["early"] and not found["late"] and found["holds"]
    assert found["budget"] > LIMIT_BYTES // 2  # the reader holds some 25 MiB
    least = (FILES - found["members"]) * FILE_BYTES
    again = [read - taken for read, taken in zip(found["read"], found["taken"], strict=True)]  # but for what it took all the same
    assert all(least <= read <= 1.02 * least for read in again[1:])


def test_a_budget_beside_which_the_process_has_no_room_is_warned_of_when_it_is_asked_for(folder):
    found = read_in_group(folder, LIMIT_BYTES - (4 << 20))
    assert len(found["early"]) == 1 and "a cache of 96.47 MB does not stay in memory: of the limit of 100.7 MB processes hold" in found["early"][0]
    least = (FILES - found["members"]) * FILE_BYTES
    assert found["read"][-1] > 1.02 * least and found["met"] > 0  # and so it is


def test_members_that_leave_memory_later_are_warned_of_once(folder):
    found = read_in_group(folder, 0, more_bytes=40 << 20)
    assert not found["early"] and len(found["late"]) == 1
    assert "kept files that were read" in found["late"][0] and "ask for at most" in found["late"][0]
