"""MSCCL files in the dialects of public ones, made here: rings of fused steps, all pairs with scratch and fused sums, relays with <copy>."""

from __future__ import annotations

from dataclasses import replace

from meshwright.interop.msccl import MscclAlgo, MscclBlock, MscclGpu, MscclStep


def steps(*rows: tuple) -> tuple[MscclStep, ...]:
    """(type, src, dst, count[, depid, deps[, hasdep]]), src and dst as "i3" or "" """

    def place(text: str, default: str) -> tuple[str, int]:
        return (text[0], int(text[1:])) if text else (default, -1)

    made = []
    for k, (kind, src, dst, count, *more) in enumerate(rows):
        depid, deps, hasdep = (*more, *(-1, -1, 0)[len(more) :])
        made.append(MscclStep(k, kind, *place(src, "i"), *place(dst, "o"), count, depid, deps, hasdep))
    return tuple(made)


def ring_all_reduce(n: int, *, width: int = 1, rings: int = 1) -> MscclAlgo:
    """Read from the input, stored in the output: works in and out of place. Ring k starts `k` further."""
    gpus = []
    loop = n * width * rings
    for r in range(n):
        blocks = []
        for k in range(rings):
            at = [(((r - j) % n) * rings + k) * width for j in range(n + 1)]
            rows = [("s", f"i{at[0]}", f"o{at[0]}", width)]
            rows += [("rrs", f"i{x}", f"o{x}", width) for x in at[1 : n - 1]]
            rows += [("rrcs", f"i{at[n - 1]}", f"o{at[n - 1]}", width)]
            rows += [("rcs", f"i{x}", f"o{x}", width) for x in at[: n - 2]]
            rows += [("r", f"i{at[n - 2]}", f"o{at[n - 2]}", width)]
            blocks.append(MscclBlock(k, (r + 1) % n, (r - 1) % n, k, steps(*rows)))
        gpus.append(MscclGpu(r, loop, loop, 0, tuple(blocks)))
    return MscclAlgo(
        name="ring", protocol="Simple", channels=rings, chunks_per_loop=loop, ranks=n, collective="allreduce", in_place=1, out_of_place=1,
        gpus=tuple(gpus), extra=(("redop", "sum"), ("maxcount", "1")),
    )  # fmt: skip


def all_pairs_all_reduce(n: int, width: int = 1) -> MscclAlgo:
    """In place. A block per peer sends the peer its part, receives ours into scratch; one block sums; then parts are exchanged."""
    gpus = []
    for r in range(n):
        peers = [p for p in range(n) if p != r]
        blocks = []
        waits = [("nop", "", "", 0, j + 1, 1) for j in range(n - 2)]
        sums = [("re", f"s{j * width}", f"i{r * width}", width) for j in range(n - 1)]
        sums[0] = (*sums[0], n - 1, 1)
        sums[-1] = (*sums[-1], *(() if len(sums[-1]) > 4 else (-1, -1)), 1)
        blocks.append(MscclBlock(0, -1, -1, 0, steps(*waits, *sums)))
        for j, p in enumerate(peers):
            there = [q for q in range(n) if q != p].index(r)
            rows = [
                ("s", f"i{p * width}", f"s{there * width}", width),
                ("r", f"i{r * width}", f"s{j * width}", width, -1, -1, 1),
                ("s", f"i{r * width}", f"i{r * width}", width, 0, len(waits) + len(sums) - 1),
                ("r", f"i{p * width}", f"i{p * width}", width),
            ]
            blocks.append(MscclBlock(j + 1, p, p, 0, steps(*rows)))
        gpus.append(MscclGpu(r, n * width, 0, (n - 1) * width, tuple(blocks)))
    return MscclAlgo(
        name="allreduce_pairs", protocol="LL", channels=1, chunks_per_loop=n * width, ranks=n, collective="allreduce", in_place=1, out_of_place=0,
        min_bytes=0, max_bytes=65536, gpus=tuple(gpus),
    )  # fmt: skip


def shared_sum_all_pairs(n: int) -> MscclAlgo:
    """In place, as public files for big messages: every block sums one n-th of the rank's part, waits for all receipts before it and for
    all sums after it, by chains of nops."""
    gpus = []
    for r in range(n):
        peers = [p for p in range(n) if p != r]
        received = [(j + 1, 1) for j in range(n - 1)]  # block j+1 has received in its step 1
        summed: dict[int, int] = {}
        sums: dict[int, list[tuple]] = {}
        for b in range(n):
            waits = [w for w in received if w[0] != b]
            rows = [("nop", "", "", 0, *w) for w in waits[:-1]]
            rows += [("re", f"s{k * n + b}", f"i{r * n + b}", 1, *(waits[-1:] or [()])[0]) if not k else ("re", f"s{k * n + b}", f"i{r * n + b}", 1)
                     for k in range(n - 1)]  # fmt: skip
            rows[-1] = (*rows[-1], *(() if len(rows[-1]) > 4 else (-1, -1)), 1)
            sums[b] = rows
            summed[b] = len(rows) - 1 + (2 if b else 0)
        blocks = [MscclBlock(0, -1, -1, 0, steps(*sums[0]))]
        for j, p in enumerate(peers):
            there = [q for q in range(n) if q != p].index(r)
            others = [(b, summed[b]) for b in range(n) if b != j + 1]
            rows = [("s", f"i{p * n}", f"s{there * n}", n), ("r", "", f"s{j * n}", n, -1, -1, 1), *sums[j + 1]]
            rows += [("nop", "", "", 0, *w) for w in others[:-1]]
            rows += [("s", f"i{r * n}", f"i{r * n}", n, *others[-1]), ("r", "", f"i{p * n}", n)]
            blocks.append(MscclBlock(j + 1, p, p, 0, steps(*rows)))
        gpus.append(MscclGpu(r, n * n, 0, n * (n - 1), tuple(blocks)))
    return MscclAlgo(
        name="shared sums", protocol="Simple", channels=1, chunks_per_loop=n * n, ranks=n, collective="allreduce", in_place=1, out_of_place=0,
        min_bytes=0, max_bytes=n * n << 15, gpus=tuple(gpus),
    )  # fmt: skip


def relay_all_gather(n: int, *, width: int = 2) -> MscclAlgo:
    """TE-CCL's way: in place, <copy> elements, a receiving and a sending block per gpu with a wait per relayed chunk."""
    gpus = []
    for r in range(n):
        blocks = []
        got = [("r", f"o{((r - 1 - j) % n) * width}", f"o{((r - 1 - j) % n) * width}", width, -1, -1, int(j < n - 2)) for j in range(n - 1)]
        put = [("s", f"o{((r - j) % n) * width}", f"o{((r - j) % n) * width}", width, *((0, j - 1) if j else ())) for j in range(n - 1)]
        blocks = (MscclBlock(0, -1, (r - 1) % n, 0, steps(*got)), MscclBlock(1, (r + 1) % n, -1, 0, steps(*put)))
        gpus.append(MscclGpu(r, width, n * width, 0, blocks, tuple((j, r * width + j) for j in range(width))))
    return MscclAlgo(
        name="relay", protocol="Simple", channels=1, chunks_per_loop=n * width, ranks=n, collective="allgather", in_place=1, out_of_place=0,
        min_bytes=1024, max_bytes=100_000_000_000, gpus=tuple(gpus), extra=(("redop", "nop"),),
    )  # fmt: skip


def direct(n: int, collective: str) -> MscclAlgo:
    """alltoall, allgather, gather or scatter in one round, out of place; a copy of the own part."""
    gpus = []
    root = 0
    for r in range(n):
        blocks = []
        i_chunks = {"allgather": 1, "gather": 1, "scatter": n if r == root else 0}.get(collective, n)
        o_chunks = {"scatter": 1, "gather": n if r == root else 0}.get(collective, n)
        own_in, own_out = (0 if collective in ("allgather", "gather") else r), (0 if collective == "scatter" else r)
        if (collective not in ("gather", "scatter")) or r == root:
            blocks.append(MscclBlock(0, -1, -1, 0, steps(("cpy", f"i{own_in}", f"o{own_out}", 1))))
        for p in range(n):
            if p == r or (collective == "gather" and root not in (r, p)) or (collective == "scatter" and root not in (r, p)):
                continue
            sends = collective not in ("gather", "scatter") or (p == root if collective == "gather" else r == root)
            takes = collective not in ("gather", "scatter") or (r == root if collective == "gather" else p == root)
            rows = [("s", f"i{0 if collective in ('allgather', 'gather') else p}", "", 1)] if sends else []
            rows += [("r", "", f"o{0 if collective == 'scatter' else p}", 1)] if takes else []
            blocks.append(MscclBlock(len(blocks), p if sends else -1, p if takes else -1, 0, steps(*rows)))
        gpus.append(MscclGpu(r, i_chunks, o_chunks, 0, tuple(blocks)))
    loop = 1 if collective in ("gather", "scatter") else n
    return MscclAlgo(
        name=f"direct {collective}", protocol="LL128", channels=1, chunks_per_loop=loop, ranks=n, collective=collective, in_place=0,
        out_of_place=1, gpus=tuple(gpus), root=root if collective in ("gather", "scatter") else -1,
    )  # fmt: skip


def chain_broadcast(n: int, pieces: int = 4, root: int = 0) -> MscclAlgo:
    """Out of place; the root states nothing: it is the one that receives nothing."""
    gpus = []
    for r in range(n):
        at = (r - root) % n
        kind = "s" if at == 0 else "r" if at == n - 1 else "rcs"
        rows = [(kind, f"i{c}" if kind == "s" else "", "" if kind == "s" else f"o{c}", 1) for c in range(pieces)]
        blocks = [MscclBlock(0, (r + 1) % n if at < n - 1 else -1, (r - 1) % n if at else -1, 0, steps(*rows))]
        if not at:
            blocks.append(MscclBlock(1, -1, -1, 0, steps(("cpy", "i0", "o0", pieces))))
        gpus.append(MscclGpu(r, pieces, pieces, 0, tuple(blocks)))
    return MscclAlgo(
        name="chain", protocol="Simple", channels=1, chunks_per_loop=pieces, ranks=n, collective="broadcast", in_place=0, out_of_place=1,
        gpus=tuple(gpus),
    )  # fmt: skip


FILES = {
    **{f"ring all-reduce {n}": (lambda n=n: ring_all_reduce(n)) for n in (2, 3, 5)},
    # up to here two chunks travel in one message: as two, four ranks that are two messages ahead fill their connections and wait for each other
    "three rings all-reduce 4, two chunks a step": lambda: replace(ring_all_reduce(4, width=2, rings=3), max_bytes=24 << 20),
    **{f"all pairs all-reduce {n}": (lambda n=n: all_pairs_all_reduce(n)) for n in (2, 3, 4)},
    "all pairs all-reduce 4, three chunks a step": lambda: all_pairs_all_reduce(4, 3),
    **{f"shared sums all-reduce {n}": (lambda n=n: shared_sum_all_pairs(n)) for n in (2, 3, 4)},
    **{f"relay all-gather {n}": (lambda n=n: relay_all_gather(n)) for n in (2, 4)},
    **{f"direct {c} 3": (lambda c=c: direct(3, c)) for c in ("alltoall", "allgather", "gather", "scatter")},
    "chain broadcast 4": lambda: chain_broadcast(4),
    "chain broadcast 3 from 1": lambda: chain_broadcast(3, 5, root=1),
}


def with_step(algo: MscclAlgo, gpu: int, block: int, position: int, **values: object) -> MscclAlgo:
    """The algorithm with fields of one step changed."""
    return with_block(algo, gpu, block, lambda b: replace(
        b, steps=tuple(s._replace(**values) if k == position else s for k, s in enumerate(b.steps)))
    )  # fmt: skip


def with_block(algo: MscclAlgo, gpu: int, block: int, change) -> MscclAlgo:
    gpus = tuple(replace(g, blocks=tuple(change(b) if b.id == block else b for b in g.blocks)) if g.id == gpu else g for g in algo.gpus)
    return replace(algo, gpus=gpus)
