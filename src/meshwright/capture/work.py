"""What one ATen call costs: flops, bytes read and written from its distinct operand storages, kernels launched.

A call that returns views of its operands costs nothing. An operand that is a broadcast view counts with its storage's bytes, one that
is a slice with its own; several views of one storage count at most that storage. Look-ups count the rows they touch, every time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshwright.graph.graph import Work

from .flops import flops_of, lookup_elements
from .torch_private import storage_key

__all__ = ["tensor_bytes", "tensors_in", "work_of"]

aten = torch.ops.aten
_LOOKUPS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten._unsafe_index}
_BAGS = {aten._embedding_bag, aten._embedding_bag_forward_only}
_UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_}


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def tensor_bytes(x: torch.Tensor) -> int:
    """Bytes of the elements a tensor addresses; for a sparse one, of its indices and values."""
    if x.layout != torch.strided:
        return _sparse_bytes(x)
    return min(int(x.numel()) * int(x.element_size()), int(x.untyped_storage().nbytes()))


def _sparse_bytes(x: torch.Tensor) -> int:
    indices, values = x._indices(), x._values()
    return int(indices.numel()) * int(indices.element_size()) + int(values.numel()) * int(values.element_size())


def work_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Work:
    """`Work` of one call whose operands and result are tensors, fake or real."""
    if target is operator.getitem:
        return Work()
    packet = getattr(target, "overloadpacket", None)
    operands, results = list(tensors_in((args, kwargs))), list(tensors_in(result))
    written = _written(target, args, kwargs)
    known = {_key(x) for x in operands}
    fresh = [x for x in results if _key(x) not in known]
    if not fresh and not written:
        return Work()
    read = operands
    if packet in _OVERWRITES or packet in _LOOKUPS or packet in _BAGS:
        read = operands[1:]
    bytes_read = _distinct_bytes(read)
    if packet in _LOOKUPS and operands:
        bytes_read += sum(map(tensor_bytes, fresh))
    elif packet in _BAGS:
        row = int(operands[0].shape[-1]) * operands[0].element_size()
        bytes_read += int(operands[1].numel()) * row
    elif packet is torch.ops.meshwright.table_rows:
        bytes_read = tensor_bytes(operands[0]) + lookup_elements(operands[0].shape, args[2]) * operands[1].element_size()
    bytes_written = 0 if packet in _UNWRITTEN else _distinct_bytes([*fresh, *written])
    return Work(flops=flops_of(target, args, kwargs, result), bytes_read=bytes_read, bytes_written=bytes_written, calls=1)


def _key(x: torch.Tensor) -> int:
    return storage_key(x) if x.layout == torch.strided else -id(x)


def _distinct_bytes(tensors: Sequence[torch.Tensor]) -> int:
    sizes: dict[int, int] = {}
    limits: dict[int, int] = {}
    for x in {id(x): x for x in tensors}.values():
        key = _key(x)
        limits[key] = int(x.untyped_storage().nbytes()) if x.layout == torch.strided else tensor_bytes(x)
        sizes[key] = sizes.get(key, 0) + tensor_bytes(x)
    return sum(min(size, limits[key]) for key, size in sizes.items())


def _written(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.extend(tensors_in(args[i] if i < len(args) else kwargs.get(argument.name)))
    return found
