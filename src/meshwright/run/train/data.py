"""Training data: what sample `i` is depends on `i` alone, never on who reads it.

Global sample j of step s has index s · global_batch + j; replica d takes the d-th contiguous part of a step's samples,
micro-batch m the m-th part of that. So every layout trains on the same samples, and a resumed run continues where the first one
stopped.

Sources: `python-source` (bytes of the standard library's own `.py` files), a text or binary file (its bytes), `FILE.py:function`
or `module:function` returning a dataset (`len(dataset)` optional, `dataset[i]` -> tuple of tensors, one per example input, target
last), an iterable dataset or a DataLoader (`loader`), and `synthetic`. Samples of changing shape: `padding`.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ...capture.resolve import resolve_function, shown, user_code
from ...errors import UsageError
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import TensorInfo
from .loader import Loaded, Streamed, as_samples, seeded
from .padding import Padding, Together, padding_of

__all__ = ["Batches", "ByteWindows", "Dataset", "Synthetic", "open_data", "rows_of", "samples_in", "source_line"]

MAX_DATA_BYTES = 16_000_000  # of a text that is read: windows of it are samples, and more would not be seen in a short run
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})  # folders whose sources are not read


class Dataset(Protocol):
    def sample(self, index: int) -> tuple[torch.Tensor, ...]: ...


class ByteWindows:
    """Byte-level text: sample i is (bytes, the same shifted by one), windows spread over the text by a fixed multiplicative step."""

    def __init__(self, text: bytes, length: int) -> None:
        if len(text) <= length:
            raise UsageError(f"the text has {len(text)} bytes; windows of {length} need more", hint="give a longer text")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length
        self.places = len(text) - length
        # A step coprime to the number of places visits each once before any repeats, far apart.
        self.stride = next(k for k in range(int(self.places * 0.6180339887), self.places + 2) if _coprime(k, self.places))

    def sample(self, index: int) -> tuple[torch.Tensor, ...]:
        start = index * self.stride % self.places
        window = self.text[start : start + self.length + 1].to(torch.int64)
        return window[:-1], window[1:]


class Synthetic:
    """Random tensors of the example inputs' shapes, drawn per sample index. Integers are drawn from the range of the example's values."""

    def __init__(self, examples: Sequence[torch.Tensor], seed: int) -> None:
        self.seed = seed
        self.specs = [(tuple(x.shape[1:]), x.dtype, int(x.max()) + 1 if not x.is_floating_point() and x.numel() else 0) for x in examples]

    def sample(self, index: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + index) % (1 << 62))
        return tuple(self.draw(shape, dtype, limit, generator) for shape, dtype, limit in self.specs)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, limit: int, generator: torch.Generator) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, dtype=dtype, generator=generator)
        return torch.randint(0, max(1, limit), shape, generator=generator).to(dtype)


class _Indexed:
    """A user's dataset: anything with `dataset[i]`, taken modulo its length if it has one. What it draws follows from the seed and the sample's
    number, as for loaders: ranks that share a sample each ask for it."""

    def __init__(self, dataset: Any, name: str, padding: Padding | Together | None, seed: int) -> None:
        self.dataset, self.name, self.padding, self.seed = dataset, name, padding, seed
        self.length = len(dataset) if hasattr(dataset, "__len__") else 0
        if hasattr(dataset, "__len__") and not self.length:
            raise UsageError("the dataset is empty", where=name)

    def sample(self, index: int) -> tuple[torch.Tensor, ...]:
        with user_code(self.name, self.name.rpartition(":")[0]), seeded(self.seed, "item", index):
            item = self.dataset[index % self.length if self.length else index]
            if isinstance(self.padding, Padding):
                return self.padding(item)
            return tuple(map(torch.as_tensor, item if isinstance(item, (tuple, list)) else (item,)))


def samples_in(dataset: Dataset) -> int:
    """How many samples data has; 0 where it has no length, or goes on for ever."""
    return dataset.length if isinstance(dataset, (Loaded, _Indexed)) else 0


def source_line(dataset: Dataset) -> str:
    """`file:line` of the owner's `__getitem__` or `__iter__`, else the name of the data."""
    inner = getattr(dataset, "dataset", None)
    for name in ("__getitem__", "__iter__"):
        code = getattr(getattr(type(inner), name, None), "__code__", None)
        if code is not None:
            return f"{shown(code.co_filename)}:{code.co_firstlineno}"
    return str(getattr(dataset, "name", ""))


class Batches:
    """Micro-batches of a dataset, checked against the shapes that the model was traced with."""

    def __init__(self, dataset: Dataset, layout: TrainingLayout, inputs: Sequence[TensorInfo], device: torch.device) -> None:
        self.dataset, self.layout, self.inputs, self.device = dataset, layout, inputs, device

    def microbatch(self, step: int, replica: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        lay = self.layout
        first = step * lay.global_batch + lay.first_sample(replica, microbatch)
        if isinstance(self.dataset, (Loaded, Streamed)):
            batch = self.dataset.rows(first, lay.microbatch_size)
        else:
            rows = [self.dataset.sample(first + i) for i in range(lay.microbatch_size)]
            for i, row in enumerate(rows):
                self.require(row, f"sample {first + i}")
            batch = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        self.require(batch, f"the batch of samples {first} to {first + lay.microbatch_size - 1}", rows=True)
        return tuple(x.to(self.device) for x in batch)

    def require(self, tensors: Sequence[torch.Tensor], what: str, *, rows: bool = False) -> None:
        """Raises: UsageError where a sample (or `rows` of them) is not what the model was traced with: a plan is for one shape."""
        where = source_line(self.dataset)
        if len(tensors) != len(self.inputs):
            raise UsageError(f"{what} has {len(tensors)} tensors, the model takes {len(self.inputs)} (target last)", where=where)
        for i, (x, info) in enumerate(zip(tensors, self.inputs, strict=True)):
            wanted = info.shape if rows else info.shape[1:]
            if tuple(x.shape) != wanted or str(x.dtype) != f"torch.{info.dtype}":
                raise UsageError(
                    f"tensor {i} of {what} is {tuple(x.shape)} {x.dtype}, the model takes {wanted} torch.{info.dtype}", where=where,
                    hint="a plan is for one shape: pad to it (--data NAME?pad=VALUE,...), or give the model inputs as long as the longest sample",
                    data={"given": list(x.shape), "planned": list(wanted)},
                )  # fmt: skip

    def close(self) -> None:
        """End what fetches ahead."""
        if isinstance(self.dataset, (Loaded, Streamed)):
            self.dataset.close()


def rows_of(dataset: Dataset, first: int, count: int) -> tuple[torch.Tensor, ...]:
    """Samples in a row as one batch, padded alike where the data says how. Raises: UsageError for samples of unlike shapes."""
    if isinstance(dataset, (Loaded, Streamed)):
        return dataset.rows(first, count)
    rows: Sequence[tuple[torch.Tensor, ...]] = [dataset.sample(first + i) for i in range(count)]
    padding = getattr(dataset, "padding", None)
    if isinstance(padding, Together):
        rows = padding(rows)
    shapes = [tuple(tuple(x.shape) for x in row) for row in rows]
    odd = next((i for i, s in enumerate(shapes) if s != shapes[0]), None)
    if odd is not None:
        raise UsageError(
            f"sample {first + odd} has {shapes[odd]}, sample {first} of the same batch {shapes[0]}", where=source_line(dataset),
            hint="say what shorter samples are filled up with: --data NAME?pad=VALUE,...",
        )  # fmt: skip
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def open_data(name: str, examples: Sequence[torch.Tensor], seed: int, global_batch: int = 1, *, together: bool = False) -> Dataset:
    """The dataset called `name` for a model with these example inputs; of so many samples a step (loaders with `drop_last` want to know).
    `together`: samples are padded to the longest of their batch, not to the examples (`rows_of`).

    Raises: as `loader.as_samples`; UsageError when a text source does not fit the model's inputs, a file is missing, or the name means nothing.
    """
    name, padding = padding_of(name, examples, together=together)
    if name == "synthetic":
        return Synthetic(examples, seed)
    if name == "python-source":
        return ByteWindows(python_source(), _window(examples, name))
    path = Path(name)
    if path.is_file() and ":" not in name:
        with path.open("rb") as file:
            return ByteWindows(file.read(MAX_DATA_BYTES), _window(examples, name))
    if ":" in name:
        with user_code(name, name.rpartition(":")[0]):
            made = resolve_function(name, what="data")()
        return as_samples(made, name, seed, global_batch, padding) or _Indexed(made, name, padding, seed)
    raise UsageError(f"no data {name!r}", where="--data", hint="python-source, synthetic, a file of text, or FILE.py:function")


@cache
def python_source() -> bytes:
    """The standard library's Python files in sorted order, tests and site-packages left out, cut at `MAX_DATA_BYTES`."""
    parts: list[bytes] = []
    total = 0
    for path in source_files(Path(sysconfig.get_paths()["stdlib"])):
        data = path.read_bytes()
        parts.append(data)
        total += len(data)
        if total >= MAX_DATA_BYTES:
            break
    return b"".join(parts)[:MAX_DATA_BYTES]


def source_files(root: Path) -> list[Path]:
    """The `.py` files below a folder, sorted. What is left out is not entered: site-packages may hold a hundred thousand files."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _window(examples: Sequence[torch.Tensor], name: str) -> int:
    ok = len(examples) == 2 and all(x.dim() == 2 and x.dtype == torch.int64 for x in examples) and examples[0].shape == examples[1].shape
    if not ok:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in examples)
        raise UsageError(
            f"text gives (tokens, next tokens), but the model takes {shapes}",
            where=name,
            hint="use --data synthetic, or FILE.py:function for your own data",
        )
    return int(examples[0].shape[1])


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1
