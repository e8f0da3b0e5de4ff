"""The tensors behind a rank's buffers.

Persistent buffers (gradients, a collective's data, scratch) are flat tensors that live as long as the executor. Values of
micro-batches (`act:`, `grad:`, `gradpart:`) exist from the step that makes them to the last step that uses them. A value that
messages touch is held flat as well, padded to the plan's chunks where they do not divide it. Buffers of all parts of a value that is split along
the sequence are flat, in the form of `sequence_parts`; `read` gives their whole value. Whole weights and gradients that exist
for a while only (`gathered:`, `gradfull:`) are flat tensors too, a new one every time: messages still on their way keep the old one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...errors import Unsupported
from ...plan.context import filled_rows
from ...plan.plan import TrainingLayout, ValueInfo
from ...program.program import Kind, Part, Program
from .sequence_parts import ALL_PARTS, PartsForm, parts_forms

__all__ = ["BufferInfo", "RankMemory", "StagingPool"]

DYNAMIC = ("act", "remade", "grad", *ALL_PARTS)
WITH_SEGMENT = ("gradpart", "actall", "actagain", "remadeall")  # kinds whose names have a segment between value and micro-batch
WHOLE = {"gathered": "shard", "gradfull": "gradshard"}  # whole weights and gradients of a moment, and the parts that live on


@dataclass(frozen=True)
class BufferInfo:
    """`elements` counts padding, `numel` does not. `kind` is the part of the name before the first colon."""

    kind: str
    value: str
    microbatch: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    elements: int
    per_chunk: int


class StagingPool:
    """Receive buffers that are used again, also for shorter messages; one that is too short makes room for a longer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        free = self.free[numel, dtype]
        if free:
            return free.pop()
        longer = min((n for (n, kind), found in self.free.items() if kind == dtype and n > numel and found), default=0)
        if longer:
            return self.free[longer, dtype].pop()[:numel]
        shorter = max((n for (n, kind), found in self.free.items() if kind == dtype and found), default=0)
        # In exchange for the longer one that is made below, so the pool does not grow with every new length.
        if shorter:
            self.free[shorter, dtype].pop()
        return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, tensor: torch.Tensor) -> None:
        # What was given as the head of a longer one goes back as the whole.
        whole = tensor if tensor._base is None else tensor._base
        self.free[whole.numel(), whole.dtype].append(whole)


class RankMemory:
    """`values[b]` is the shaped tensor of buffer b (dynamic buffers), `flats[b]` its flat form."""

    def __init__(
        self, program: Program, rank: int, device: torch.device, values: Mapping[str, ValueInfo], persistent: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32, layout: TrainingLayout | None = None,
    ) -> None:  # fmt: skip
        self.device, self.rank = device, rank
        self.forms: dict[str, PartsForm] = parts_forms(layout)
        self.in_parts: dict[int, PartsForm] = {}  # buffers that hold all parts of a value
        self.staging = StagingPool(device)
        n = len(program.buffers)
        self.values: list[torch.Tensor | None] = [None] * n
        self.flats: list[torch.Tensor | None] = [None] * n
        self.infos: list[BufferInfo | None] = [None] * n
        self.by_name: dict[str, int] = {}
        self.filled_rows = {} if layout is None else filled_rows(layout)
        self.counts: dict[int, int] = {}  # buffers of experts' rows -> that with how many of each expert's are filled
        self.maxima: set[int] = set()  # buffers whose parts are combined by maximum
        self.transferred: set[int] = set()  # buffers that messages or local copies touch
        self.overwritten: set[int] = set()  # and those that they write
        s = program.steps
        for step in (s.kind == Kind.TRANSFER).nonzero()[0].tolist():
            if s.parts[step] & Part.READ:
                self.transferred.add(int(s.src_buffer[step]))
            if s.parts[step] & Part.STORE:
                self.transferred.add(int(s.dst_buffer[step]))
                self.overwritten.add(int(s.dst_buffer[step]))
        for buffer in (program.buffers.actor == rank).nonzero()[0].tolist():
            self._describe(program, buffer, values, persistent, dtype)
        for buffer, info in enumerate(self.infos):
            if info is not None and info.kind and (name := f"act:{self.filled_rows.get(info.value)}:{info.microbatch}") in self.by_name:
                self.counts[buffer] = self.by_name[name]
        self.kept = frozenset(self.counts.values())  # as long as rows may travel

    def _describe(
        self, program: Program, buffer: int, values: Mapping[str, ValueInfo], persistent: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        b = program.buffers
        name = b.name[buffer] if b.name else ""
        kind, _, rest = name.partition(":")
        self.by_name[name or f"#{buffer}"] = buffer
        size, chunk_bytes = int(b.chunks[buffer]) * int(b.chunk_bytes[buffer]), int(b.chunk_bytes[buffer])
        if kind in DYNAMIC:
            value, _, microbatch = rest.rpartition(":")
            if kind in WITH_SEGMENT:
                value = value.rpartition(":")[0]
            info = values.get(value)
            if info is None:
                raise Unsupported(f"buffer {name!r} holds a value that the layout does not list")
            if info.reduce == "max" and kind in ("act", "remade"):
                self.maxima.add(buffer)
            own: torch.dtype = getattr(torch, info.dtype)
            numel, shape = info.size_bytes // own.itemsize, info.shape
            if kind in ALL_PARTS and value in self.forms:
                self.in_parts[buffer] = self.forms[value]
                numel = size // own.itemsize
                shape = (numel,)
            self.infos[buffer] = self._info(name, kind, value, int(microbatch), own, shape, numel, size, chunk_bytes)
            return
        if kind in WHOLE:
            group = rest.lstrip("0123456789")
            base = persistent.get(f"{WHOLE[kind]}{group}")
            if base is None:
                raise Unsupported(f"buffer {name!r} holds a group that rank {self.rank} has no part of")
            count = size // base.element_size()
            self.infos[buffer] = self._info(name, kind, group, -1, base.dtype, (count,), count, size, chunk_bytes)
            return
        if buffer not in self.transferred:
            return  # weights, state, saved values: torch holds them
        if int(b.alias_of[buffer]) >= 0:
            base = self.flats[int(b.alias_of[buffer])]
            if base is None:
                raise Unsupported(f"buffer {name or buffer!r} lies in one that comes after it")
            start = int(b.alias_offset_bytes[buffer]) // base.element_size()
            self.flats[buffer] = base[start : start + size // base.element_size()]
            own = base.dtype
        elif name in persistent:
            own = persistent[name].dtype
            self.flats[buffer] = persistent[name]
        else:
            own = dtype
            self.flats[buffer] = torch.empty(size // own.itemsize, dtype=own, device=self.device)
        flat = self.flats[buffer]
        assert flat is not None
        self.infos[buffer] = self._info(name, "", name, -1, own, (flat.numel(),), flat.numel(), size, chunk_bytes)

    def _info(
        self, name: str, kind: str, value: str, microbatch: int, dtype: torch.dtype, shape: tuple[int, ...], numel: int, size: int, chunk_bytes: int
    ) -> BufferInfo:
        if chunk_bytes % dtype.itemsize:
            raise Unsupported(f"buffer {name!r} has chunks of {chunk_bytes} bytes, which cut its {dtype} elements")
        elements = size // dtype.itemsize
        if elements < numel:
            raise Unsupported(f"buffer {name!r} has {size} bytes for {numel} elements of {dtype}")
        return BufferInfo(kind, value, microbatch, dtype, shape, numel, elements, chunk_bytes // dtype.itemsize)

    def takes_maximum(self, buffer: int) -> bool:
        """Adding to or from this buffer means the larger of the two."""
        return buffer in self.maxima

    def info(self, buffer: int) -> BufferInfo:
        found = self.infos[buffer]
        if found is None:
            raise Unsupported(f"buffer {buffer} of rank {self.rank} cannot be sent or received")
        return found

    # ---- values ------------------------------------------------------------------------------------------------
    def put(self, buffer: int, tensor: torch.Tensor, *, shared: bool = False) -> None:
        """Make `tensor` the value of a dynamic buffer. `shared`: its storage belongs to another value too."""
        if buffer not in self.transferred:
            self.values[buffer] = tensor
            return
        info = self.info(buffer)
        if buffer in self.in_parts:
            self.put_flat(buffer, self.in_parts[buffer].put(tensor.clone() if shared else tensor, info.elements))
            return
        # Chunks round a value up; the rest is zero, as it travels and is added like the value itself.
        if info.elements != info.numel:
            flat = torch.zeros(info.elements, dtype=info.dtype, device=self.device)
            flat[: info.numel].view(info.shape).copy_(tensor)
            self.put_flat(buffer, flat)
            return
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        # Two values in one storage are harmless until a message is written into one of them.
        elif shared and buffer in self.overwritten:
            tensor = tensor.clone()
        self.values[buffer], self.flats[buffer] = tensor, tensor.view(-1)

    def read(self, buffer: int) -> torch.Tensor | None:
        """The value of a dynamic buffer; the whole tensor where it holds all parts of one, which has one reader: the parts are let go."""
        value = self.values[buffer]
        if value is None or buffer not in self.in_parts:
            return value
        self.values[buffer] = self.flats[buffer] = None
        return self.in_parts[buffer].take(value)

    def put_flat(self, buffer: int, flat: torch.Tensor) -> None:
        info = self.info(buffer)
        self.flats[buffer] = flat
        self.values[buffer] = flat[: info.numel].view(info.shape)

    def make(self, buffer: int, *, zero: bool = False) -> torch.Tensor:
        """The flat tensor of a buffer, made now if the value does not exist yet."""
        flat = self.flats[buffer]
        if flat is None:
            info = self.info(buffer)
            flat = (torch.zeros if zero else torch.empty)(info.elements, dtype=info.dtype, device=self.device)
            self.put_flat(buffer, flat)
        return flat

    def drop(self, buffer: int) -> None:
        info = self.infos[buffer]
        if info is not None and info.kind and buffer not in self.kept:
            self.values[buffer] = self.flats[buffer] = None

    def drop_values(self) -> None:
        self.kept, kept = frozenset(), self.kept
        for buffer in range(len(self.infos)):
            self.drop(buffer)
        self.kept = kept

    # ---- filled rows -------------------------------------------------------------------------------------------
    def _block(self, buffer: int, chunk: int) -> tuple[torch.Tensor, list[int]]:
        """Buffers [e, C, H] of the e experts of a block, and the filled rows of each."""
        info, counts = self.info(buffer), self.values[self.counts[buffer]]
        assert counts is not None, "numbers of rows travel before rows"
        own = info.shape[0] * info.per_chunk // info.numel
        rows = self.make(buffer)[chunk * info.per_chunk : (chunk + 1) * info.per_chunk].view(own, *info.shape[1:])
        return rows, counts.reshape(-1)[chunk * own : (chunk + 1) * own].tolist()

    def pack(self, buffer: int, chunk: int) -> torch.Tensor:
        """The filled rows of a block, one after the other, in staging."""
        rows, each = self._block(buffer, chunk)
        width = rows.shape[2]
        packed, at = self.staging.take(sum(each) * width, rows.dtype), 0
        for e, n in enumerate(each):
            packed[at : at + n * width].view(n, width).copy_(rows[e, :n])
            at += n * width
        return packed

    def unpack(self, buffer: int, chunk: int, packed: torch.Tensor, *, add: bool) -> None:
        """Puts filled rows in their places of a block. Nobody reads the others."""
        rows, each = self._block(buffer, chunk)
        at, width = 0, rows.shape[2]
        for e, n in enumerate(each):
            came = packed[at : at + n * width].view(n, width)
            rows[e, :n] = rows[e, :n] + came if add else came
            at += n * width

    def view(self, buffer: int, first: int, count: int, *, zero: bool = False) -> Callable[[], torch.Tensor]:
        """A function that gives the elements of a chunk range; `zero`: a value that does not exist yet is zero."""
        info = self.info(buffer)
        low, high = first * info.per_chunk, (first + count) * info.per_chunk
        if not info.kind:
            flat = self.flats[buffer]
            assert flat is not None
            fixed = flat[low:high]
            return lambda: fixed
        make = self.make
        if low == 0 and high == info.elements:
            # Asked for at every use: a dynamic value has a new tensor for every micro-batch, and after it has been dropped.
            return lambda: make(buffer, zero=zero)
        return lambda: make(buffer, zero=zero)[low:high]
