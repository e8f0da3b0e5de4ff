"""Kronecker factors of a Linear layer's curvature, their damping and their inverses.

Cite: Martens, Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", ICML 2015 (arXiv 1503.05671); sequences as in
    Eschenhagen et al., "Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures", NeurIPS 2023 ("expand").
Shapes: x [..., d_in] flattened to [rows, d_in]; a = [x, 1] with a bias, so A is [d_a, d_a] with d_a = d_in + 1; e [rows, d_out];
    B [d_out, d_out], or [d_out] where it is kept as a diagonal.
Invariant: factors are symmetric and positive semi-definite; sums over micro-batches and replicas, divided once by the counts of all of them, are
    those of the whole batch.
"""

from __future__ import annotations

import math

import torch

from ..errors import RunError

__all__ = ["MIN_DAMPING", "damping_split", "damped_inverse", "gram", "pack", "trace", "unpack", "with_ones"]

MIN_DAMPING = 1e-7  # of either factor, so that neither goes without when the other has all of it
MAX_RAISES = 8  # times that damping is raised before a factor is given up


def with_ones(x: torch.Tensor, bias: bool) -> torch.Tensor:
    """[..., d_in] as [rows, d_a]: the bias is a weight of an input that is always 1."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1) if bias else rows


def gram(rows: torch.Tensor, dtype: torch.dtype, *, diagonal: bool = False) -> torch.Tensor:
    """Sum of outer products of the rows, [d, d]; or its diagonal, [d]. Accumulated in `dtype`, whatever that of the rows."""
    rows = rows.to(dtype)
    return rows.square().sum(0) if diagonal else rows.T @ rows


def trace(factor: torch.Tensor) -> float:
    return float(factor.sum() if factor.dim() == 1 else factor.diagonal().sum())


def damping_split(a: torch.Tensor, b: torch.Tensor, damping: float) -> tuple[float, float]:
    """(damping of A, damping of B): pi = sqrt(mean eigenvalue of A / mean eigenvalue of B); sqrt(damping)·pi and sqrt(damping)/pi, at least 1e-7.

    A zero factor has no share: pi = 1.
    """
    mean_a, mean_b = trace(a) / a.shape[0], trace(b) / b.shape[0]
    pi = math.sqrt(mean_a / mean_b) if mean_a > 0 and mean_b > 0 else 1.0
    root = math.sqrt(damping)
    return max(root * pi, MIN_DAMPING), max(root / pi, MIN_DAMPING)


def damped_inverse(factor: torch.Tensor, gamma: float, *, where: str) -> tuple[torch.Tensor, float]:
    """(factor + gamma·I)^-1 by Cholesky, and the gamma used: ten times as much after every failure. A diagonal stays one.

    Raises: RunError when the factor is not finite, or when no gamma of `MAX_RAISES` tries helps.
    """
    if not bool(torch.isfinite(factor).all()):
        raise RunError("the curvature is not finite", where=where, hint="lower the learning rate or raise the damping; check the loss for overflow")
    if factor.dim() == 1:
        return 1.0 / (factor + gamma), gamma
    for _ in range(MAX_RAISES):
        damped = factor.clone()
        damped.diagonal().add_(gamma)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            return torch.cholesky_inverse(lower), gamma
        gamma *= 10
    message = f"the curvature cannot be inverted with a damping of {gamma / 10:g}"
    raise RunError(message, where=where, hint="keep factors in float64 or raise the damping")


def pack(factor: torch.Tensor) -> torch.Tensor:
    """The lower triangle of a symmetric factor as a vector: half of the bytes to send."""
    if factor.dim() == 1:
        return factor.clone()
    row, column = torch.tril_indices(factor.shape[0], factor.shape[0], device=factor.device)
    return factor[row, column]


def unpack(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The factor of that shape; reverse of `pack`."""
    if len(shape) == 1:
        return packed.reshape(shape).clone()
    out = packed.new_empty(shape)
    row, column = torch.tril_indices(shape[0], shape[0], device=packed.device)
    out[row, column] = packed
    out[column, row] = packed
    return out
