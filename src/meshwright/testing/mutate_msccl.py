"""Wrong MSCCL files, made from right ones: what slips of the hand, of a generator or of an editor make of them.

    for m in msccl_mutants(algo, np.random.default_rng(0), per_operator=3):
        assert not check_msccl(m.algo).ok or equivalent(m.algo, algo)

An operator changes one thing at a random place where it applies. Some mutants mean the same as the original (a wait that another one implies
is dropped); telling those apart is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..interop.msccl import COLLECTIVES, MscclAlgo, MscclBlock, MscclStep

__all__ = ["MSCCL_OPERATORS", "MscclMutant", "msccl_mutants", "mutate_msccl"]

Rng = np.random.Generator
Site = tuple[int, int, int]  # positions of gpu, block, step
Made = tuple[MscclAlgo, str] | None


@dataclass(frozen=True)
class MscclMutant:
    operator: str
    what: str
    algo: MscclAlgo


def mutate_msccl(algo: MscclAlgo, operator: str, rng: Rng) -> MscclMutant | None:
    """One mutant, or None where the operator does not apply. Raises KeyError for an operator that does not exist."""
    made = MSCCL_OPERATORS[operator](algo, rng)
    return MscclMutant(operator, made[1], made[0]) if made is not None and made[0] != algo else None


def msccl_mutants(algo: MscclAlgo, rng: Rng, *, per_operator: int) -> Iterator[MscclMutant]:
    """Up to `per_operator` different mutants of every operator, in the operators' order."""
    for name in MSCCL_OPERATORS:
        seen: set[str] = set()
        for _ in range(3 * per_operator):
            made = mutate_msccl(algo, name, rng)
            if made is not None and made.what not in seen and len(seen) < per_operator:
                seen.add(made.what)
                yield made


# ---- pieces ------------------------------------------------------------------------------------------------------------
def _sites(algo: MscclAlgo, wanted: Callable[[MscclStep], bool]) -> list[Site]:
    return [(g, b, s) for g, gpu in enumerate(algo.gpus) for b, block in enumerate(gpu.blocks) for s, x in enumerate(block.steps) if wanted(x)]


def _one(rng: Rng, options: list[Any]) -> Any:
    return options[int(rng.integers(len(options)))] if options else None


def _at(algo: MscclAlgo, site: Site) -> MscclStep:
    return algo.gpus[site[0]].blocks[site[1]].steps[site[2]]


def _name(algo: MscclAlgo, site: Site) -> str:
    gpu = algo.gpus[site[0]]
    return f"gpu {gpu.id} tb {gpu.blocks[site[1]].id} step {site[2]}"


def _gpu(algo: MscclAlgo, g: int, **values: Any) -> MscclAlgo:
    return replace(algo, gpus=tuple(replace(x, **values) if k == g else x for k, x in enumerate(algo.gpus)))


def _block(algo: MscclAlgo, g: int, b: int, **values: Any) -> MscclAlgo:
    return _gpu(algo, g, blocks=tuple(replace(x, **values) if k == b else x for k, x in enumerate(algo.gpus[g].blocks)))


def _list(algo: MscclAlgo, site: Site, change: Callable[[list[MscclStep]], None], *, number: bool = True) -> MscclAlgo:
    """The algorithm with the step list of a block changed; steps are numbered again unless told not to."""
    steps = list(algo.gpus[site[0]].blocks[site[1]].steps)
    change(steps)
    if number:
        steps = [s._replace(number=k) for k, s in enumerate(steps)]
    return _block(algo, site[0], site[1], steps=tuple(steps))


def _step(algo: MscclAlgo, site: Site, **values: Any) -> MscclAlgo:
    def change(steps: list[MscclStep]) -> None:
        steps[site[2]] = steps[site[2]]._replace(**values)

    return _list(algo, site, change, number=False)


def _field(wanted: Callable[[MscclStep], bool], change: Callable[[MscclStep, Rng], dict[str, Any]]) -> Callable[[MscclAlgo, Rng], Made]:
    """An operator that changes fields of one step."""

    def run(algo: MscclAlgo, rng: Rng) -> Made:
        site = _one(rng, _sites(algo, wanted))
        if site is None:
            return None
        values = change(_at(algo, site), rng)
        return _step(algo, site, **values), f"{_name(algo, site)}: {', '.join(f'{k} {v}' for k, v in values.items())}"

    return run


def _real(s: MscclStep) -> bool:
    return s.type != "nop"


def _moves(s: MscclStep) -> bool:
    return "R" in s.parts or "S" in s.parts


# ---- lists of steps ----------------------------------------------------------------------------------------------------
def _edited(word: str, wanted: Callable[[MscclStep], bool], change: Callable[[list[MscclStep], int], None], *, number: bool = True) -> Any:
    def run(algo: MscclAlgo, rng: Rng) -> Made:
        site = _one(rng, _sites(algo, wanted))
        if site is None:
            return None
        return _list(algo, site, lambda steps: change(steps, site[2]), number=number), f"{_name(algo, site)} {word}"

    return run


def _drop(steps: list[MscclStep], k: int) -> None:
    del steps[k]


def _double(steps: list[MscclStep], k: int) -> None:
    steps.insert(k, steps[k])


def _swap_adjacent(algo: MscclAlgo, rng: Rng) -> Made:
    site = _one(rng, [x for x in _sites(algo, _real) if x[2] + 1 < len(algo.gpus[x[0]].blocks[x[1]].steps)])
    return None if site is None else _swapped(algo, site, site[2] + 1)


def _swapped(algo: MscclAlgo, site: Site, other: int) -> Made:
    def change(steps: list[MscclStep]) -> None:
        steps[site[2]], steps[other] = steps[other], steps[site[2]]

    return _list(algo, site, change), f"{_name(algo, site)} and step {other} swapped"


def _swap_receives(algo: MscclAlgo, rng: Rng) -> Made:
    sites = _sites(algo, lambda s: "R" in s.parts)
    pairs = [(a, b[2]) for a in sites for b in sites if a[:2] == b[:2] and a[2] < b[2]]
    found = _one(rng, pairs)
    return None if found is None else _swapped(algo, *found)


def _swap_sources(algo: MscclAlgo, rng: Rng) -> Made:
    """Two sends of a block send each other's chunk."""
    sites = _sites(algo, lambda s: s.type == "s")
    pairs = [(a, b) for a in sites for b in sites if a[:2] == b[:2] and a[2] < b[2] and _at(algo, a).chunks == _at(algo, b).chunks]
    found = _one(rng, pairs)
    if found is None:
        return None
    a, b = found
    x, y = _at(algo, a), _at(algo, b)
    changed = _step(algo, a, src_buffer=y.src_buffer, src_offset=y.src_offset)
    return _step(changed, b, src_buffer=x.src_buffer, src_offset=x.src_offset), f"{_name(algo, a)} and step {b[2]} send each other's"


def _move(algo: MscclAlgo, rng: Rng) -> Made:
    site = _one(rng, [x for x in _sites(algo, _real) if len(algo.gpus[x[0]].blocks) > 1])
    if site is None:
        return None
    others = [b for b in range(len(algo.gpus[site[0]].blocks)) if b != site[1]]
    other = _one(rng, others)
    moved = _at(algo, site)
    at = int(rng.integers(len(algo.gpus[site[0]].blocks[other].steps) + 1))
    without = _list(algo, site, lambda steps: _drop(steps, site[2]))
    return _list(without, (site[0], other, 0), lambda steps: steps.insert(at, moved)), f"{_name(algo, site)} to block {other} at {at}"


# ---- waits -------------------------------------------------------------------------------------------------------------
def _waits(s: MscclStep) -> bool:
    return s.depid >= 0


def _other_block(algo: MscclAlgo, rng: Rng) -> Made:
    site = _one(rng, [x for x in _sites(algo, _waits) if len(algo.gpus[x[0]].blocks) > 1])
    if site is None:
        return None
    ids = [b.id for b in algo.gpus[site[0]].blocks if b.id != _at(algo, site).depid]
    depid = int(_one(rng, ids))
    return _step(algo, site, depid=depid), f"{_name(algo, site)}: depid {depid}"


def _backward_wait(algo: MscclAlgo, rng: Rng) -> Made:
    """The step waited for also waits for the one that waits."""
    found = []
    for x in _sites(algo, _waits):
        blocks = algo.gpus[x[0]].blocks
        for b, block in enumerate(blocks):
            s = _at(algo, x)
            if block.id == s.depid and 0 <= s.deps < len(block.steps) and block.steps[s.deps].depid < 0 and s.type != "nop":
                found.append((x, (x[0], b, s.deps)))
    pair = _one(rng, found)
    if pair is None:
        return None
    a, b = pair
    changed = _step(_step(algo, b, depid=algo.gpus[a[0]].blocks[a[1]].id, deps=a[2]), a, hasdep=1)
    return changed, f"{_name(algo, b)} waits for {_name(algo, a)}"


# ---- blocks, GPUs, the head --------------------------------------------------------------------------------------------
def _blocks(algo: MscclAlgo, wanted: Callable[[MscclBlock], bool]) -> list[tuple[int, int]]:
    return [(g, b) for g, gpu in enumerate(algo.gpus) for b, block in enumerate(gpu.blocks) if wanted(block)]


def _peer(name: str) -> Callable[[MscclAlgo, Rng], Made]:
    def run(algo: MscclAlgo, rng: Rng) -> Made:
        at = _one(rng, _blocks(algo, lambda b: getattr(b, name) >= 0))
        if at is None:
            return None
        old = getattr(algo.gpus[at[0]].blocks[at[1]], name)
        new = int(_one(rng, [p for p in range(-1, algo.ranks) if p != old]))
        return _block(algo, *at, **{name: new}), f"gpu {algo.gpus[at[0]].id} tb {algo.gpus[at[0]].blocks[at[1]].id}: {name} {new}"

    return run


def _channel(algo: MscclAlgo, rng: Rng) -> Made:
    at = _one(rng, _blocks(algo, lambda b: max(b.send, b.recv) >= 0))
    if at is None:
        return None
    old = algo.gpus[at[0]].blocks[at[1]].channel
    new = int(_one(rng, [c for c in range(-1, algo.channels + 1) if c != old]))
    return _block(algo, *at, channel=new), f"gpu {algo.gpus[at[0]].id} tb {algo.gpus[at[0]].blocks[at[1]].id}: chan {new}"


def _same_id(algo: MscclAlgo, rng: Rng) -> Made:
    at = _one(rng, [x for x in _blocks(algo, lambda b: True) if len(algo.gpus[x[0]].blocks) > 1])
    if at is None:
        return None
    blocks = algo.gpus[at[0]].blocks
    other = int(_one(rng, [b.id for k, b in enumerate(blocks) if k != at[1]]))
    return _block(algo, *at, id=other), f"gpu {algo.gpus[at[0]].id} tb {blocks[at[1]].id} is numbered {other}"


def _drop_block(algo: MscclAlgo, rng: Rng) -> Made:
    at = _one(rng, _blocks(algo, lambda b: True))
    if at is None:
        return None
    gpu = algo.gpus[at[0]]
    kept = [b for k, b in enumerate(gpu.blocks) if k != at[1]]
    return _gpu(algo, at[0], blocks=tuple(replace(b, id=k) for k, b in enumerate(kept))), f"gpu {gpu.id} without tb {gpu.blocks[at[1]].id}"


def _drop_gpu(algo: MscclAlgo, rng: Rng) -> Made:
    g = int(rng.integers(len(algo.gpus)))
    return replace(algo, gpus=tuple(x for k, x in enumerate(algo.gpus) if k != g)), f"without gpu {algo.gpus[g].id}"


def _same_gpu(algo: MscclAlgo, rng: Rng) -> Made:
    g = int(rng.integers(len(algo.gpus)))
    other = int(_one(rng, [x.id for x in algo.gpus if x.id != algo.gpus[g].id]))
    return _gpu(algo, g, id=other), f"gpu {algo.gpus[g].id} is numbered {other}"


def _shrink(algo: MscclAlgo, rng: Rng) -> Made:
    sizes = [(g, name) for g, x in enumerate(algo.gpus) for name in ("i_chunks", "o_chunks", "s_chunks") if getattr(x, name) > 0]
    found = _one(rng, sizes)
    if found is None:
        return None
    g, name = found
    less = getattr(algo.gpus[g], name) - 1
    return _gpu(algo, g, **{name: less}), f"gpu {algo.gpus[g].id}: {name} {less}"


def _head(name: str, change: Callable[[MscclAlgo, Rng], Any]) -> Callable[[MscclAlgo, Rng], Made]:
    def run(algo: MscclAlgo, rng: Rng) -> Made:
        value = change(algo, rng)
        return None if value is None else (replace(algo, **{name: value}), f"{name} {value}")

    return run


def _other_mode(algo: MscclAlgo, rng: Rng) -> Made:
    """Also enabled for calls it was not written for; or, if it is for all, for none."""
    if algo.in_place and algo.out_of_place:
        return replace(algo, in_place=0, out_of_place=0), "enabled for no call"
    return replace(algo, in_place=1, out_of_place=1), "enabled in and out of place"


def _swap_gpus(algo: MscclAlgo, rng: Rng) -> Made:
    """Two GPUs run each other's blocks."""
    pairs = [(a, b) for a in range(len(algo.gpus)) for b in range(a + 1, len(algo.gpus)) if algo.gpus[a].blocks != algo.gpus[b].blocks]
    found = _one(rng, pairs)
    if found is None:
        return None
    a, b = found
    one, two = algo.gpus[a], algo.gpus[b]
    swapped = _gpu(_gpu(algo, a, blocks=two.blocks), b, blocks=one.blocks)
    return swapped, f"gpus {one.id} and {two.id} run each other's blocks"


_TO_COPY = {"rrc": "r", "rrs": "rcs", "rrcs": "rcs", "re": "cpy"}
_TO_SUM = {"r": "rrc", "rcs": "rrcs", "cpy": "re"}
_NO_SEND = {"rcs": "r", "rrcs": "rrc"}


def _letter(side: str) -> Callable[[MscclStep, Rng], dict[str, Any]]:
    return lambda s, rng: {f"{side}_buffer": str(_one(rng, [x for x in "ios" if x != getattr(s, f"{side}_buffer")]))}


MSCCL_OPERATORS: Mapping[str, Callable[[MscclAlgo, Rng], Made]] = {
    "drop step": _edited("dropped", _real, _drop),
    "drop step, keep numbers": _edited("dropped, numbers kept", _real, _drop, number=False),
    "duplicate step": _edited("twice", _real, _double),
    "swap adjacent steps": _swap_adjacent,
    "swap two receives": _swap_receives,
    "swap sources of two sends": _swap_sources,
    "move step to another block": _move,
    "sum becomes copy": _field(lambda s: s.type in _TO_COPY, lambda s, rng: {"type": _TO_COPY[s.type]}),
    "copy becomes sum": _field(lambda s: s.type in _TO_SUM, lambda s, rng: {"type": _TO_SUM[s.type]}),
    "fused step does not send": _field(lambda s: s.type in _NO_SEND, lambda s, rng: {"type": _NO_SEND[s.type]}),
    "fused step does not store": _field(lambda s: s.type == "rrcs", lambda s, rng: {"type": "rrs"}),
    "receive becomes nop": _field(lambda s: s.type == "r", lambda s, rng: {"type": "nop"}),
    "shift source": _field(lambda s: "X" in s.parts, lambda s, rng: {"src_offset": s.src_offset + int(rng.choice([-1, 1]))}),
    "shift destination": _field(lambda s: "D" in s.parts, lambda s, rng: {"dst_offset": s.dst_offset + int(rng.choice([-1, 1]))}),
    "wrong source buffer": _field(lambda s: "X" in s.parts, _letter("src")),
    "wrong destination buffer": _field(lambda s: "D" in s.parts, _letter("dst")),
    "change count": _field(_moves, lambda s, rng: {"chunks": s.chunks + int(rng.choice([-1, 1]))}),
    "change count of a local step": _field(lambda s: s.type in ("cpy", "re"), lambda s, rng: {"chunks": s.chunks + int(rng.choice([-1, 1]))}),
    "drop wait": _field(_waits, lambda s, rng: {"depid": -1, "deps": -1}),
    "drop nop": _edited("dropped", lambda s: s.type == "nop", _drop),
    "wait for another block": _other_block,
    "wait for an earlier step": _field(_waits, lambda s, rng: {"deps": s.deps - 1}),
    "wait for a later step": _field(_waits, lambda s, rng: {"deps": s.deps + 1}),
    "step publishes nothing": _field(lambda s: s.hasdep == 1, lambda s, rng: {"hasdep": 0}),
    "wait backwards": _backward_wait,
    "change number": _field(lambda s: True, lambda s, rng: {"number": s.number + int(rng.choice([-1, 1]))}),
    "change send peer": _peer("send"),
    "change receive peer": _peer("recv"),
    "change channel": _channel,
    "two blocks of one number": _same_id,
    "drop block": _drop_block,
    "drop gpu": _drop_gpu,
    "two gpus of one number": _same_gpu,
    "swap gpus": _swap_gpus,
    "shrink buffer": _shrink,
    "more chunks per loop": _head("chunks_per_loop", lambda a, rng: a.chunks_per_loop + int(rng.integers(1, 1 + a.chunks_per_loop))),
    "fewer chunks per loop": _head("chunks_per_loop", lambda a, rng: int(rng.integers(0, a.chunks_per_loop)) if a.chunks_per_loop else None),
    "change ngpus": _head("ranks", lambda a, rng: a.ranks + int(rng.choice([-1, 1]))),
    "change collective": _head("collective", lambda a, rng: str(_one(rng, [c for c in (*COLLECTIVES, "reduce_scatter") if c != a.collective]))),
    "fewer channels": _head("channels", lambda a, rng: a.channels - 1),
    "change root": _head("root", lambda a, rng: (a.root + 1) % a.ranks if a.root >= 0 and a.ranks > 1 else None),
    "change mode": _other_mode,
}
