"""Training steps as graphs that run node by node: planned, recomputed, replayed, split, in pieces."""
