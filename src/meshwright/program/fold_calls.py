"""Calls of folded programs written out: callees that run along a folded axis become rings of the representatives, shared among their members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, Unsupported
from .calls import InlinedProgram, inline
from .fold import folded_axes, is_representative, require_folded
from .fold_find import fold as find_fold
from .program import Fold, Program
from .tables import I32, Comms, Csr

__all__ = ["inline_folded"]


def inline_folded(program: Program, programs: Mapping[str, Program]) -> InlinedProgram:
    """A folded program without calls: the representative lanes of each callee run at the caller's representatives.

    The group of a call is either the whole orbit of a representative along one shift axis (its callee, folded or plain, must be one ring of equal
    members), or only representatives (its callee is plain). `program.calls.inline` does the splicing, on an orbit's callee as a program of one
    rank; then its channels are led to the images. Equal to inlining the expanded forms, folded.

    Raises: Unsupported, FormatError.
    """
    fold = require_folded(program)
    if not len(program.calls):
        return inline(program, programs)
    pairs = np.stack([program.calls.comm, program.calls.callee], axis=1)
    unique, which = np.unique(pairs, axis=0, return_inverse=True)
    sites: list[_Orbit | None] = []
    bodies: dict[str, Program] = {}
    groups: list[list[int]] = []
    rings: dict[str, Program] = {}
    for comm, callee in unique.tolist():
        name, group = program.calls.names[callee], program.comms.groups[comm]
        if name not in programs:
            raise FormatError(f"program {name[:16]!r} is called but not given", where=f"{program.name}.calls")
        if all(is_representative(fold, int(rank)) for rank in group):
            sites.append(None)
            bodies[f"{name}/plain"] = programs[name]
            groups.append(group.tolist())
            continue
        if name not in rings:
            rings[name] = _as_ring(programs[name], program.name)
        # every member of the orbit runs the same body: one rank's part is spliced in, its channels are led on afterwards
        sites.append(_Orbit(rings[name], _ring_axis(program, fold, group, rings[name]), int(group[0])))
        bodies[name] = _body(rings[name])
        groups.append([int(group[0])])
    names = tuple(program.comms.name[comm] for comm, _ in unique.tolist())
    called = tuple(f"{program.calls.names[c]}/plain" if site is None else program.calls.names[c] for site, c in zip(sites, unique[:, 1], strict=True))
    which = which.reshape(-1)
    caller = replace(
        program, fold=None, comms=Comms(name=names, groups=Csr.of(groups)),
        calls=replace(program.calls, comm=which.astype(np.int32), callee=which.astype(np.int32), names=called),
        channels=replace(program.channels, tag=np.full(len(program.channels), -1, np.int32)),
    )  # fmt: skip
    inlined = inline(caller, bodies)
    c = inlined.program.channels
    own = len(program.channels)
    dst, tag = c.dst.copy(), c.tag.copy()
    tag[:own] = program.channels.tag
    for pair, site in enumerate(sites):
        # in the spliced form a call's number stands as the channels' tag: so its channels are found again
        theirs = own + np.flatnonzero(c.tag[own:] == pair)
        if site is not None:
            dst[theirs] = site.start + site.ring.channels.dst * folded_axes(fold)[site.axis].stride
        tag[theirs] = unique[pair, 0]
    shift = _shifts(program, fold, inlined.program, sites, which)
    back = np.append(unique[:, 0], -1).astype(np.int32)
    channels = replace(c, dst=dst.astype(np.int32), tag=tag.astype(np.int32))
    folded = replace(inlined.program, fold=replace(fold, buffer_shift=shift), comms=program.comms, channels=channels)
    return InlinedProgram(folded, inlined.origin_step, back[inlined.comm])


class _Orbit(NamedTuple):
    """A callee that runs along a folded axis: its one body, the axis, the representative that it starts at."""

    ring: Program
    axis: int
    start: int


def _as_ring(callee: Program, where: str) -> Program:
    """The folded form of a callee."""
    if callee.fold is not None:
        return callee
    found = find_fold(callee)
    if found is None:
        raise Unsupported(f"callee {callee.name!r} is not one ring of equal members", where=where, hint="expand caller and callee, then inline")
    return found


def _ring_axis(p: Program, fold: Fold, group: I32, ring: Program) -> int:
    """Which folded axis of the caller the group runs along."""
    theirs = require_folded(ring)
    if len(theirs.axes) != 1 or theirs.axes[0].kind != "shift":
        raise Unsupported(f"callee {ring.name!r} is not one ring of equal members", where=p.name, hint="expand caller and callee, then inline")
    for number, axis in enumerate(folded_axes(fold)):
        if axis.kind == "shift" and axis.size == ring.ranks == len(group):
            orbit = int(group[0]) + np.arange(axis.size) * axis.stride
            if is_representative(fold, int(group[0])) and np.array_equal(orbit, group):
                return number
    raise Unsupported(
        f"group {group.tolist()[:8]} of {len(group)} is no orbit of a representative along a shift axis of that size", where=p.name,
        hint="expand caller and callee, then inline",
    )  # fmt: skip


def _body(ring: Program) -> Program:
    """A callee's representative as a program of one rank; where its channels lead is put right by the caller."""
    c = ring.channels
    return replace(ring, ranks=1, fold=None, contracts=(), channels=replace(c, dst=np.zeros(len(c), np.int32)))


def _shifts(p: Program, fold: Fold, inlined: Program, sites: list[_Orbit | None], pair: NDArray[np.int64]) -> NDArray[np.int32]:
    """Chunk shifts of the caller's buffers, those bound to a callee's buffer taking its shift on the axis of the call.

    Raises: Unsupported where a callee shifts the chunks of a part of a buffer, or two shift them differently.
    """
    out = np.zeros((len(folded_axes(fold)), len(inlined.buffers)), np.int32)
    out[:, : len(p.buffers)] = fold.buffer_shift
    binds = p.calls.binds
    owner = np.repeat(np.arange(len(p.calls)), np.diff(binds.ptr) // 3)
    triples = binds.values.reshape(-1, 3)
    set_by_call = np.zeros(out.shape, bool)
    rows = np.unique(np.stack([pair[owner], triples[:, 0], triples[:, 1], triples[:, 2]], axis=1), axis=0)
    for which, local, buffer, chunk in rows.tolist():
        site = sites[which]
        if site is None or site.ring.fold is None or not (moved := int(site.ring.fold.buffer_shift[0, local])):
            continue
        theirs, ours = int(site.ring.buffers.chunks[local]), int(p.buffers.chunks[buffer])
        finer = ours // theirs  # chunks of ours per chunk of the callee's view of the same buffer
        if chunk or ours % theirs:
            raise Unsupported(f"callee {site.ring.name!r} moves chunks round within a part of {p.buffer_name(buffer)}", where=p.name)
        if (set_by_call[site.axis, buffer] or fold.buffer_shift[site.axis, buffer]) and out[site.axis, buffer] != moved * finer:
            raise Unsupported(f"two uses of {p.buffer_name(buffer)} by symmetric ranks do not agree", where=p.name)
        out[site.axis, buffer] = moved * finer
        set_by_call[site.axis, buffer] = True
    return out
