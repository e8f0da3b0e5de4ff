"""An MSCCL algorithm as an MSCCL++ plan: messages become puts into scratch of the receiver, followed by a signal.

Every message has scratch chunks of its own at the receiver, so nothing has to be free before it is sent but the scratch of the run before:
the receiver says so by a signal at its start, which the sender waits for. Waits between blocks become semaphores, one per pair of blocks.
Peers of one server are reached over memory channels, others over port channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import Unsupported
from .from_msccl import PublishedStep, waits_of
from .msccl import MscclAlgo, MscclBlock, MscclGpu, MscclStep, chunks_of, collective_of
from .mscclpp import BlockBuffers, BlockChannels, Channel, MscclppBlock, MscclppGpu, MscclppOp, MscclppPlan, Ref, RemoteBuffer, Semaphore

__all__ = ["COLLECTIVES", "to_mscclpp"]

COLLECTIVES = {"all-reduce": "allreduce", "all-gather": "allgather", "reduce-scatter": "reducescatter", "all-to-all": "alltoall"}
NOP = MscclppOp(name="nop")
Key = tuple[int, int, int]  # source, destination, channel of the MSCCL algorithm


def to_mscclpp(algo: MscclAlgo, *, in_place: bool, server: Mapping[int, str] | None = None) -> MscclppPlan:
    """The plan of a right algorithm, for calls in or out of place. `server`: of every rank; by default all are on one.

    Raises: Unsupported for operations that MSCCL++'s plans do not know.
    """
    op = collective_of(algo)
    if op not in COLLECTIVES:
        raise Unsupported(f"MSCCL++ plans have no {op}", hint=f"they have {', '.join(COLLECTIVES)}")
    slots, extra = _slots(algo)
    connections = _Connections(algo, {r: (server or {}).get(r, "") for r in range(algo.ranks)})
    inputs, outputs = chunks_of(op, algo.chunks_per_loop, algo.ranks)
    gpus = []
    for gpu in sorted(algo.gpus, key=lambda g: g.id):
        maker = _Gpu(gpu, slots, connections, waits_of(gpu))
        blocks = tuple(maker.block(b) for b in sorted(gpu.blocks, key=lambda b: b.id))
        gpus.append(
            MscclppGpu(
                id=gpu.id, input_chunks=inputs, output_chunks=outputs, scratch_chunks=gpu.s_chunks + extra[gpu.id], threadblocks=blocks,
                channels=connections.of(gpu.id), remote_buffers=connections.buffers(gpu.id),
                semaphores=tuple(Semaphore() for _ in maker.semaphores),
            )
        )  # fmt: skip
    most = algo.max_bytes or (1 << 64) - 1
    return MscclppPlan(
        name=algo.name, collective=COLLECTIVES[op], inplace=in_place, gpus=tuple(gpus), min_message_size=algo.min_bytes, max_message_size=most
    )


def _slots(algo: MscclAlgo) -> tuple[dict[Key, list[int]], dict[int, int]]:
    """Per connection the scratch chunk at which each message lands, and per rank how many chunks that adds."""
    slots: dict[Key, list[int]] = {}
    extra = {g.id: 0 for g in algo.gpus}
    for g in algo.gpus:
        for b in g.blocks:
            for s in b.steps:
                if "R" in s.parts:
                    slots.setdefault((b.recv, g.id, b.channel), []).append(g.s_chunks + extra[g.id])
                    extra[g.id] += s.chunks
    return slots, extra


class _Connections:
    """Numbers of connections and of remote scratch buffers, per rank and type."""

    def __init__(self, algo: MscclAlgo, server: Mapping[int, str]) -> None:
        self.kind: dict[tuple[int, int], str] = {}
        self.peers: dict[int, dict[str, list[int]]] = {g.id: {} for g in algo.gpus}
        self.number: dict[tuple[int, Key], int] = {}  # (rank, connection) -> its channel id at that rank
        self.remote: dict[int, list[int]] = {g.id: [] for g in algo.gpus}  # ranks whose scratch is written
        keys = sorted({(g.id, b.send, b.channel) for g in algo.gpus for b in g.blocks if b.send >= 0})
        for key in keys:  # both ends in one order: the k-th connection of a pair is the k-th from either side
            src, dst, _ = key
            kind = "memory" if server[src] == server[dst] else "port"
            self.kind[src, dst] = self.kind[dst, src] = kind
            for mine, peer in ((src, dst), (dst, src)):
                row = self.peers[mine].setdefault(kind, [])
                self.number[mine, key] = len(row)
                row.append(peer)
            if dst not in self.remote[src]:
                self.remote[src].append(dst)

    def of(self, rank: int) -> tuple[Channel, ...]:
        return tuple(Channel(channel_type=kind, connected_to=tuple(peers)) for kind, peers in sorted(self.peers[rank].items()))  # type: ignore[arg-type]

    def buffers(self, rank: int) -> tuple[RemoteBuffer, ...]:
        return tuple(RemoteBuffer(rank=peer, type="s", access_channel_types=(self.kind[rank, peer],)) for peer in self.remote[rank])  # type: ignore[arg-type]


@dataclass
class _Gpu:
    gpu: MscclGpu
    slots: dict[Key, list[int]]
    connections: _Connections
    published: dict[int, list[PublishedStep]]
    semaphores: dict[tuple[int, int], int] = field(default_factory=dict)  # (block that releases, block that acquires)
    releases: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (block, step) -> semaphores

    def __post_init__(self) -> None:
        for block, rows in sorted(self.published.items()):
            passed: dict[int, int] = {}
            for row in rows:
                for other, at in row.waits:
                    if other == block or passed.get(other, -1) >= at:
                        continue
                    passed[other] = at
                    number = self.semaphores.setdefault((other, block), len(self.semaphores))
                    self.releases.setdefault((other, at), []).append(number)

    def block(self, b: MscclBlock) -> MscclppBlock:
        me = self.gpu.id
        out, into = (me, b.send, b.channel), (b.recv, me, b.channel)
        kinds = {self.connections.kind[me, peer] for peer in (b.send, b.recv) if peer >= 0}
        lists: dict[str, list[int]] = {kind: [] for kind in sorted(kinds)}
        local: dict[Key, int] = {}
        for peer, key in ((b.send, out), (b.recv, into)):
            if peer >= 0:
                row = lists[self.connections.kind[me, peer]]
                local[key] = len(row)
                row.append(self.connections.number[me, key])
        ops: list[MscclppOp] = []
        if b.recv >= 0:
            ops += [NOP, self._signal(me, b.recv, local[into])]
        if b.send >= 0:
            ops += [self._count("wait", me, b.send, local[out]), NOP]
        sent = got = 0
        passed: dict[int, int] = {}
        for k, s in enumerate(b.steps):
            ops += self._acquired(b, k, passed)
            if not s.parts:
                continue
            slot = self.slots[into][got] if "R" in s.parts else -1
            there = self.slots[out][sent] if "S" in s.parts else -1
            got, sent = got + ("R" in s.parts), sent + ("S" in s.parts)
            if "R" in s.parts:
                ops += [self._count("wait", me, b.recv, local[into]), NOP]
            ops += self._data(b, s, slot, there)
            if "S" in s.parts:
                ops += [NOP, self._signal(me, b.send, local[out])]
                if self.connections.kind[me, b.send] == "port":  # the proxy may still be reading the source
                    ops.append(self._count("flush", me, b.send, local[out]))
            ops.append(NOP)
            if (b.id, k) in self.releases:
                ops.append(MscclppOp(name="sem_release", semaphore_ids=tuple(self.releases[b.id, k])))
        refs = []
        if b.send >= 0:
            number = self.connections.remote[me].index(b.send)
            refs = [BlockBuffers(access_channel_type=self.connections.kind[me, b.send], remote_buffer_ids=(number,))]  # type: ignore[arg-type]
        channels = tuple(BlockChannels(channel_type=kind, channel_ids=tuple(ids)) for kind, ids in lists.items())  # type: ignore[arg-type]
        return MscclppBlock(id=b.id, ops=tuple(ops), channels=channels, remote_buffer_refs=tuple(refs))

    def _signal(self, me: int, peer: int, channel: int) -> MscclppOp:
        return self._count("signal", me, peer, channel)

    def _count(self, name: str, me: int, peer: int, channel: int) -> MscclppOp:
        kind = self.connections.kind[me, peer]
        return MscclppOp(name=name, channel_ids=(channel,), channel_type=kind)  # type: ignore[arg-type]

    def _acquired(self, b: MscclBlock, k: int, passed: dict[int, int]) -> list[MscclppOp]:
        """Waits of a step, as semaphores: those that an earlier step of the block has waited for already fall away."""
        found = []
        for other, at in self.published[b.id][k].waits:
            if other != b.id and passed.get(other, -1) < at:
                passed[other] = at
                found.append(self.semaphores[other, b.id])
        return [MscclppOp(name="sem_acquire", semaphore_ids=(x,)) for x in found] + ([NOP] if found else [])

    def _data(self, b: MscclBlock, s: MscclStep, slot: int, there: int) -> list[MscclppOp]:
        """What the step does with data that lies in `slot` (if it receives), up to the put to `there` (if it sends)."""
        src = Ref(type=s.src_buffer, index=s.src_offset, size=s.chunks) if "X" in s.parts else None  # type: ignore[arg-type]
        dst = Ref(type=s.dst_buffer, index=s.dst_offset, size=s.chunks) if "D" in s.parts else None  # type: ignore[arg-type]
        arrived = Ref(type="s", index=slot, size=s.chunks) if slot >= 0 else None
        ops = []
        if "A" in s.parts:
            first = arrived or dst
            assert first is not None and src is not None, "a sum has two operands"
            into = dst or first  # what is not kept is summed where it arrived
            ops.append(MscclppOp(name="re", src_buff=(first, src), dst_buff=(into,), reduce_op="sum"))
            value = into
        else:
            origin = arrived or src
            assert origin is not None, "a step moves something"
            value = origin
            if dst is not None:
                ops.append(MscclppOp(name="copy", src_buff=(origin,), dst_buff=(dst,)))
        if there >= 0:
            remote = Ref(buffer_id=0, index=there, size=s.chunks)
            port = self.connections.kind[self.gpu.id, b.send] == "port"
            put = MscclppOp(
                name="put", src_buff=(value,), dst_buff=(remote,), channel_type="port" if port else "memory", channel_ids=(0,) if port else ()
            )
            ops += [NOP, put] if ops else [put]
        return ops
