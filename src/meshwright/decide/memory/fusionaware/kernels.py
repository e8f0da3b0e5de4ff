"""Which runs of a plan a fusing compiler puts into one kernel, and in which order the kernels run.

After TorchInductor's scheduler for processors: pointwise operators, reductions and views whose results are written out fuse with one another where
one reads what the other made, or both read the same, over as many elements, and no other kernel has to run between them. All results of a kernel are
allocated before it. Kernels stand in the order of their first members, each after what it reads.
Left out: scores by which Inductor picks among several fusions (here the nearest pair comes first), and loops of compatible but unequal shapes.
Cost: O(readers of one storage) candidates per run, each with a walk over the runs between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_KERNEL_RUNS", "kernels_of"]

# Runs in one kernel, and between two that fuse, at most: torch's inductor has the same limit (`max_fusion_size`).
MAX_KERNEL_RUNS = 64


def kernels_of(reads: Sequence[Sequence[int]], part: Sequence[int], size: Sequence[int], touched: Sequence[frozenset[object]]) -> list[list[int]]:
    """Kernels in the order they run, as lists of runs.

    `reads[k]`: runs whose written results run k reads. `size[k]`: what its loop goes over, 0 where it fuses with nothing. `touched[k]`: what it
    reads or makes, for runs that share operands only. `part`: runs of different parts (forward, backward) do not fuse.
    """
    group = _Groups(reads)
    last: dict[object, list[int]] = {}
    for k in range(len(reads)):
        if not size[k]:
            continue
        near = {r for x in touched[k] for r in last.get(x, ())}
        for r in sorted(near, reverse=True):
            # a loop over other elements, or the other pass, cannot be the same kernel; nearest pairs first
            if k - r <= MAX_KERNEL_RUNS and size[r] == size[k] and part[r] == part[k]:
                group.fuse(r, k)
        for x in touched[k]:
            last.setdefault(x, []).append(k)
    return group.ordered()


class _Groups:
    def __init__(self, reads: Sequence[Sequence[int]]) -> None:
        self.reads = reads
        self.users: list[list[int]] = [[] for _ in reads]
        for k, rs in enumerate(reads):
            for r in rs:
                self.users[r].append(k)
        self.of = list(range(len(reads)))
        self.members = {k: [k] for k in range(len(reads))}

    def fuse(self, a: int, b: int) -> None:
        """Makes one kernel of those of runs a and b, unless one would have to run both before and after another."""
        x, y = self.of[a], self.of[b]
        if x == y or len(self.members[x]) + len(self.members[y]) > MAX_KERNEL_RUNS or self.between(x, y) or self.between(y, x):
            return
        for k in self.members[y]:
            self.of[k] = x
        self.members[x] = sorted(self.members[x] + self.members.pop(y))

    def between(self, first: int, then: int) -> bool:
        """Another kernel reads what `first` makes, and `then` needs what that leads to."""
        end = max(k for m in (first, then) for k in self.members[m])
        stack = [u for k in self.members[first] for u in self.users[k] if self.of[u] not in (first, then)]
        seen: set[int] = set()
        while stack:
            g = self.of[stack.pop()]
            if g == then:
                return True
            if g in seen or self.members[g][0] > end:
                continue
            seen.add(g)
            stack += [u for k in self.members[g] for u in self.users[k] if self.of[u] != g]
        return False

    def ordered(self) -> list[list[int]]:
        """By first members, each kernel after those whose results it reads."""
        done: set[int] = set()
        order: list[list[int]] = []
        for g in sorted(self.members, key=lambda g: self.members[g][0]):
            stack = [(g, False)]
            while stack:
                at, ready = stack.pop()
                if at in done:
                    continue
                if ready:
                    done.add(at)
                    order.append(self.members[at])
                    continue
                stack.append((at, True))
                needs = {self.of[r] for k in self.members[at] for r in self.reads[k]} - done - {at}
                stack += [(n, False) for n in sorted(needs, reverse=True)]
        return order
