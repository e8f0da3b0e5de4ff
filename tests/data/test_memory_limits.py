"""The memory that files may fill: control groups of both kinds, and budgets that do not fit."""

from __future__ import annotations

import os
import resource

import pytest

from meshwright.data import memory_budget_bytes, memory_limit_bytes
from meshwright.errors import UsageError
from meshwright.io.own_limits import free_bytes, memory_room_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fake_root(tmp_path, groups: str, mounts: list[str]):
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text("\n".join(mounts))
    return tmp_path


def test_the_smallest_limit_of_the_ancestry_counts(tmp_path):
    root = fake_root(tmp_path, "0::/a/b\n", ["1 1 0:1 / /cg rw - cgroup2 cgroup2 rw"])
    deep = root / "cg/a/b"
    deep.mkdir(parents=True)
    assert memory_limit_bytes(root) == MACHINE
    (deep / "memory.max").write_text("max\n")
    assert memory_limit_bytes(root) == MACHINE
    (deep.parent / "memory.max").write_text("1000000\n")
    (deep / "memory.max").write_text("2000000\n")
    assert memory_limit_bytes(root) == 1_000_000


def test_version_1_says_no_limit_by_a_large_number(tmp_path):
    root = fake_root(tmp_path, "4:memory:/job\n", ["1 1 0:1 / /cg/memory rw - cgroup cgroup rw,memory"])
    job = root / "cg/memory/job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit_bytes(root) == MACHINE
    (job / "memory.limit_in_bytes").write_text("209715200\n")
    assert memory_limit_bytes(root) == 209_715_200


def test_what_is_free_is_below_every_limit(tmp_path):
    root = fake_root(tmp_path, "0::/a\n", ["1 1 0:1 / /cg rw - cgroup2 cgroup2 rw"])
    (root / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable: 4000 kB\n")
    group = root / "cg/a"
    group.mkdir(parents=True)
    assert free_bytes(root) == 4_096_000
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert free_bytes(root) == 1_500_000
    (root / "proc/self/statm").write_text("1000 1 1 1 0 1 0\n")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, ((1 << 44) if limits[0] == resource.RLIM_INFINITY else limits[0], limits[1]))
        assert free_bytes(root) == 1_500_000  # an address limit above all else changes nothing
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_budgets():
    assert memory_budget_bytes(limit_bytes=1000) == 750 and memory_budget_bytes(reserve_bytes=900, limit_bytes=1000) == 100
    assert memory_budget_bytes(999, limit_bytes=1000) == 999 and memory_budget_bytes(0, limit_bytes=1000) == 0
    with pytest.raises(UsageError, match="1000 bytes of cache are asked for, this process's memory limit is 1000") as caught:
        memory_budget_bytes(1000, limit_bytes=1000)
    assert "at most 750" in str(caught.value.hint) and caught.value.data["limit_bytes"] == 1000
    with pytest.raises(UsageError, match="a reserve of 1001 bytes is more than the memory limit of 1000"):
        memory_budget_bytes(reserve_bytes=1001, limit_bytes=1000)


def test_room_is_what_no_page_of_a_file_can_give_back(tmp_path):
    root = fake_root(tmp_path, "0::/a/b\n", ["1 1 0:1 / /cg rw - cgroup2 cgroup2 rw"])
    deep = root / "cg/a/b"
    deep.mkdir(parents=True)
    assert memory_room_bytes(root) is None
    (deep / "memory.max").write_text("1000000\n")
    (deep / "memory.current").write_text("700000\n")
    (deep / "memory.stat").write_text("anon 250000\nactive_file 300000\ninactive_file 100000\nfile_mapped 60000\nshmem 10000\n")
    assert memory_room_bytes(root) == 1_000_000 - 300_000 - 50_000  # mapped code stays, of what is mapped shared memory is held already
    (deep.parent / "memory.max").write_text("800000\n")
    (deep.parent / "memory.current").write_text("700000\n")
    assert memory_room_bytes(root) == 100_000  # nothing is known of the files in the group above


def test_room_of_a_group_of_version_1_counts_the_groups_in_it(tmp_path):
    root = fake_root(tmp_path, "4:memory:/job\n", ["1 1 0:1 / /cg/memory rw - cgroup cgroup rw,memory"])
    job = root / "cg/memory/job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("1000000\n")
    (job / "memory.usage_in_bytes").write_text("700000\n")
    own, inside = "inactive_file 0\nactive_file 0\nmapped_file 0\n", "total_mapped_file 20000\ntotal_inactive_file 200000\ntotal_active_file 100000\n"
    (job / "memory.stat").write_text(own + inside)
    assert memory_room_bytes(root) == 1_000_000 - 400_000 - 20_000
