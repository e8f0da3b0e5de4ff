"""Blocks alike in an exported graph, and the graph with a few of them: forward and backward of the others follow from theirs (`unfolding`).

Blocks are members of a module list, in the order in which they run. A unit is one of them, or a few where the pattern repeats after a few, with what
runs behind it up to the next. Units are alike where their calls are: same operators, constants, shapes, strides and types, the same parameters in the
same places, operands from the same places of the unit before. Nothing is taken from classes or configurations: the whole exported graph is compared,
call by call. Whatever reads a unit from further away than the next one ends the run.
Cost: O(calls); what is left out is the backward pass of all units but four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from .forward import TracedForward

__all__ = ["KEPT", "Run", "cut", "repeated_runs"]

# Units at the start of a run that stay: the first, and two that are compared; the last stays too.
KEPT = 3
# Blocks after which a pattern may repeat: five layers with a window and one without it are six.
MAX_PERIOD = 8
# Calls that must be left out, so that it pays: half a second of AOTAutograd; small graphs are taken whole.
MIN_CALLS_LEFT_OUT = 300


@dataclass(frozen=True, kw_only=True)
class Run:
    """Units alike. calls, owned: node names, and values (parameters, buffers) that only this unit reads, both of every unit, in equal order.

    modules: path of the list. first: number of the first unit's first block; period: blocks in a unit.
    """

    modules: str
    first: int
    period: int
    calls: tuple[tuple[str, ...], ...]
    owned: tuple[tuple[str, ...], ...]

    @property
    def left_out(self) -> range:
        return range(KEPT, len(self.calls) - 1)

    @property
    def kept(self) -> tuple[int, ...]:
        return (*range(KEPT), len(self.calls) - 1)


@dataclass(frozen=True)
class _Segment:
    """A block and what runs behind it. `form`: what it computes, whichever block it is; None: it reads what no other block like it can."""

    nodes: Sequence[fx.Node]
    owned: tuple[str, ...]
    form: tuple[Any, ...] | None


def repeated_runs(traced: TracedForward) -> tuple[Run, ...]:
    """One for each module list in which enough repeats; they do not overlap."""
    calls = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    found: list[Run] = []
    for modules, starts in _lists(calls, traced).items():
        numbers = sorted(starts)
        places = [starts[i] for i in numbers]
        if len(numbers) > KEPT + 2 and numbers == list(range(numbers[0], numbers[-1] + 1)) and places == sorted(places):
            segments = _segments(calls, places, traced, modules, numbers[0])
            run = _longest(segments, modules, numbers[0])
            if run is not None and sum(len(run.calls[k]) for k in run.left_out) >= MIN_CALLS_LEFT_OUT and not _read_from_afar(calls, run):
                found.append(run)
    return tuple(found)


def cut(traced: TracedForward, runs: Sequence[Run]) -> None:
    """Leaves units out of `traced.exported`, in place: what read the last of them reads the same place of the last that stays before it."""
    graph = traced.exported.graph
    graph.eliminate_dead_code()
    by_name = {n.name: n for n in graph.nodes}
    for run in runs:
        for name, instead in zip(run.calls[run.left_out[-1]], run.calls[KEPT - 1], strict=True):
            by_name[name].replace_all_uses_with(by_name[instead])
        for k in reversed(run.left_out):
            for name in reversed(run.calls[k]):
                graph.erase_node(by_name[name])
    traced.exported.graph_module.recompile()


def _lists(calls: Sequence[fx.Node], traced: TracedForward) -> dict[str, dict[int, int]]:
    """Module lists by path: where the calls of each member begin."""
    lists: dict[str, dict[int, int]] = {}
    for place, n in enumerate(calls):
        parts = traced.module_paths[n.name].split(".")
        at = next((i for i, part in enumerate(parts) if i and part.isdigit()), 0)
        if at:
            lists.setdefault(".".join(parts[:at]), {}).setdefault(int(parts[at]), place)
    return lists


def _segments(calls: Sequence[fx.Node], places: Sequence[int], traced: TracedForward, modules: str, first: int) -> list[_Segment]:
    """The last block is left to what follows it: where it ends is not known."""
    bounds = [calls[a:b] for a, b in pairwise(places)]
    home = {n: (k, i) for k, nodes in enumerate(bounds) for i, n in enumerate(nodes)}
    owners: dict[fx.Node, set[int]] = {}
    for n in calls:
        for value in n.all_input_nodes:
            if value.op == "placeholder":
                owners.setdefault(value, set()).add(home[n][0] if n in home else -1)
    own = {value: next(iter(of)) for value, of in owners.items() if len(of) == 1 and -1 not in of}
    return [_segment(k, nodes, home, own, traced, f"{modules}.{first + k}") for k, nodes in enumerate(bounds)]


def _segment(k: int, nodes: Sequence[fx.Node], home: Any, own: Any, traced: TracedForward, path: str) -> _Segment:
    owned: dict[str, int] = {}
    far = False

    def value(x: fx.Node) -> tuple[Any, ...]:
        nonlocal far
        if own.get(x) == k:
            name = x.meta["value"]
            return ("owned", owned.setdefault(name, len(owned)), name.partition(":")[0], *_form(traced.value(name)))
        if x not in home:
            return ("shared", x.name)
        unit, place = home[x]
        far |= k - unit > 1
        return ("call", k - unit, place)

    form = []
    for n in nodes:
        module = traced.module_paths[n.name]
        inside = module[len(path) :] if module == path or module.startswith(f"{path}.") else f"/{module}"
        form.append((n.target, _plain(n.args, value), _plain(n.kwargs, value), inside, tuple(map(_form, _tensors(n.meta.get("val"))))))
    return _Segment(nodes, tuple(owned), None if far else tuple(form))


def _plain(tree: Any, value: Any) -> Any:
    """Arguments that compare equal where they are: 1, 1.0 and True are three."""
    if isinstance(tree, fx.Node):
        return value(tree)
    if isinstance(tree, (list, tuple)):
        return tuple(_plain(x, value) for x in tree)
    if isinstance(tree, dict):
        return tuple((key, _plain(x, value)) for key, x in tree.items())
    if isinstance(tree, slice):
        return "slice", _plain((tree.start, tree.stop, tree.step), value)
    return type(tree).__name__, repr(tree)


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    strided = x.layout == torch.strided
    return tuple(x.shape), x.dtype, x.stride() if strided else (), x.storage_offset() if strided else 0, x.requires_grad


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)


def _longest(segments: Sequence[_Segment], modules: str, first: int) -> Run | None:
    """The run that leaves out most, the shortest unit among equals."""
    known: dict[Any, int] = {}
    kind = [known.setdefault(s.form, len(known)) if s.form is not None else -1 - k for k, s in enumerate(segments)]
    best: tuple[int, int, int, int] | None = None
    for period in range(1, MAX_PERIOD + 1):
        begin = 0
        for k in range(len(kind) + 1):
            if k < len(kind) and (k - begin < period or kind[k] == kind[k - period]):
                continue
            units = (k - begin) // period
            blocks = (units - KEPT - 1) * period
            if blocks > 0 and (best is None or blocks > best[0]):
                best = (blocks, period, begin, units)
            begin = k - period + 1
    if best is None:
        return None
    _, period, begin, units = best
    groups = [segments[begin + u * period : begin + (u + 1) * period] for u in range(units)]
    return Run(
        modules=modules, first=first + begin, period=period, calls=tuple(tuple(n.name for s in g for n in s.nodes) for g in groups),
        owned=tuple(tuple(name for s in g for name in s.owned) for g in groups),
    )  # fmt: skip


def _read_from_afar(calls: Sequence[fx.Node], run: Run) -> bool:
    """Whether something reads a unit that is neither in it nor in the next one."""
    home = {name: u for u, names in enumerate(run.calls) for name in names}
    last = len(run.calls) - 1
    return any(home.get(x.name, last) < last and home.get(n.name, -1) - home[x.name] not in (0, 1) for n in calls for x in n.all_input_nodes
               if x.name in home)  # fmt: skip
