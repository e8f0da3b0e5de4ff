"""The file of published runs, read within bounds: what a row may say, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

MAX_FILE_BYTES = 1 << 20  # the file has 60 kB
MAX_RUNS = 4096
MAX_COUNT = 1 << 24  # of devices, layers, widths, tokens of a sequence
FACTS = ("microbatch", "interleave", "recompute")  # that a source may leave out and a row then assumes


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class Source(_Row, frozen=True, kw_only=True):
    """Where rows were read: address (with the commit), date of the measurement or the page, what it says of all rows, what it leaves out."""

    key: str
    url: str
    date: str
    said: str
    missing: str = ""


class Cluster(_Row, frozen=True, kw_only=True):
    """A preset of servers of eight, and what differs from it."""

    name: str
    fabric: str
    note: str
    memory_Bps: float = 0.0
    memory_GiB: float = 0.0
    power_W: float = 0.0


class Model(_Row, frozen=True, kw_only=True):
    name: str
    kind: Literal["gpt", "llama", "squared-relu"]
    layers: int
    width: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    hidden: int = 0
    tied: bool = False


class Run(_Row, frozen=True, kw_only=True):
    name: str
    group: str
    source: str
    cluster: str
    model: str
    framework: str
    sequence: int
    devices: int
    data: int
    microbatch: int
    global_batch: int
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    sharding: int = 0
    recompute: Literal["none", "selective", "full", "selective-op", "every-other"] = "none"
    attention: str = ""
    dtype: Literal["bf16", "fp8"] = "bf16"
    sequence_parallel: bool = False
    compiled: bool = False
    compiled_loss: bool = False
    tensor_overlap: bool = False
    tokens_per_s_gpu: float = 0.0
    step_s: float = 0.0
    tflops_gpu: float = 0.0
    flops: Literal["", "model", "megatron-2021"] = ""
    memory_GiB: float = 0.0
    missing: tuple[str, ...] = ()


class Published(_Row, frozen=True, kw_only=True):
    source: tuple[Source, ...]
    cluster: tuple[Cluster, ...]
    model: tuple[Model, ...]
    run: tuple[Run, ...]


def read_rows(path: Path) -> dict[str, Any]:
    """The file's tables, fields at their defaults left out. Raises: ValueError, which says which row and what."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path.name}: larger than {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.convert(tomllib.loads(path.read_text()), Published)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if len(found.run) > MAX_RUNS:
        raise ValueError(f"{path.name}: more than {MAX_RUNS} runs")
    known = {kind: {getattr(x, key) for x in rows} for kind, key, rows in (
        ("source", "key", found.source), ("cluster", "name", found.cluster), ("model", "name", found.model))}  # fmt: skip
    names: set[str] = set()
    for model in found.model:
        _require(model.name, all(0 < x <= MAX_COUNT for x in (model.layers, model.width, model.heads, model.vocabulary)), "its sizes")
    for r in found.run:
        for kind, values in known.items():
            _require(r.name, getattr(r, kind) in values, f"no {kind} {getattr(r, kind)!r}")
        counts = (r.sequence, r.devices, r.data, r.microbatch, r.global_batch, r.tensor, r.pipeline, r.interleave)
        _require(r.name, all(0 < x <= MAX_COUNT for x in counts), "a count is not positive or too large")
        _require(r.name, r.data * r.tensor * r.pipeline == r.devices, f"its degrees are not {r.devices} devices")
        _require(r.name, r.global_batch % (r.data * r.microbatch) == 0, "its micro-batches do not divide the batch")
        _require(r.name, (r.tokens_per_s_gpu > 0) + (r.step_s > 0) + (r.tflops_gpu > 0) == 1, "one speed, of tokens, seconds or operations")
        _require(r.name, not r.tflops_gpu or bool(r.flops), "a rate of operations needs the formula that counts them")
        _require(r.name, r.sharding in range(4) and set(r.missing) <= set(FACTS), "its sharding level or missing facts")
        _require(r.name, r.name not in names, "a second row of that name")
        names.add(r.name)
    document: dict[str, Any] = msgspec.to_builtins(found)
    return document


def _require(name: str, fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(f"published.toml: {name}: {what}")
