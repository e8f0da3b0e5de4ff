"""Finding the fabric that a command names: `FILE.toml`, `FILE.json` or `PRESET[:n][?option=value&...]`, and a part of it.

    load_fabric("dgx-a100:2")                    a preset
    load_fabric("p5.48xlarge:4")                 the same by its provider's name; the fabric is called p5:4
    load_fabric("v5p-128")                       a TPU slice, as its provider counts it (cores here); the fabric is called tpu-v5p:64
    load_fabric("dgx-h100:16?net=rails")         with options
    load_fabric("my.toml", devices="0-3,8-11")   some devices of a file
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...errors import UnknownName, UsageError
from ...fabric.edit import bundled
from ...fabric.fabric import Fabric
from ...fabric.machines import MACHINES
from ...fabric.near import facts, near_machines
from ...fabric.presets import ALIASES, MAX_DEVICES, PRESETS, Chosen, Option, Preset
from ..limits import MAX_QUANTITY
from ..quantity import parse_flops, parse_rate_Bps, parse_size_bytes
from .toml import read_fabric_json, read_fabric_toml

__all__ = ["load_fabric", "parts_down", "parts_slow", "select_devices"]

_NUMBER = re.compile(r"\d{1,9}\Z")
_SIDES = re.compile(r"\d{1,4}(x\d{1,4}){1,2}\Z")
_SIZED = re.compile(r"(.*-)(\d{1,6})\Z")
_PROVIDER = re.compile(r"\A(?:(?:aws|amazon|ec2|gcp|gce|google|cloud|azure|microsoft|nvidia|amd)[ :/._-]+)+")
_SHOWN = 8  # names in a hint
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})\Z")
_FRACTION = re.compile(r"\d{1,9}/\d{1,9}\Z|\d{0,9}\.?\d{1,9}\Z")


def load_fabric(spec: str, devices: str | None = None, *, as_written: bool = False) -> Fabric:
    """The fabric that `spec` names, or the part of it that `devices` names (numbers, ranges and names, separated by commas).

    Links side by side in a file are one link (`edit.bundled`), unless it is wanted as it is written.

    Raises: UnknownName for a preset or device that does not exist; UsageError for a bad size or option; FormatError for a bad file.
    """
    lowered = spec.lower()
    if lowered.endswith(".toml"):
        fabric = read_fabric_toml(spec)
    elif lowered.endswith(".json"):
        fabric = read_fabric_json(spec)
    else:
        fabric = _preset(spec)
    if not as_written:
        fabric = bundled(fabric)
    return fabric if devices is None else select_devices(fabric, devices)


def _preset(spec: str) -> Fabric:
    head, question, query = spec.partition("?")
    name, colon, size = head.partition(":")
    preset = PRESETS.get(name)
    if preset is None:
        name, size, query = _aliased(spec, name, size, query)
        preset, colon, question = PRESETS[name], colon if not size else ":", "?" if query else ""
    if colon and not _NUMBER.match(size):
        raise UsageError(f"{name!r}: the number of {preset.unit} must be a whole number, got {size[:32]!r}", hint=_example(preset))
    n = int(size) if colon else preset.default
    if not 1 <= n <= MAX_DEVICES:
        raise UsageError(f"{spec[:64]!r}: the number of {preset.unit} must be between 1 and {_most(preset)}, got {n}", hint=_example(preset))
    options = _options(preset, query) if question else {}
    chosen = Chosen(**{k: value for k, (_, value) in options.items()})
    if preset.devices_in(n, chosen) > MAX_DEVICES:
        what = f"must be between 1 and {_most(preset)}, got {n}" if preset.devices_per_unit else f"{n} makes more than {MAX_DEVICES} devices"
        raise UsageError(f"{spec[:64]!r}: the number of {preset.unit} {what}", hint=_example(preset))
    suffix = "?" + "&".join(f"{k}={v}" for k, (v, _) in sorted(options.items())) if options else ""
    return preset.build(n, f"{name}:{n}{suffix}", chosen)


def _aliased(spec: str, name: str, size: str, query: str) -> tuple[str, str, str]:
    """(preset, size, query) for a provider's name. `v5p-128:2` is two slices of 64 chips: 128 counts cores, two to a chip.

    Raises: UnknownName, with what is near by specification and by spelling.
    """
    plain = name.casefold().removeprefix("ml.")  # SageMaker's names are EC2's with this in front
    if plain in ALIASES:
        return ALIASES[plain], size, query
    if (found := _SIZED.match(plain)) and (preset := ALIASES.get(f"{found[1]}*")):
        chips, rest = divmod(int(found[2]), MACHINES[preset].cores_per_chip)
        if rest or not chips:
            raise UsageError(f"{name!r}: {found[2]} is not a number of cores, which come in twos", hint=f"e.g. {found[1]}8")
        return preset, str(chips), "&".join([*([query] if query else []), *([f"slices={size}"] if size else [])])
    from difflib import get_close_matches

    if Path(spec).is_file():
        hint = f"`meshwright fabric import {spec[:64]} -o cluster.toml` reads other files"
        raise UsageError("is a file, but its name ends in neither .toml nor .json", where=spec[:64], hint=hint)
    if spec and Path(spec).is_dir():
        raise UsageError("is a folder, not a fabric", where=spec[:64], hint="name a .toml or .json file, or a preset")
    near = near_machines(plain[:64])
    spelt = {known.casefold(): known for known in (*PRESETS, *(alias for p in PRESETS.values() for alias in p.aliases if "*" not in alias))}
    close = [spelt[x] for x in get_close_matches(_PROVIDER.sub("", plain[:64]), list(spelt), n=1, cutoff=0.75 if near else 0.6)]
    hints = [*([f"did you mean {close[0]!r}?"] if close else []), *([f"near by specification: {', '.join(map(facts, near))}"] if near else [])]
    known = "; ".join(hints) or f"presets: {', '.join(list(PRESETS)[:_SHOWN])}, ...; `meshwright fabric list` shows all"
    raise UnknownName(f"no fabric is called {name[:64]!r}", hint=f"{known} (a file must end in .toml or .json)")


def _example(preset: Preset) -> str:
    return f"e.g. {preset.name}:{preset.default}"


def _most(preset: Preset) -> int:
    return MAX_DEVICES // (preset.devices_per_unit or 1)


def _options(preset: Preset, query: str) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for item in query.split("&"):
        name, equals, text = item.partition("=")
        option = preset.options.get(name)
        if option is None:
            from difflib import get_close_matches

            close = get_close_matches(name, list(preset.options), n=1)
            known = f"did you mean {close[0]!r}?" if close else f"its options: {', '.join(preset.options)}"
            raise UnknownName(f"preset {preset.name!r} has no option {name[:64]!r}", hint=known)
        if not equals or name in found:
            raise UsageError(f"{preset.name}: option {name!r} must be given once, as {name}=VALUE", hint=option.help)
        found[name] = (text, _value(f"{preset.name}: option {name!r}", option, text))
    return found


def _value(where: str, option: Option, text: str) -> Any:
    if option.kind == "choice":
        if text not in option.choices:
            raise UsageError(f"{where}: must be one of {', '.join(option.choices)}, got {text[:32]!r}", hint=option.help)
        return text
    if option.kind == "flag":
        if text not in ("0", "1"):
            raise UsageError(f"{where}: must be 0 or 1, got {text[:32]!r}", hint=option.help)
        return text == "1"
    if option.kind == "sides":
        if not _SIDES.match(text) or not all(map(int, text.split("x"))):
            raise UsageError(f"{where}: must be two or three numbers such as 4x4x8, got {text[:32]!r}", hint=option.help)
        return tuple(map(int, text.split("x")))
    if option.kind == "count":
        if not _NUMBER.match(text) or int(text) < 1:
            raise UsageError(f"{where}: must be a whole number > 0, got {text[:32]!r}", hint=option.help)
        return int(text)
    parse = {"rate": parse_rate_Bps, "size": parse_size_bytes, "flops": parse_flops}[option.kind]
    try:
        value = parse(text)
    except ValueError as error:
        raise UsageError(f"{where}: {error}", hint=option.help) from None
    if not 1 <= value <= MAX_QUANTITY:
        raise UsageError(f"{where}: must be between 1 and {MAX_QUANTITY}, got {value}", hint=option.help)
    return value


# ---- parts of a fabric -------------------------------------------------------------------------------------------------
def select_devices(fabric: Fabric, devices: str) -> Fabric:
    """The part of `fabric` that `devices` names: `"0-3,8-11"`, `"box0/gpu0,box1/gpu0"` or a mixture; in fabric order.

    The part's name says what it is a part of: `dgx-a100:2[0-3,8-11]`.
    Raises: UsageError, UnknownName.
    """
    chosen: set[int] = set()
    for item in devices.split(","):
        item = item.strip()
        if item in fabric.actor_of and fabric.actor_of[item] < len(fabric.devices):
            _choose(fabric, chosen, [fabric.actor_of[item]])
            continue
        match = _RANGE.match(item)
        first, last = (int(match[1]), int(match[2])) if match else (int(item), int(item)) if _NUMBER.match(item) else (-1, -1)
        if first < 0:
            raise _no_device(fabric, item)
        if first > last or last >= len(fabric.devices):
            hint = f"devices of {fabric.name!r} are 0-{len(fabric.devices) - 1}"
            raise UsageError(f"--devices: {item!r} is not a range of its devices", hint=hint)
        _choose(fabric, chosen, range(first, last + 1))
    part = fabric.subset(sorted(chosen))
    if len(chosen) == len(fabric.devices):
        return part
    return replace(part, name=f"{fabric.name[:64]}[{_ranges(sorted(chosen))}]")


def _choose(fabric: Fabric, chosen: set[int], more: Iterable[int]) -> None:
    for device in more:
        if device in chosen:
            raise UsageError(f"--devices: {fabric.devices[device].name!r} is named twice", hint="each rank needs a device of its own")
        chosen.add(device)


def parts_down(text: str | None) -> tuple[str, ...]:
    """`"box0/nic3,box1"` -> the names. Raises: UsageError."""
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    if not all(names):
        raise UsageError(f"an empty name in {str(text)[:64]!r}", where="--without", hint="e.g. --without box0/nic3,box1/gpu5")
    return names


def parts_slow(text: str | None) -> dict[str, Fraction]:
    """`"box0/nic3=0.5,box1=2/3"` -> name and fraction of its rate, above 0 and below 1. Raises: UsageError."""
    found: dict[str, Fraction] = {}
    for item in text.split(",") if text else ():
        name, equals, value = (part.strip() for part in item.rpartition("="))
        if not name or not equals or name in found or not _FRACTION.match(value):
            raise UsageError(f"not NAME=FRACTION, once each: {item[:64]!r}", where="--degrade", hint="e.g. --degrade box0/nic3=0.5")
        factor = Fraction(value) if not value.endswith("/0") else Fraction(0)
        if not 0 < factor < 1:
            raise UsageError(f"must be above 0 and below 1, got {value}", where=f"--degrade {name}", hint="a part that is down: --without")
        found[name] = factor
    return found


def _no_device(fabric: Fabric, item: str) -> UnknownName:
    from difflib import get_close_matches

    names = [d.name for d in fabric.devices[:4096]]
    close = get_close_matches(item, names, n=1)
    known = f"did you mean {close[0]!r}?" if close else f"devices are 0-{len(fabric.devices) - 1}, or names such as {names[0]!r}"
    return UnknownName(f"--devices: fabric {fabric.name!r} has no device {item[:64]!r}", hint=known)


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3,8` for 0 1 2 3 8; shortened when it would not fit into a name."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(text) <= 60 else text[:50].rpartition(",")[0] + ",..."
