"""An MSCCL algorithm: per GPU thread blocks of steps, as MSCCL's executor reads it (RCCL, and NCCL with the MSCCL executor, run it).

Cite: M. Cowan, S. Maleki, M. Musuvathi, O. Saarikivi, Y. Xiong, "MSCCLang: Microsoft Collective Communication Language" (ASPLOS 2023).
The rules are those of the public executor (parser and interpreter kernel); numbers below are its build-time constants.

- The whole message (all-gather, reduce-scatter, all-to-all: that of all ranks) is cut into `nchunksperloop` equal chunks. Buffers are
  `i`nput, `o`utput, `s`cratch; offsets count chunks. Big chunks are streamed: every slice runs all steps of a block.
- A block has at most one peer that it sends to and one that it receives from. (source, destination, channel) is a FIFO with one block at
  each end; the j-th send meets the j-th receive. Steps run in file order; a send waits for room, a receive for data.
- A step's `depid`, `deps` wait until block `depid` of the GPU has completed a step numbered >= `deps` that has `hasdep` set: only
  such steps publish their number. A `nop` carries one more wait for the step that follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..cite import Cite
from ..program.program import Program
from ..program.tables import I32

__all__ = [
    "CITE", "COLLECTIVES", "MANY_STEPS", "PARTS", "PROTOCOLS", "Attributes", "ExecutorLimits", "ImportedMsccl", "MscclAlgo", "MscclBlock", "MscclGpu",
    "MscclStep", "chunks_of", "collective_of", "spelling_of",
]  # fmt: skip

CITE = Cite(
    key="cowan2023mscclang",
    title="MSCCLang: Microsoft Collective Communication Language",
    authors="M. Cowan, S. Maleki, M. Musuvathi, O. Saarikivi, Y. Xiong",
    year=2023,
    venue="ASPLOS 2023",
    doi="10.1145/3575693.3575724",
)

PROTOCOLS = ("Simple", "LL", "LL128")

# The executor's name of a collective -> ours, or None where a file cannot be judged alone (half of a point-to-point, uneven all-to-all).
COLLECTIVES: dict[str, str | None] = {
    "allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter", "broadcast": "broadcast", "reduce": "reduce",
    "alltoall": "all-to-all", "gather": "gather", "scatter": "scatter", "send": None, "recv": None, "alltoallv": None,
}  # fmt: skip
DIALECTS = {  # spellings that writers use and the executor refuses
    "reduce_scatter": "reducescatter", "all_reduce": "allreduce", "all_gather": "allgather", "all_to_all": "alltoall", "custom": "",
}  # fmt: skip

# Parts of a step type: R receive, X read source, A add, D store to destination, S send.
PARTS = {"s": "XS", "r": "RD", "cpy": "XD", "re": "XAD", "rrc": "RXAD", "rrs": "RXAS", "rcs": "RDS", "rrcs": "RXADS", "nop": ""}

Attributes = tuple[tuple[str, str], ...]  # what a file says beyond what is read, in order

# Files of more steps, 43 MB and up, are written without white space between elements, which the executor's parser skips, and with 0 for what the type
# of a step, or a step that waits for nobody, leaves unread: a twelfth less.
MANY_STEPS = 350_000


@dataclass(frozen=True, kw_only=True)
class ExecutorLimits:
    """What an executor was built for.

    steps: 64 today, 256 in older builds. depth: messages that fit into a channel (Simple: 2; LL and LL128: 8, but 2 is asked of all).
    simple_bytes, ll_bytes, ll128_bytes: data in one message, with the library's default buffer sizes.
    """

    steps: int = 64
    channels: int = 32
    blocks_per_channel: int = 32  # with a peer, per direction
    dependable_block: int = 127  # highest block that can be waited for (int8)
    count: int = 71  # chunks of one step
    fused_reductions: int = 16
    offset: int = 32767  # int16
    nodes: int = 4095  # XML elements that one rank's parser can hold
    children: int = 1024  # of one element
    characters: int = 255
    depth: int = 2
    simple_bytes: int = 2 << 20
    ll_bytes: int = 32 << 10
    ll128_bytes: int = 576_000

    def batch(self, algo: MscclAlgo) -> int:
        """Chunks that travel together in the biggest call that the file allows: the fewest that ever do."""
        room = {"LL": self.ll_bytes, "LL128": self.ll128_bytes}.get(algo.protocol, self.simple_bytes)
        if not algo.max_bytes:
            return 1
        return max(1, min(self.count, room // max(1, -(-algo.max_bytes // algo.chunks_per_loop))))


class MscclStep(NamedTuple):
    """One step; `number` is the file's `s`. Offsets and dependences that do not apply are -1."""

    number: int
    type: str
    src_buffer: str
    src_offset: int
    dst_buffer: str
    dst_offset: int
    chunks: int
    depid: int = -1
    deps: int = -1
    hasdep: int = 0
    extra: Attributes = ()

    @property
    def parts(self) -> str:
        return PARTS[self.type]


@dataclass(frozen=True, slots=True)
class MscclBlock:
    id: int
    send: int
    recv: int
    channel: int
    steps: tuple[MscclStep, ...]
    extra: Attributes = ()


@dataclass(frozen=True, slots=True)
class MscclGpu:
    """`copies`: (input offset, output offset) of the `<copy>` elements that TACCL and TE-CCL write; the executor ignores them."""

    id: int
    i_chunks: int
    o_chunks: int
    s_chunks: int
    blocks: tuple[MscclBlock, ...]
    copies: tuple[tuple[int, int], ...] = ()
    extra: Attributes = ()


@dataclass(frozen=True, kw_only=True)
class MscclAlgo:
    """`collective` is spelled as in the file. `root`: of a broadcast, reduce, scatter or gather, -1 = not stated (the executor has no
    such attribute). `max_bytes` 0: no limit. `in_place`, `out_of_place`: for which calls the executor may choose it."""

    name: str
    protocol: str
    channels: int
    chunks_per_loop: int
    ranks: int
    collective: str
    in_place: int
    out_of_place: int
    min_bytes: int = 0
    max_bytes: int = 0
    gpus: tuple[MscclGpu, ...] = ()
    root: int = -1
    extra: Attributes = ()

    def steps(self) -> Iterator[tuple[MscclGpu, MscclBlock, MscclStep]]:
        for gpu in self.gpus:
            for block in gpu.blocks:
                for step in block.steps:
                    yield gpu, block, step

    @property
    def modes(self) -> tuple[bool, ...]:
        """In which ways the executor may run it: False out of place, True in place."""
        return tuple(mode for mode, enabled in ((False, self.out_of_place), (True, self.in_place)) if enabled)


def collective_of(algo: MscclAlgo) -> str | None:
    """Our name of the operation, whatever the spelling; None where it is not one we know."""
    return COLLECTIVES.get(DIALECTS.get(algo.collective, algo.collective))


def spelling_of(op: str) -> str | None:
    """The executor's name of one of our operations."""
    return next((name for name, ours in COLLECTIVES.items() if ours == op), None)


def chunks_of(op: str, chunks_per_loop: int, ranks: int) -> tuple[int, int]:
    """(input chunks, output chunks) of the ranks that have them. The message of a gather or scatter is one rank's."""
    whole = chunks_per_loop
    return {
        "all-gather": (whole // ranks, whole), "reduce-scatter": (whole, whole // ranks),
        "gather": (whole, whole * ranks), "scatter": (whole * ranks, whole),
    }.get(op, (whole, whole))  # fmt: skip


@dataclass(frozen=True)
class ImportedMsccl:
    """`program` and where each of its steps stands in the file: GPU, block, position in the block, message of the step. Block -1: a `<copy>`."""

    program: Program
    gpu: I32
    block: I32
    position: I32
    message: I32
