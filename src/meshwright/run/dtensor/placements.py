"""A sharding plan in DTensor's words: placements per parameter, input and operator, and what PyTorch's own sharding rules say of an operator.

`R` and `B` are `Replicate()` (DTensor decides by the operator whether a gradient is partial, the plan says it), `S<d>` is `Shard(d)`, `P` is
`Partial()`, `M` is `Partial("max")`. A split in blocks has no DTensor twin that `distribute_tensor` makes; such a parameter is given as None.

`dtensor_signatures` asks PyTorch: an operator is called on DTensors over a fake process group for every combination of placements; combinations that
it runs without a collective are signatures. They serve operators that our table lacks, and cross-check the table (tests).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import fx

from ...capture.forward import TracedForward
from ...decide.layout.autoddl.rules import Signature
from ...errors import Unsupported, UsageError
from ...plan.sharding import ShardingPlan

__all__ = ["derived_signatures", "dtensor_signatures", "placement_of", "placements", "wrap"]

FAKE_RANKS = 2  # of the process group that PyTorch's rules are asked on: the fewest on which splits differ
MAX_ELEMENTS = 1 << 22  # of an operand: PyTorch is asked by calling the operator


def placement_of(kind: str) -> Any:
    """The DTensor placement of an SBP type. Raises: Unsupported for a split in blocks."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if kind in ("R", "B"):
        return Replicate()
    if kind == "P":
        return Partial()
    if kind == "M":
        return Partial("max")
    if "/" in kind:
        raise Unsupported(f"DTensor has no placement for {kind!r}: the dimension is split block by block", hint="permute the blocks first")
    return Shard(int(kind[1:]))


def placements(plan: ShardingPlan) -> dict[str, tuple[Any, ...] | None]:
    """Placements on the plan's mesh by name: `param:`, `buffer:`, `input:`, and every operator's result. None where DTensor has no word for it."""
    found: dict[str, tuple[Any, ...] | None] = {}
    for name, state in [*plan.sources.items(), *((n, o.output) for n, o in plan.ops.items())]:
        try:
            found[name] = tuple(placement_of(k) for k in state)
        except Unsupported:
            found[name] = None
    return found


def wrap(plan: ShardingPlan, name: str, piece: torch.Tensor, shape: Sequence[int], mesh: Any) -> Any:
    """This rank's piece of a parameter as a DTensor on a DeviceMesh; nothing is sent. Raises: Unsupported (splits in blocks), UsageError (a name)."""
    from torch.distributed.tensor import DTensor

    if name not in plan.sources:
        raise UsageError(f"the plan has no {name!r}", hint=f"it has: {', '.join(list(plan.sources)[:8])}")
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        piece.detach(), mesh, [placement_of(k) for k in plan.sources[name]], run_check=False, shape=torch.Size(shape), stride=stride
    )


@contextlib.contextmanager
def _fake_mesh(ranks: int) -> Iterator[Any]:
    """A one-axis mesh of ranks that are not there. Needs that no process group exists yet."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError("PyTorch's sharding rules are asked over a fake process group, and there is a real one", hint="ask before starting ranks")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _types(shape: Sequence[int], ranks: int) -> list[str]:
    return ["B", *(f"S{d}" for d, n in enumerate(shape) if n >= ranks and n % ranks == 0), "P"]


def dtensor_signatures(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, ranks: int = FAKE_RANKS, mesh: Any = None, most: int = 400
) -> list[tuple[tuple[str, ...], str]]:
    """(types of the tensor arguments, type of the result) on one axis, wherever PyTorch runs the operator without any collective.

    Tensors in `args` give shapes and dtypes (values are not looked at). At most `most` combinations are tried. No sharding rule: none.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    tensors: list[torch.Tensor] = []
    spec = fx.node.map_aggregate((tuple(args), dict(kwargs)), lambda x: _Hole(tensors, x) if isinstance(x, torch.Tensor) else x)
    with contextlib.nullcontext(mesh) if mesh is not None else _fake_mesh(ranks) as on:
        found = []
        for combination in list(product(*(_types(t.shape, ranks) for t in tensors)))[:most]:
            pieces = []
            for tensor, kind in zip(tensors, combination, strict=True):
                shape = list(tensor.shape)
                if kind[0] == "S":
                    shape[int(kind[1:])] //= ranks
                local = torch.ones(shape, dtype=tensor.dtype) if tensor.is_floating_point() else torch.zeros(shape, dtype=tensor.dtype)
                pieces.append(DTensor.from_local(local, on, [placement_of(kind)], run_check=False))
            filled = fx.node.map_aggregate(spec, lambda x, pieces=pieces: pieces[x.index] if isinstance(x, _Hole) else x)
            try:
                with CommDebugMode() as communication, torch.no_grad():
                    result = target(*filled[0], **filled[1])
            except Exception:  # no rule, or a rule that refuses: PyTorch raises anything here
                continue
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            if isinstance(first, DTensor) and communication.get_total_counts() == 0:
                kind = _kind(first.placements[0])
                if kind:
                    found.append((combination, kind))
    return found


class _Hole:
    """Where a tensor goes in an argument list."""

    def __init__(self, tensors: list[torch.Tensor], tensor: torch.Tensor) -> None:
        self.index = len(tensors)
        tensors.append(tensor)


def _kind(placement: Any) -> str:
    if placement.is_replicate():
        return "B"
    if placement.is_partial():
        return {"sum": "P", "max": "M"}.get(getattr(placement, "reduce_op", ""), "")
    return f"S{placement.dim}" if type(placement).__name__ == "Shard" else ""


def derived_signatures(traced: TracedForward, names: Sequence[str]) -> dict[str, list[Signature]]:
    """Signatures that PyTorch knows for the named operators of a traced model, for `ShardingProblem.signatures`.

    Only splits are taken (what is whole needs no rule), and only if their local constants need no change: operators whose arguments name sizes are
    left whole.
    """
    found: dict[str, list[Signature]] = {}
    wanted = set(names)
    with _fake_mesh(FAKE_RANKS) as mesh:
        for node in traced.graph_module.graph.nodes:
            if node.op != "call_function" or node.name not in wanted or _names_sizes(node):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: torch.empty_like(n.meta["val"], device="meta"))
            sizes = [a.meta["val"].numel() for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
            if not isinstance(node.meta.get("val"), torch.Tensor) or not sizes or max(sizes) > MAX_ELEMENTS:
                continue
            pairs = dtensor_signatures(node.target, args, kwargs, mesh=mesh)
            found[node.name] = [
                Signature(f"PyTorch {' '.join(inputs)}", inputs, output, True)
                for inputs, output in pairs
                if output[0] == "S" and any(k[0] == "S" for k in inputs) and "P" not in inputs
            ]
    return {name: signatures for name, signatures in found.items() if signatures}


def _names_sizes(node: fx.Node) -> bool:
    """Whether an argument is a list of numbers (sizes, dimensions): they would have to be divided by rules of their own."""
    return any(isinstance(a, (list, tuple)) and a and all(isinstance(i, int) for i in a) for a in (*node.args, *node.kwargs.values()))
