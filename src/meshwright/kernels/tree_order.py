"""The order in which a tree that is given by its parents is gone through: parents before children."""

from __future__ import annotations

from .compile import helper

__all__ = ["breadth_first"]


@helper
def breadth_first(parent, order, child, beside):  # type: ignore[no-untyped-def]
    """Writes the devices that are reached from the root (parent -1) to `order`, nearest first, and returns how many they are.

    `child` and `beside` are working space (first child, next sibling), all of the devices' number. Fewer than all: `parent` has a circle.
    """
    n = len(parent)
    for v in range(n):
        child[v] = -1
    found = 0
    for v in range(n):
        p = parent[v]
        if p < 0:
            order[0], found = v, 1
        else:
            beside[v] = child[p]
            child[p] = v
    # Devices on a circle are never reached from the root, so a tree with one comes out shorter.
    done = 0
    while done < found:
        c = child[order[done]]
        done += 1
        while c >= 0:
            order[found] = c
            found += 1
            c = beside[c]
    return found
