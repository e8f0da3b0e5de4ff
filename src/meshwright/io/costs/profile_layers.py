"""Public layer-profile formats, as they are published: Metis, Sailor, and Sailor's memory table and network coefficients.

- Metis: one file `DeviceType.<device>_tp<degree>_bs<micro-batch>.json` per entry, with `execution_time.layer_compute_total_ms` (forward and backward
  together), `execution_time.optimizer_time_ms` (whole model), `execution_memory.layer_memory_total_mb` (2^20 bytes).
- Sailor times: model -> GPU -> micro-batch -> TP -> layer -> [forward s, backward s, update s]. Per-GPU files that begin at the micro-batch (or
  at the GPU) are read too; device and model are then the names of the folders they lie in, unless given.
- Sailor memory: model -> TP -> layer -> {params_floats, act_mem_floats, act_output_floats, ...}, of one sample; may begin at TP.
- Network: inside a server GPU -> GPUs -> [[c2, c1, c0], peak bytes/s]; between servers zone -> GPU -> GPUs -> zone -> GPU -> GPUs -> the same.

What a file is, is told by its content. Files are capped, typed and strict (`strict_json`); an entry that two files give is refused.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UnknownName, UsageError
from ...profile.layer_profile import Entry, LayerProfile, LayerSize, LayerTime
from ...profile.network import NetworkProfile, RateCurve
from ..fields import shown
from ..limits import MaxBytes
from ..strict_json import decode, read_document, refuse_ambiguous

__all__ = ["ProfileFiles", "parse_profile_file", "read_profile_files"]

MAX_ROWS = 2_000_000  # entries of all tables of one profile
MAX_LAYERS = 20_000  # layers of one table
MAX_LAYER_S = 1e6  # of one layer: more is a mistake of the unit
FORWARD_SHARE = 1 / 3  # of forward and backward where they were measured together: a backward does twice the products of a forward
_METIS_NAME = re.compile(r"^(?:DeviceType\.)?(?P<device>[^/]{1,64})_tp(?P<tensor>\d{1,6})_bs(?P<microbatch>\d{1,6})\.json(?:\.gz)?$")


@dataclass
class ProfileFiles:
    """What the files hold, by model; `note` says what was assumed in reading."""

    times: dict[str, dict[Entry, tuple[LayerTime, ...]]] = field(default_factory=dict)
    sizes: dict[str, dict[int, tuple[LayerSize, ...]]] = field(default_factory=dict)
    memory_bytes: dict[str, dict[Entry, tuple[int, ...]]] = field(default_factory=dict)
    inside: dict[tuple[str, int], RateCurve] = field(default_factory=dict)
    between: dict[tuple[str, str, int, str, str, int], RateCurve] = field(default_factory=dict)
    split_assumed: float = 0.0
    files: list[str] = field(default_factory=list)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self.times))

    def network(self) -> NetworkProfile:
        return NetworkProfile(inside=self.inside, between=self.between)

    def profile(self, model: str | None = None) -> LayerProfile:
        """The profile of `model`, or of the only one. Raises: UnknownName, FormatError when tables of different depth are joined."""
        if not self.times:
            raise FormatError("no layer times among the files", where=", ".join(self.files), hint="give a Metis or Sailor profile")
        if model is None and len(self.times) > 1:
            raise UsageError("the files hold several models", hint=f"choose one of: {', '.join(self.models)}")
        name = model or self.models[0]
        if name not in self.times:
            raise UnknownName(f"no times of the model {name!r}", hint=f"there are: {', '.join(self.models)}")
        times = self.times[name]
        layers = len(next(iter(times.values())))
        sizes = self.sizes.get(name) or self.sizes.get("", {})
        if self.sizes and not sizes:
            raise UnknownName(f"the memory table does not know {name!r}", hint=f"it knows: {', '.join(sorted(self.sizes))}; see --model")
        memory = self.memory_bytes.get(name, {})
        for what, table in (("times", times), ("memory table", sizes), ("layer memory", memory)):
            for key, row in table.items():
                if len(row) != layers:
                    raise FormatError(
                        f"{what} of {key} have {len(row)} layers, others {layers}",
                        where=name, hint="are the files of different models?",
                    )  # fmt: skip
        return LayerProfile(
            model=name, layers=layers, times=dict(sorted(times.items())), sizes=dict(sorted(sizes.items())),
            memory_bytes=dict(sorted(memory.items())), split_assumed=self.split_assumed, source=", ".join(self.files),
        )  # fmt: skip


def read_profile_files(paths: Sequence[str | os.PathLike[str]], *, model: str | None = None, device: str | None = None) -> ProfileFiles:
    """Raises: UsageError when a file cannot be read; FormatError naming file and field."""
    found = ProfileFiles()
    for path in paths:
        data = read_document(path, limit=MaxBytes.PROFILE_LAYERS)
        parse_profile_file(data, str(path), found, model=model, device=device)
    return found


def parse_profile_file(data: bytes, path: str, into: ProfileFiles, *, model: str | None = None, device: str | None = None) -> None:
    """Add what `data` holds to `into`. Raises: FormatError, UsageError when device or model cannot be told."""
    where = Path(path).name or path
    document = decode(data, msgspec.json.Decoder(dict[str, Any]), where)
    refuse_ambiguous(data, where)
    into.files.append(where)
    if "execution_time" in document:
        _metis(document, where, into, model, device)
        return
    depth, leaf = _shape(document, where)
    folder = [p for p in Path(path).parts[:-1] if p not in ("/", ".", "..")]
    if isinstance(leaf, dict):
        _sizes(document, depth, where, into, model)
    elif len(leaf) == 2 and isinstance(leaf[0], list):
        _network(document, depth, where, into)
    else:
        _times(document, depth, where, into, model or _at(folder, -2), device or _at(folder, -1))


def _at(parts: list[str], i: int) -> str:
    return parts[i] if len(parts) >= -i else ""


def _shape(document: Any, where: str) -> tuple[int, Any]:
    """(levels of tables above the first leaf, the leaf): a list, or a table with `params_floats`."""
    depth, at = 0, document
    while isinstance(at, dict) and "params_floats" not in at:
        if not at or depth > 8:
            raise FormatError("holds no measurements" if not at else "is nested too deeply", where=where)
        at, depth = next(iter(at.values())), depth + 1
    if not isinstance(at, dict | list) or (isinstance(at, list) and not at):
        raise FormatError(f"expected measurements, got {shown(at)}", where=where, hint="a Metis or Sailor profile, memory table or network file")
    return depth, at


# ---- checked values ----------------------------------------------------------------------------------------------------


def _number(value: Any, where: str, *, most: float, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        raise FormatError(f"must be a number from {least:g} to {most:g}, got {shown(value)}", where=where)
    return float(value)


def _count(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and int(text) >= 1):
        raise FormatError(f"the key {text[:32]!r} must be a whole number >= 1", where=where)
    return int(text)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise FormatError(f"must be a table with entries, got {shown(value)}", where=where)
    return value


def _list(value: Any, length: int | None, where: str) -> list[Any]:
    if not isinstance(value, list) or not value or (length is not None and len(value) != length) or len(value) > MAX_LAYERS:
        raise FormatError(f"must be a list of {length or 'numbers, one per layer'}, got {shown(value)}", where=where)
    return value


def _name(text: str, where: str) -> str:
    if not text or len(text) > 128 or not text.isprintable():
        raise FormatError(f"a name of 1 to 128 printable characters is needed, got {text[:32]!r}", where=where)
    return text


def _layers(value: Any, where: str) -> Iterator[Any]:
    """Rows of `{"0": ..., "1": ..., ...}` in order; every layer must be there."""
    table = _table(value, where)
    if len(table) > MAX_LAYERS:
        raise FormatError(f"{len(table)} layers; at most {MAX_LAYERS} are accepted", where=where)
    for i in range(len(table)):
        if str(i) not in table:
            raise FormatError(f"layer {i} is missing", where=where, hint=f"{len(table)} layers must be named 0 to {len(table) - 1}")
        yield table[str(i)]


def _put(table: dict[Any, Any], key: Any, value: Any, where: str) -> None:
    if key in table:
        raise FormatError(f"{key} was given before", where=where, hint="leave one of the files out")
    table[key] = value


# ---- Sailor ------------------------------------------------------------------------------------------------------------


def _times(document: Mapping[str, Any], depth: int, where: str, into: ProfileFiles, model: str, device: str) -> None:
    if depth not in (3, 4, 5):
        raise FormatError(f"{depth} levels of tables above the times", where=where, hint="model -> GPU -> micro-batch -> TP -> layer")
    if (depth < 5 and not model) or (depth < 4 and not device):
        raise UsageError("the file does not say which model or GPU it is of", where=where, hint="name it with --model and --device")
    tree: Any = document
    if depth == 3:
        tree = {device: tree}
    if depth < 5:
        tree = {model: tree}
    rows = 0
    for m, gpus in _table(tree, where).items():
        for gpu, batches in _table(gpus, f"{where}: {m}").items():
            for batch, degrees in _table(batches, f"{where}: {m}.{gpu}").items():
                for degree, layers in _table(degrees, f"{where}: {m}.{gpu}.{batch}").items():
                    at = f"{where}: {m}.{gpu}.{batch}.{degree}"
                    entry = Entry(_name(gpu, at), _count(batch, at), _count(degree, at))
                    values = tuple(_layer_time(row, f"{at}.{i}") for i, row in enumerate(_layers(layers, at)))
                    if not any(v.forward_s + v.backward_s for v in values):
                        raise FormatError("forward and backward take no time in any layer", where=at)
                    rows += len(values)
                    if rows > MAX_ROWS:
                        raise FormatError(f"more than {MAX_ROWS} rows", where=where)
                    _put(into.times.setdefault(_name(m, at), {}), entry, values, at)


def _layer_time(row: Any, where: str) -> LayerTime:
    return LayerTime(*(_number(x, where, most=MAX_LAYER_S) for x in _list(row, 3, where)))


def _sizes(document: Mapping[str, Any], depth: int, where: str, into: ProfileFiles, model: str | None) -> None:
    if depth not in (2, 3):
        raise FormatError(f"{depth} levels of tables above the sizes", where=where, hint="model -> TP -> layer -> {params_floats, ...}")
    tree = document if depth == 3 else {model or "": document}
    for m, degrees in tree.items():
        for degree, layers in _table(degrees, f"{where}: {m}").items():
            at = f"{where}: {m}.{degree}"
            rows = tuple(_layer_size(row, f"{at}.{i}") for i, row in enumerate(_layers(layers, at)))
            _put(into.sizes.setdefault(m, {}), _count(degree, at), rows, at)


def _layer_size(row: Any, where: str) -> LayerSize:
    table = _table(row, where)
    names = ("params_floats", "act_mem_floats", "act_output_floats")
    missing = [n for n in names if n not in table]
    if missing:
        raise FormatError(f"{missing[0]} is missing", where=where)
    return LayerSize(*(_number(table[n], f"{where}.{n}", most=1e15) for n in names))


# ---- network -----------------------------------------------------------------------------------------------------------


def _network(document: Mapping[str, Any], depth: int, where: str, into: ProfileFiles) -> None:
    if depth not in (2, 6):
        raise FormatError(f"{depth} levels of tables above the coefficients", where=where, hint="GPU -> n, or zone -> GPU -> n -> zone -> GPU -> n")
    for keys, leaf in _walk(document, depth, where):
        at = f"{where}: {'.'.join(keys)}"
        curve = _curve(leaf, at)
        if depth == 2:
            _put(into.inside, (_name(keys[0], at), _count(keys[1], at)), curve, at)
        else:
            ends = tuple(x for i in (0, 3) for x in (_name(keys[i], at), _name(keys[i + 1], at), _count(keys[i + 2], at)))
            _put(into.between, ends, curve, at)


def _walk(value: Any, depth: int, where: str, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if depth == 0:
        yield keys, value
        return
    for key, item in _table(value, f"{where}: {'.'.join(keys)}" if keys else where).items():
        yield from _walk(item, depth - 1, where, (*keys, key))


def _curve(leaf: Any, where: str) -> RateCurve:
    coefficients, peak = _list(leaf, 2, where)
    c2, c1, c0 = (_number(x, where, most=1e6, least=-1e6) for x in _list(coefficients, 3, where))
    curve = RateCurve(c2=c2, c1=c1, c0=c0, peak_Bps=_number(peak, where, most=1e15, least=1.0))
    try:
        for size in (1e6, 1e9):
            curve.rate_Bps(size)
    except UsageError as error:
        raise FormatError(error.message, where=where) from None
    return curve


# ---- Metis -------------------------------------------------------------------------------------------------------------


def _metis(document: Mapping[str, Any], where: str, into: ProfileFiles, model: str | None, device: str | None) -> None:
    named = _METIS_NAME.match(where)
    if named is None:
        raise UsageError("a Metis file's name says what it was measured with", where=where, hint="DeviceType.<device>_tp<degree>_bs<size>.json")
    entry = Entry(device or named["device"], _count(named["microbatch"], where), _count(named["tensor"], where))
    run, memory = _table(document["execution_time"], f"{where}: execution_time"), document.get("execution_memory")
    about = document.get("model")
    about = about if isinstance(about, dict) else {}
    name = model or about.get("model_name")
    if not isinstance(name, str):
        raise FormatError("model.model_name must be a text", where=where)
    at = f"{where}: execution_time.layer_compute_total_ms"
    both = [_number(x, at, most=MAX_LAYER_S * 1e3) / 1e3 for x in _list(run.get("layer_compute_total_ms"), None, at)]
    update_s = _number(run.get("optimizer_time_ms", 0.0), f"{where}: execution_time.optimizer_time_ms", most=MAX_LAYER_S * 1e3) / 1e3
    shares = _shares(about, len(both), where)
    times = tuple(LayerTime(t * FORWARD_SHARE, t * (1 - FORWARD_SHARE), update_s * s) for t, s in zip(both, shares, strict=True))
    _put(into.times.setdefault(_name(name, where), {}), entry, times, where)
    into.split_assumed = FORWARD_SHARE
    if isinstance(memory, dict) and "layer_memory_total_mb" in memory:
        at = f"{where}: execution_memory.layer_memory_total_mb"
        rows = tuple(round(_number(x, at, most=1e9) * 2**20) for x in _list(memory["layer_memory_total_mb"], len(both), at))
        _put(into.memory_bytes.setdefault(name, {}), entry, rows, where)


def _shares(about: Mapping[str, Any], layers: int, where: str) -> list[float]:
    """Of the optimizer's time: in proportion to the parameters where the file gives them, else equal."""
    parameters = about.get("parameters")
    if not isinstance(parameters, dict) or "parameters_per_layer_bytes" not in parameters:
        return [1 / layers] * layers
    at = f"{where}: model.parameters.parameters_per_layer_bytes"
    sizes = [_number(x, at, most=1e15) for x in _list(parameters["parameters_per_layer_bytes"], layers, at)]
    total = math.fsum(sizes)
    return [s / total for s in sizes] if total > 0 else [1 / layers] * layers
