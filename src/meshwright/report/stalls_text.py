"""What a training loop waits for, as a document and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..decide.data import least_item_s, ways
from ..io.quantity import show_size
from ..profile.input_plan import Place
from ..profile.input_rates import InputRates, cache_for_no_fetch_stall, lru_hits, speed_at
from .columns import columns

__all__ = ["WORDS", "stalls_document", "stalls_text"]

WORDS = {
    "device": "the device", "preparation": "preparation of items", "storage": "storage", "waiting": "workers, in turn reading and preparing",
    "in turn": "one thread", "network": "the network between nodes",
}  # fmt: skip


def stalls_document(m: InputRates, place: Place) -> dict[str, Any]:
    """The loop now (a page cache that exchanges), with files kept, what one change after the other would give, and the fastest way to feed it."""
    budget_bytes, jobs = place.memory_bytes, place.jobs
    share = min(budget_bytes / m.total_bytes, 1.0) if m.total_bytes else 1.0
    now = lru_hits(share)
    cases: list[tuple[str, float, dict[str, float]]] = [
        ("as it is", now, {}), ("files kept in memory", share, {}), ("all files in memory", 1.0, {}), ("twice the cores", now, {"cores": 2}),
        ("a disk twice as fast", now, {"disk": 2}), ("a device twice as fast", now, {"device": 2}), ("kept, twice the cores", share, {"cores": 2}),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for what, cached, change in cases:
        found = speed_at(m, cached, jobs=jobs, **change)
        rows.append({"what": what, "cached": cached, "items_per_s": found.items_per_s, "limit": found.limit, "epoch_s": m.items / found.items_per_s})
    best, (least_s, why) = ways(m, place)[0], least_item_s(m, place)
    epoch_s, inside_s, device_s = rows[0]["epoch_s"], m.items / speed_at(m, 1, jobs=jobs).items_per_s, m.items * m.device_s
    return {
        "schema": "meshwright.data.stalls", "version": 1, "measured": {**asdict(m), "item_bytes": m.item_bytes}, "jobs": jobs,
        "memory_bytes": budget_bytes, "share": share, "cases": rows,
        "stalls": {"fetch": 1 - inside_s / epoch_s, "preparation": max(inside_s - device_s, 0) / epoch_s if m.device_s else None},
        "best": {
            "what": best.words, "kept": best.kept, "shared": best.shared, "workers": best.workers, "cached": best.cached, "limit": best.speed.limit,
            "items_per_s": best.speed.items_per_s, "epoch_s": m.items / best.speed.items_per_s,
        },
        "bound": {"epoch_s": m.items * least_s, "limit": why},
        "no_fetch_stall_bytes": round(cache_for_no_fetch_stall(m) * m.total_bytes),
    }  # fmt: skip


def stalls_text(document: dict[str, Any]) -> str:
    m = document["measured"]
    lines = [
        f"{m['items']:,} items of {show_size(round(m['item_bytes']))}, {show_size(m['total_bytes'])}; {m['workers']} workers, {m['cores']:g} cores",
        f"measured     {m['sampled']} items, {m['rounds']} times",
        f"device       {1 / m['device_s']:,.0f} items/s" if m["device_s"] else "device       not measured: give --step or --device-time",
        f"preparation  {1 / m['prepare_s']:,.0f} items/s, {m['cpu_s'] * 1e3:.3g} ms of processor time an item",
        f"storage      {show_size(round(m['storage_Bps']))}/s, {m['storage_Bps'] / m['item_bytes']:,.0f} items/s",
        f"one read     {m['miss_s'] * 1e3:.3g} ms from storage, {m['hit_s'] * 1e3:.3g} ms from memory",
        f"memory       holds {document['share']:.0%} of the bytes ({show_size(document['memory_bytes'])})",
        "",
    ]
    stalls = document["stalls"]
    said = [f"{stalls['fetch']:.0%} of an epoch waits for files"]
    if stalls["preparation"] is not None:
        said.append(f"{stalls['preparation']:.0%} for preparation")
    lines += ["; ".join(said) + ".", ""]
    first = document["cases"][0]["epoch_s"]
    table = [["", "from memory", "items/s", "epoch", "times as fast", "limited by"]]
    for row in document["cases"]:
        speed = f"{row['items_per_s']:,.0f}" if row["items_per_s"] >= 10 else f"{row['items_per_s']:.2f}"
        epoch = f"{row['epoch_s']:.3g} s"
        table.append([row["what"], f"{row['cached']:.0%}", speed, epoch, f"{first / row['epoch_s']:.2f}", WORDS[row["limit"]]])
    lines += columns(table)
    needed = document["no_fetch_stall_bytes"]
    lines += ["", f"Kept files of {show_size(needed)} end all waiting for files." if needed else "No file needs to be kept: nothing waits for them."]
    best, bound = document["best"], document["bound"]
    lines.append(f"Fastest: {best['what']}: {best['epoch_s']:.3g} s an epoch, limited by {WORDS[best['limit']]}.")
    lines.append(f"No way to feed it takes less than {bound['epoch_s']:.3g} s: {WORDS[bound['limit']]}.")
    return "\n".join(lines)
