"""The forward-and-backward graph of a whole model from one in which units alike are left out (`repeats`).

The joint calls of a unit's forward pass lie together, and those of its backward pass: from the first that one of its calls caused to the first of the
unit that follows. A call reads what its own unit, the one before or the one behind it made, a parameter of its own, or what all units read. In the
second and in the third unit every call is compared, with what it reads, makes, costs and keeps, in these terms; only where they are equal, the third
stands for those that were left out. In the first and the last unit, which it reads too, the same calls must lie in the same places.
Nothing of the whole graph is lacking: work, storages and gradients. Names of calls that were not traced are made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from meshwright.graph.graph import JointNode, Storage

from .joint import Joint
from .repeats import KEPT, Run

__all__ = ["unfolded"]

# Places among the units that stay.
_FIRST, _COMPARED, _TEMPLATE, _LAST = 0, KEPT - 2, KEPT - 1, KEPT
_PHASES = ("forward", "backward")
_Key = tuple[str, int]  # of a storage: its owner, and how many of this owner come before it
_Made = tuple[JointNode, tuple[_Key | None, ...]]  # a call, and the storages of its results


def unfolded(joint: Joint, runs: Sequence[Run]) -> Joint | None:
    """None: the units are not alike in backward, or do not lie apart."""
    for run in runs:
        units = _units_of(joint, run)
        if units is None or not units.alike():
            return None
        joint = units.put_together()
    return joint


def _units_of(joint: Joint, run: Run) -> _Units | None:
    causes = {name: (u, i) for u, names in enumerate(run.calls) for i, name in enumerate(names)}
    begins: dict[tuple[str, int], int] = {}
    for i, j in enumerate(joint.nodes):
        if j.node in causes:
            begins.setdefault((j.phase, run.kept.index(causes[j.node][0])), i)
    order = [*(("forward", u) for u in range(_LAST + 1)), *(("backward", u) for u in reversed(range(_LAST + 1)))]
    starts = [begins.get(key, -1) for key in order]
    if starts != sorted(starts) or starts[0] < 0:
        return None
    windows = {key: joint.nodes[a:b] for key, a, b in zip(order, starts, [*starts[1:], len(joint.nodes)], strict=True)}
    seen: dict[str, int] = {}
    keys = []
    for s in joint.storages:
        seen[s.owner] = seen.get(s.owner, -1) + 1
        keys.append((s.owner, seen[s.owner]))
    return _Units(
        joint=joint, run=run, begins=begins, windows=windows, keys=tuple(keys), causes=causes,
        place={j.name: (phase, u, i) for (phase, u), window in windows.items() for i, j in enumerate(window)},
        owned={name: (u, i) for u, names in enumerate(run.owned) for i, name in enumerate(names)},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Units:
    """The joint calls of the units that stay: `windows` by phase and place among them. place: of a joint call, and its number in its window.

    causes, owned: of a forward call, of a parameter: its unit, of all, and its number there. keys: of the storages.
    """

    joint: Joint
    run: Run
    begins: Mapping[tuple[str, int], int]
    windows: Mapping[tuple[str, int], Sequence[JointNode]]
    place: Mapping[str, tuple[str, int, int]]
    causes: Mapping[str, tuple[int, int]]
    owned: Mapping[str, tuple[int, int]]
    keys: tuple[_Key, ...]

    def term(self, name: str, at: int) -> tuple[Any, ...]:
        """What a value is, seen from the unit at this place among those that stay."""
        if name in self.place:
            phase, unit, number = self.place[name]
            return phase, unit - at, number
        return self._of_unit("owned", self.owned, name, at)

    def cause(self, name: str, at: int) -> tuple[Any, ...]:
        """The same of a forward call, whose name may be that of a value too."""
        return self._of_unit("cause", self.causes, name, at)

    def _of_unit(self, kind: str, table: Mapping[str, tuple[int, int]], name: str, at: int) -> tuple[Any, ...]:
        if name not in table:
            return ("shared", name)
        unit, number = table[name]
        return kind, self.run.kept.index(unit) - at, number

    def name(self, term: tuple[Any, ...], unit: int) -> str:
        """The name of what a term is, seen from a unit, of all."""
        if term[0] == "shared":
            return str(term[1])
        kind, apart, number = term
        if kind in _PHASES:
            return self.call(kind, unit + apart, number)
        if kind == "module":
            block, rest = number
            return f"{self.run.modules}.{self.run.first + (unit + apart) * self.run.period + block}{rest}"
        return str((self.run.owned if kind == "owned" else self.run.calls)[unit + apart][number])

    def call(self, phase: str, unit: int, number: int) -> str:
        at = self.run.kept.index(unit) if unit in self.run.kept else _TEMPLATE
        name = self.windows[phase, at][number].name
        return name if unit in self.run.kept else f"{name}_unit_{unit}"

    def module(self, path: str, at: int) -> tuple[Any, ...]:
        """The same of a module: blocks in a unit are numbered."""
        prefix = f"{self.run.modules}."
        number, dot, rest = path.removeprefix(prefix).partition(".")
        unit, block = divmod(int(number) - self.run.first, self.run.period) if path.startswith(prefix) and number.isdigit() else (-1, 0)
        return ("module", self.run.kept.index(unit) - at, (block, dot + rest)) if unit in self.run.kept else ("shared", path)

    def described(self, j: JointNode, at: int) -> tuple[Any, ...]:
        """All that is compared."""
        terms = [*(self.term(name, at) for name in j.inputs), self.cause(j.node, at), self.module(j.module, at)]
        storages = [(self.term(self.keys[o.storage][0], at), self.keys[o.storage][1], self.size(o.storage)) for o in j.outputs if o.storage >= 0]
        return _outside(j), terms, storages

    def of_parameters(self, at: int) -> dict[int, tuple[Any, ...]]:
        """What the gradients of the unit's own parameters are, by the parameter's number."""
        names = [name.removeprefix("param:") for name in self.run.owned[self.run.kept[at]]]
        return {i: self.term(self.joint.gradients[name], at) for i, name in enumerate(names) if name in self.joint.gradients}

    def size(self, storage: int) -> int:
        return self.joint.storages[storage].size_bytes

    def alike(self) -> bool:
        for phase in _PHASES:
            template, compared = self.windows[phase, _TEMPLATE], self.windows[phase, _COMPARED]
            if [self.described(j, _TEMPLATE) for j in template] != [self.described(j, _COMPARED) for j in compared]:
                return False
            terms = (t for j in template for _, *found in [self.described(j, _TEMPLATE)] for t in _terms(found))
            if any(t[0] != "shared" and abs(t[1]) > 1 for t in terms):
                return False
            for unit in (_FIRST, _LAST):  # what lies outside of the run follows in their windows
                if [_outside(j) for j in self.windows[phase, unit]][: len(template)] != [_outside(j) for j in template]:
                    return False
        gradients = self.of_parameters(_TEMPLATE)
        return gradients == self.of_parameters(_COMPARED) and all(t[0] != "shared" and abs(t[1]) <= 1 for t in gradients.values())

    def seen(self, j: JointNode, unit: int) -> _Made:
        """A call of the template in another unit; or one of the template or of the last unit, which now lie beside those that were left out."""
        phase, at, number = self.place[j.name]
        made = msgspec.structs.replace(
            j, name=self.call(phase, unit, number), node=self.name(self.cause(j.node, at), unit),
            module=self.name(self.module(j.module, at), unit),
            inputs=tuple(self.name(self.term(name, at), unit) for name in j.inputs),
        )  # fmt: skip
        return made, tuple(key and (self.name(self.term(key[0], at), unit), key[1]) for key in self.keys_of(j))

    def keys_of(self, j: JointNode) -> tuple[_Key | None, ...]:
        return tuple(self.keys[o.storage] if o.storage >= 0 else None for o in j.outputs)

    def stays(self, j: JointNode) -> _Made:
        at = self.place[j.name][1] if j.name in self.place else _FIRST
        return self.seen(j, self.run.kept[at]) if at in (_TEMPLATE, _LAST) else (j, self.keys_of(j))

    def put_together(self) -> Joint:
        stay = [self.stays(j) for j in self.joint.nodes]
        behind, before = self.begins["forward", _LAST], self.begins["backward", _TEMPLATE]
        forward = [self.seen(j, u) for u in self.run.left_out for j in self.windows["forward", _TEMPLATE]]
        backward = [self.seen(j, u) for u in reversed(self.run.left_out) for j in self.windows["backward", _TEMPLATE]]
        nodes = [*stay[:behind], *forward, *stay[behind:before], *backward, *stay[before:]]
        gradients = dict(self.joint.gradients)
        for at in (_LAST, _TEMPLATE):
            for number, term in self.of_parameters(at).items():
                for u in (self.run.kept[at], *(self.run.left_out if at == _TEMPLATE else ())):
                    gradients[self.run.owned[u][number].removeprefix("param:")] = self.name(term, u)
        found, storages = self._numbered(nodes)
        return replace(self.joint, nodes=found, storages=storages, gradients=gradients)

    def _numbered(self, nodes: Sequence[_Made]) -> tuple[tuple[JointNode, ...], tuple[Storage, ...]]:
        """Storages in order of appearance, those of what the graph is given first."""
        results = {j.name for j in self.joint.nodes}
        size = {key: s.size_bytes for key, s in zip(self.keys, self.joint.storages, strict=True)}
        index = {key: i for i, key in enumerate(k for k in self.keys if k[0] not in results)}
        storages = [Storage(size_bytes=size[key], owner=key[0]) for key in index]
        found = []
        for j, keys in nodes:
            outputs = []
            for o, key in zip(j.outputs, keys, strict=True):
                if key is not None and key not in index:
                    index[key] = len(storages)
                    storages.append(Storage(size_bytes=self.size(o.storage), owner=key[0]))
                outputs.append(msgspec.structs.replace(o, storage=-1 if key is None else index[key]))
            found.append(msgspec.structs.replace(j, outputs=tuple(outputs)))
        return tuple(found), tuple(storages)


def _outside(j: JointNode) -> tuple[Any, ...]:
    """What a call is, wherever its operands come from."""
    return j.target, j.phase, tuple((o.shape, o.dtype, o.storage >= 0) for o in j.outputs), j.work, j.causal


def _terms(tree: Any) -> list[tuple[Any, ...]]:
    if isinstance(tree, tuple) and tree and isinstance(tree[0], str):
        return [tree]
    return [t for x in tree for t in _terms(x)] if isinstance(tree, (tuple, list)) else []
