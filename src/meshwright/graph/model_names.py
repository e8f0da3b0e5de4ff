"""Names of models by their configuration, taken apart without torch: `hf:CONFIG.json[:Class][@LENGTH,DTYPE]`, or a folder with `config.json`."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import MissingExtra, UnknownName, UsageError

__all__ = ["DTYPES", "NAME_HINT", "PREFIX", "HfName", "hf_name", "hub_hint", "require_transformers", "with_dtype", "with_length"]

PREFIX = "hf:"
DTYPES = ("float32", "bfloat16", "float16", "float64")  # of weights
NAME_HINT = "hf:CONFIG.json[:Class][@LENGTH,DTYPE], or a folder with config.json"
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HfName:
    """A model's name taken apart. `folder`: where weights may be, None for a file alone; `length`: 0, `dtype`: "" where none is given."""

    config: Path
    folder: Path | None
    kind: str = ""
    length: int = 0
    dtype: str = ""


def hf_name(name: str) -> HfName | None:
    """The parts of a name, or None for a model function's. Raises: UsageError, UnknownName for one that begins as ours and is not."""
    bare = name.removeprefix(PREFIX)
    if bare == name and not (Path(name) / "config.json").is_file():
        return None
    place, at, text = bare.rpartition("@")
    if not at:
        place, text = bare, ""
    length, dtype = 0, ""
    for option in text.split(",") if at else ():
        if option in DTYPES and not dtype:
            dtype = option
        elif option.isdecimal() and int(option) > 0 and not length:
            length = int(option)
        else:
            raise UsageError(f"{option!r} is not a length or a dtype", where=name, hint=f"{NAME_HINT}; dtypes: {', '.join(DTYPES)}")
    path, _, kind = place.partition(":") if not Path(place).exists() else (place, "", "")
    if kind and not kind.isidentifier():
        raise UsageError(f"{kind!r} is not the name of a class", where=name, hint=NAME_HINT)
    found = Path(path)
    if found.is_dir() and (found / "config.json").is_file():
        return HfName(config=found / "config.json", folder=found, kind=kind, length=length, dtype=dtype)
    if found.is_dir() or not found.is_file():
        what = "config.json in the folder" if found.is_dir() else "file"
        raise UnknownName(f"there is no {what} {path!r}", where=name, hint=hub_hint(path) or NAME_HINT)
    return HfName(config=found, folder=None, kind=kind, length=length, dtype=dtype)


def with_length(name: str | None, length: int | None) -> str | None:
    """The name with a sequence length in it, as jobs and plans carry it. Raises: UsageError where the name is not of this kind, or has one."""
    if name is not None and not name.startswith(PREFIX) and (Path(name) / "config.json").is_file():
        name = PREFIX + name
    if length is None or name is None:
        return name
    parts = hf_name(name)
    if parts is None or parts.length or length < 1:
        what = "a length is at least 1" if length < 1 else "the model's name has a length" if parts else "the length is its model function's affair"
        raise UsageError(what, where="--seq-len", hint=NAME_HINT)
    return _with(name, parts, str(length))


def with_dtype(name: str | None, dtype: str) -> str | None:
    """The name with a dtype of weights in it. Raises: UsageError where the name is not of this kind, or has one."""
    name = with_length(name, None)
    if name is None or not dtype:
        return name
    parts = hf_name(name)
    if parts is None or parts.dtype:
        what = "the model's name has a dtype" if parts else "the dtype is its model function's affair"
        raise UsageError(what, where="--dtype", hint=NAME_HINT)
    return _with(name, parts, dtype)


def _with(name: str, parts: HfName, option: str) -> str:
    return f"{name}{',' if parts.length or parts.dtype else '@'}{option}"


def hub_hint(name: str) -> str:
    """What to do with a name as the Hugging Face hub has them; "" for another."""
    if not _ON_THE_HUB.match(name):
        return ""
    folder = name.rpartition("/")[2]
    return f"nothing is fetched from a hub: `hf download {name} config.json --local-dir {folder}`, then --model {folder}"


def require_transformers() -> None:
    """Raises: MissingExtra. Looks for the package without loading it, which takes seconds."""
    try:
        found = importlib.util.find_spec("transformers") is not None
    except ValueError:  # something stands in for it
        found = False
    if not found:
        raise MissingExtra("transformers", extra="hf", needed_for="a model by its configuration")
