"""Tensor parallelism by rewriting a segment's calls."""
