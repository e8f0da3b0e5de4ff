"""The codecs that exist: what each states about bytes, bias and error. `run/codecs` holds the code of each; tests compare the two."""

from __future__ import annotations

from .cite import Cite
from .codec import Bias, CodecKind, CodecSpec, Option, PayloadBytes, Shapes, elements_of

__all__ = ["CODECS", "index_bytes", "kept_elements"]

STICH = Cite(
    key="stich2018sparsified", title="Sparsified SGD with Memory", year=2018, venue="NeurIPS", authors="S. U. Stich, J.-B. Cordonnier, M. Jaggi"
)


def index_bytes(elements: int) -> int:
    """Bytes of one index into so many elements: int32, int64 from 2^31 on."""
    return 4 if elements < 1 << 31 else 8


def kept_elements(density: float, elements: int) -> int:
    """k = max(1, floor(density * n)), and never more than there are."""
    return min(elements, max(1, int(density * elements)))


def _exact(spec: CodecSpec) -> Bias:
    return "exact"


def _biased(spec: CodecSpec) -> Bias:
    return "biased"


def _none_bytes(spec: CodecSpec, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    return (PayloadBytes.exactly(elements_of(shapes) * element_bytes),)


def _half_bytes(spec: CodecSpec, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    return (PayloadBytes.exactly(2 * elements_of(shapes)),)


def _sparse_bytes(spec: CodecSpec, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    n = elements_of(shapes)
    return (PayloadBytes.exactly(kept_elements(spec.number("density"), n) * (4 + index_bytes(n))),)


def _kept_share(spec: CodecSpec, n: int) -> float:
    return kept_elements(spec.number("density"), n) / n if n else 1.0


DENSITY = Option(name="density", default=0.01, what="share of the elements that is sent, above 0, at most 1", low=1e-9, high=1.0)

CODECS: tuple[CodecKind, ...] = (
    CodecKind(
        name="none", title="the gradient itself", cite=None, aggregation="all-reduce", bias=_exact, feedback=False, payload=_none_bytes,
        variance=lambda spec, n: 0.0, contraction=lambda spec, n: 1.0,
    ),
    CodecKind(
        name="fp16", title="IEEE half precision", cite=None, aggregation="all-reduce", bias=_biased, feedback=False, payload=_half_bytes,
    ),
    CodecKind(
        name="bf16", title="bfloat16", cite=None, aggregation="all-reduce", bias=_biased, feedback=False, payload=_half_bytes,
        contraction=lambda spec, n: 1 - 2.0**-16,
    ),
    CodecKind(
        name="topk", title="largest magnitudes", cite=STICH, aggregation="all-gather", bias=_biased, feedback=True, payload=_sparse_bytes,
        contraction=_kept_share, options=(DENSITY,),
    ),
)  # fmt: skip
"""In the order in which they are listed to people."""
