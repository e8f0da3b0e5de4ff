"""Files larger than memory, read in random order: the page cache as it is, and members kept; the analyser's predictions.

As root: `python benchmarks/data_cache.py [--parts cache,stalls,plan] [--rounds N]`. cache: 400 files of 1 MiB, a disk of 50 MiB/s, a control group
of 200 MiB; bytes from storage and seconds per epoch, ways in turn, medians over the rounds' epochs from the second on. Where mosaicml-streaming is
installed it reads the same items as MDS shards of 4 MiB in its own shuffled order, with a cache limit of as many bytes as the budget that `Kept`
finds; its control group has room for the packages that it imports beside that. stalls: a loader under a quota of half a core and a disk of 5 MiB/s.
Rates are measured by `measure_stalls`, in turn with epochs of which a share of the bytes is in memory. plan: there, `data plan` for a memory of 60
% of the bytes and a device of 150 ms a batch, and real epochs as planned beside what it predicts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import numpy as np

FILES, FILE_BYTES = 400, 1 << 20
MEMORY_BYTES, DISK_BPS = 200 << 20, 50 << 20
EPOCHS = 4
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PLAN_SHARE, PLAN_DEVICE_S = 0.6, 0.15  # of the bytes; of a batch of 8
STALL_FILES, STALL_BYTES, STALL_DISK_BPS, STALL_CORES = 192, 256 << 10, 5 << 20, 0.5


@contextlib.contextmanager
def groups(folder: Path, memory_bytes: int, disk_Bps: int, cores: float = 0) -> Iterator[list[Path]]:
    """Control groups (v1) with a memory limit, a limit on the folder's disk and a CPU quota. They are removed at the end."""
    device = folder.stat().st_dev
    name = f"meshwright-bench-{os.getpid()}"
    limits = {
        "memory": {"memory.limit_in_bytes": str(memory_bytes)} if memory_bytes else {},
        "blkio": {"blkio.throttle.read_bps_device": f"{os.major(device)}:{os.minor(device)} {disk_Bps}"},
        "cpu": {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": str(round(cores * 10_000))} if cores else {},
    }
    made = []
    try:
        for controller, settings in limits.items():
            if not settings:
                continue
            group = Path("/sys/fs/cgroup") / controller / name
            group.mkdir()
            made.append(group)
            for file, value in settings.items():
                (group / file).write_text(value)
        yield made
    finally:
        for group in made:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.05)


def child(what: str, folder: Path, inside: list[Path], **options: Any) -> Any:
    """The JSON that this script's child prints, a process inside the groups."""
    command = [sys.executable, __file__, "--child", what, "--folder", str(folder), "--options", json.dumps(options)]

    def join() -> None:
        for group in inside:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join, check=False)
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Files:
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(p) for p in folder.iterdir() if p.suffix == ".bin")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()


class Prepared(Files):
    """Some milliseconds of processor time an item."""

    def __getitem__(self, index: int) -> float:
        data = np.frombuffer(super().__getitem__(index), np.uint8).astype(np.float32)
        for _ in range(6):
            data = np.sqrt(data * data + 1)
        return float(data.sum())


def read_bytes() -> int:
    return next(int(x.split()[1]) for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("read_bytes"))


def epochs(way: str, folder: Path, seed: int, budget: int, count: int = EPOCHS) -> list[dict[str, float]]:
    dataset: Any = Files(folder)
    members = 0
    if way == "kept":
        from meshwright.data import Kept

        dataset = Kept(dataset)
        members, budget = dataset.members, dataset.budget_bytes
    elif way == "mosaicml-streaming":
        dataset = streamed(folder, budget)
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        before, begin = read_bytes(), time.perf_counter()
        items = iter(dataset) if way == "mosaicml-streaming" else (dataset[int(i)] for i in rng.permutation(len(dataset)))
        assert sum(len(item["data"] if isinstance(item, dict) else item) for item in items) == FILES * FILE_BYTES
        found.append({"time_s": time.perf_counter() - begin, "read_bytes": read_bytes() - before, "members": members, "budget_bytes": budget})
    return found


def imported(folder: Path) -> int:
    """Resident bytes of a process that has imported the peer."""
    import streaming  # noqa: F401

    return machine.memory_high_water_bytes()


def streamed(folder: Path, budget: int) -> Any:
    from streaming import StreamingDataset

    local = folder / "local"
    return StreamingDataset(remote=str(folder / "mds"), local=str(local), shuffle=True, batch_size=1, cache_limit=budget, num_canonical_nodes=1)


def cache(rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    ways = ["plain", "kept"] + ["mosaicml-streaming"] * (importlib.util.find_spec("streaming") is not None)
    with tempfile.TemporaryDirectory(prefix="data-cache-") as name:
        folder = Path(name)
        write_files(folder, FILES, FILE_BYTES)
        if len(ways) == 3:
            write_shards(folder)
        raw: dict[str, list[Any]] = {way: [] for way in ways}
        for seed in range(rounds):
            for way in ways:
                for path in folder.rglob("*"):
                    forget(path)
                beside = child("imported", folder, []) if way == "mosaicml-streaming" else 0
                with groups(folder, MEMORY_BYTES + beside, DISK_BPS) as inside:
                    budget = raw["kept"][0][0]["budget_bytes"] if raw["kept"] else 0
                    raw[way].append(child("epochs", folder, inside, way=way, seed=seed, budget=budget))
                print(way, [round(e["read_bytes"] / 2**20, 1) for e in raw[way][-1]], [round(e["time_s"], 2) for e in raw[way][-1]], flush=True)
    later = {way: [e for epochs in found for e in epochs[1:]] for way, found in raw.items()}
    read = {way: statistics.median(e["read_bytes"] for e in found) for way, found in later.items()}
    time_s = {way: statistics.median(e["time_s"] for e in found) for way, found in later.items()}
    members = later["kept"][0]["members"]
    rest = FILES - members
    peers = [way for way in ways if way != "kept"]
    rows = [
        {"what": "members of 400 files (asked: 170)", "value": members, "unit": "files"},
        {"what": "bytes of an epoch, kept, over the others (asked: 1.02)", "value": read["kept"], "unit": "B", "peer": rest * FILE_BYTES},
        *({"what": f"bytes of an epoch, {way}, over kept", "value": read[way], "unit": "B", "peer": read["kept"]} for way in peers),
        *({"what": f"time of an epoch, {way}, over kept", "value": time_s[way], "unit": "s", "peer": time_s["kept"]} for way in peers),
    ]  # fmt: skip
    for row in rows:
        print(row, flush=True)
    return rows, {"files": FILES, "file_bytes": FILE_BYTES, "memory_bytes": MEMORY_BYTES, "disk_Bps": DISK_BPS, "raw": raw}


def write_files(folder: Path, count: int, size: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(count):
        with (folder / f"{i:04d}.bin").open("wb") as file:
            file.write(rng.bytes(size))
    os.sync()


def write_shards(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"data": "bytes"}, size_limit=4 << 20, compression=None) as writer:
        for path in Files(folder).paths:
            writer.write({"data": Path(path).read_bytes()})
    os.sync()


def forget(path: Path) -> None:
    if path.is_file():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def stalls(rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every round: the rates, then a real epoch at each share; predicted from the medians of the rates."""
    from meshwright.profile.input_rates import InputRates, speed_at

    with tempfile.TemporaryDirectory(prefix="data-stalls-") as name:
        folder = Path(name)
        write_files(folder, STALL_FILES, STALL_BYTES)
        rates: list[dict[str, Any]] = []
        measured: dict[float, list[float]] = {share: [] for share in SHARES}
        for seed in range(rounds):
            with groups(folder, 0, STALL_DISK_BPS, STALL_CORES) as inside:
                rates.append(child("rates", folder, inside, seed=seed))
                for share in SHARES:
                    measured[share].append(child("share", folder, inside, share=share, seed=seed))
            print({share: round(x[-1], 1) for share, x in measured.items()}, rates[-1], flush=True)
    middle = {k: statistics.median(r[k] for r in rates) for k in rates[0]}
    m = InputRates(**{k: round(v) if k in ("items", "total_bytes", "workers", "sampled", "rounds", "batch_bytes") else v for k, v in middle.items()})
    rows = []
    for share, found in measured.items():
        predicted = speed_at(m, share)
        what = f"items per second, {share:.0%} of the bytes in memory, predicted over measured; limit: {predicted.limit} (asked: within 10 %)"
        rows.append({"what": what, "value": predicted.items_per_s, "unit": "items/s", "peer": statistics.median(found)})
        print(rows[-1], predicted.items_per_s / statistics.median(found), flush=True)
    return rows, {"rates": rates, "measured": {str(k): v for k, v in measured.items()}}


def plan(rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every round: rates, the plan that follows for a memory and a device, and epochs of the loader that is fed so, beside the loader as it is."""
    with tempfile.TemporaryDirectory(prefix="data-plan-") as name:
        folder = Path(name)
        write_files(folder, STALL_FILES, STALL_BYTES)
        raw: list[dict[str, Any]] = []
        for seed in range(rounds):
            for path in folder.iterdir():
                forget(path)
            with groups(folder, 0, STALL_DISK_BPS, STALL_CORES) as inside:
                raw.append(child("planned", folder, inside, seed=seed))
            print(raw[-1], flush=True)
    middle = {k: statistics.median(r[k] for r in raw) for k in ("planned_s", "epoch_s", "bound_s", "plain_s", "read_bytes", "storage_bytes")}
    rows = [
        {"what": "epoch as planned, predicted over measured", "value": middle["planned_s"], "unit": "s", "peer": middle["epoch_s"]},
        {"what": "epoch as planned, measured, over the bound", "value": middle["epoch_s"], "unit": "s", "peer": middle["bound_s"]},
        {"what": "epoch of the loader as it is over that as planned", "value": middle["plain_s"], "unit": "s", "peer": middle["epoch_s"]},
        {"what": "bytes from storage of an epoch, predicted over read", "value": middle["storage_bytes"], "unit": "B", "peer": middle["read_bytes"]},
    ]  # fmt: skip
    for row in rows:
        print(row, row["value"] / row["peer"], flush=True)
    return rows, {"rounds": raw}


def planned_here(folder: Path, seed: int) -> dict[str, Any]:
    """Measure, plan for PLAN_SHARE of the bytes and a device of PLAN_DEVICE_S a batch, run two epochs more; then one without the plan."""
    from dataclasses import asdict

    from meshwright.check.input_plan import check_input_plan
    from meshwright.data import Kept, measure_stalls, planned_loader
    from meshwright.data.epochs import run_epochs
    from meshwright.decide.data import FeedProblem
    from meshwright.decide.data.coordl import Coordl
    from meshwright.profile.input_plan import Place

    def step(batch: Any) -> None:
        time.sleep(PLAN_DEVICE_S)

    loader = loader_of(folder, workers=1)
    rates = measure_stalls(loader, rounds=1, items=STALL_FILES, seed=seed, device_s=PLAN_DEVICE_S)
    place = Place(memory_bytes=round(PLAN_SHARE * rates.total_bytes))
    found = Coordl().plan(FeedProblem(rates=rates, place=place, seed=seed), rng=np.random.default_rng(seed))
    check_input_plan(found).raise_if_wrong()
    fed = planned_loader(loader, found)
    epochs = run_epochs(fed, 3, step)[1:]
    assert not isinstance(fed.dataset, Kept) or fed.dataset.check().holds
    for path in folder.iterdir():
        forget(path)
    nothing = Kept(loader.dataset, 0)  # nothing stays: as where others fill the memory
    plain = run_epochs(planned_loader(loader, found) if found.kept == "" else _over(loader, nothing), 1, step)[0]
    assert found.bound is not None
    return {
        "plan": found.words, "kept_bytes": found.kept_bytes, "planned_s": found.epoch_s, "bound_s": float(found.bound), "limit": found.limit,
        "storage_bytes": found.storage_bytes, "epoch_s": statistics.median(e.time_s for e in epochs),
        "read_bytes": statistics.median(e.read_bytes for e in epochs), "plain_s": plain.time_s, "rates": asdict(rates),
    }  # fmt: skip


def _over(loader: Any, dataset: Any) -> Any:
    from meshwright.data.planned import with_dataset

    return with_dataset(loader, dataset)


def loader_of(folder: Path, workers: int = 2) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(Prepared(folder), batch_size=8, shuffle=True, num_workers=workers, persistent_workers=bool(workers))


def rates_here(folder: Path, seed: int) -> dict[str, Any]:
    from dataclasses import asdict

    from meshwright.data import measure_stalls

    return asdict(measure_stalls(loader_of(folder), rounds=1, items=STALL_FILES, seed=seed))


def share_here(folder: Path, share: float, seed: int) -> float:
    """Items per second of an epoch of which a share of the files is in memory; the workers run already."""
    loader = loader_of(folder)
    paths = Files(folder).paths
    for _ in loader:
        pass
    for path in paths:
        forget(Path(path))
    for path in np.random.default_rng(seed).permutation(paths)[: round(share * len(paths))]:
        Path(path).read_bytes()
    begin, count, first = time.perf_counter(), 0, 0.0
    for batch in loader:
        count += len(batch)
        first = first or time.perf_counter()
    return (count - 8) / (time.perf_counter() - first) if first > begin else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="cache,stalls,plan")
    parser.add_argument("--rounds", type=int, default=5)
    for hidden in ("--child", "--folder", "--options"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        here = {"epochs": epochs, "imported": imported, "rates": rates_here, "share": share_here, "planned": planned_here}
        call = here[args.child]
        print(json.dumps(call(folder=Path(args.folder), **json.loads(args.options))))
        return
    for part in args.parts.split(","):
        rows, facts = {"cache": cache, "stalls": stalls, "plan": plan}[part](args.rounds)
        machine.record(f"data_{part}", rows, command=f"python benchmarks/data_cache.py --parts {part} --rounds {args.rounds}", **facts)


if __name__ == "__main__":
    main()
