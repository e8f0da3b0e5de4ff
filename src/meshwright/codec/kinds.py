"""The codecs that exist: what each states about bytes, bias and error. `run/codecs` holds the code of each; tests compare the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt

from ..cite import Cite
from .terms import Bias, CodecKind, CodecOptions, Option, PayloadBytes, Shapes, elements_of

__all__ = ["CODECS", "Matrix", "index_bytes", "kept_elements", "low_rank_parts", "warm_density"]

Payload = Callable[[CodecOptions, Shapes, int, int | None], tuple[PayloadBytes, ...]]

WARM_UP_STAGES = 4  # DGC's warm-up: densities 1/4, 1/16, 1/64, 1/256, never below the final one
MIN_FACTOR_RATE = 2  # PowerSGD leaves a matrix alone unless its factors are so many times smaller, as torch's hook does by default


def index_bytes(elements: int) -> int:
    """Bytes of one index into so many elements: int32, int64 from 2^31 on."""
    return 4 if elements < 1 << 31 else 8


def kept_elements(density: float, elements: int) -> int:
    """k = max(1, floor(density * n)), and never more than there are."""
    return min(elements, max(1, int(density * elements)))


def warm_density(spec: CodecOptions, step: int | None) -> float:
    """DGC's density at a step: max(1/4^(stage + 1), density) in the four stages of its warm-up."""
    density, steps = spec.number("density"), spec.integer("warmup")
    if step is None or step >= steps:
        return density
    return max(0.25 ** (step * WARM_UP_STAGES // steps + 1), density)


@dataclass(frozen=True)
class Matrix:
    """A tensor of a group seen as rows x columns, sent as factors of `rank` columns each; it starts at element `start` of the group."""

    start: int
    rows: int
    columns: int
    rank: int


def low_rank_parts(shapes: Shapes, rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """Which tensors PowerSGD sends as factors, and the ranges of elements that it sends as they are (vectors, small matrices)."""
    matrices: list[Matrix] = []
    plain: list[tuple[int, int]] = []
    start = 0
    for shape in shapes:
        size = prod(shape)
        rows = shape[0] if shape else 1
        columns = size // rows if rows else 0
        r = min(rank, rows, columns)
        if len(shape) > 1 and r and (rows + columns) * r * MIN_FACTOR_RATE < size:
            matrices.append(Matrix(start, rows, columns, r))
        elif size:
            plain.append((start, start + size))
        start += size
    return matrices, plain


def _exact(spec: CodecOptions) -> Bias:
    return "exact"


def _biased(spec: CodecOptions) -> Bias:
    return "biased"


def _unbiased(spec: CodecOptions) -> Bias:
    return "unbiased"


def _when(option: str, holds: Bias, otherwise: Bias) -> Callable[[CodecOptions], Bias]:
    return lambda spec: holds if spec[option] else otherwise


def _none_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    return (PayloadBytes.exactly(elements_of(shapes) * element_bytes),)


def _half_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    return (PayloadBytes.exactly(2 * elements_of(shapes)),)


def _sparse_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    n = elements_of(shapes)
    return (PayloadBytes.exactly(kept_elements(spec.number("density"), n) * (4 + index_bytes(n))),)


def _warm_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    n = elements_of(shapes)
    return (PayloadBytes.exactly(kept_elements(warm_density(spec, step), n) * (4 + index_bytes(n))),)


def _threshold_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    n = elements_of(shapes)
    k, entry = kept_elements(spec.number("density"), n), 4 + index_bytes(n)
    return (PayloadBytes(lower=0, expected=k * entry, upper=min(n, 2 * k) * entry),)


def _shared_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    return (PayloadBytes.exactly(4 * kept_elements(spec.number("density"), elements_of(shapes))),)


def _block_bytes(bits: int | str, scales: int) -> Payload:
    """So many bits per element (or the option that says it) and so many float32 per block."""

    def payload(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
        n = elements_of(shapes)
        width = spec.integer(bits) if isinstance(bits, str) else bits
        return (PayloadBytes.exactly(4 * scales * -(-n // spec.integer("block")) + -(-n * width // 8)),)

    return payload


def _sign_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    return (PayloadBytes.exactly(-(-elements_of(shapes) // 8)),)


def _factor_bytes(spec: CodecOptions, shapes: Shapes, element_bytes: int, step: int | None) -> tuple[PayloadBytes, ...]:
    matrices, plain = low_rank_parts(shapes, spec.integer("rank"))
    first = sum(b - a for a, b in plain) + sum(m.rows * m.rank for m in matrices)
    return PayloadBytes.exactly(4 * first), PayloadBytes.exactly(4 * sum(m.columns * m.rank for m in matrices))


def _kept_share(spec: CodecOptions, n: int) -> float:
    return kept_elements(spec.number("density"), n) / n if n else 1.0


def _random_share(spec: CodecOptions, n: int) -> float | None:
    return None if spec["scaled"] else _kept_share(spec, n)


def _random_variance(spec: CodecOptions, n: int) -> float | None:
    return 1 / _kept_share(spec, n) - 1 if spec["scaled"] else None


def _within_block(spec: CodecOptions, n: int) -> int:
    return max(1, min(n, spec.integer("block")))


def _sign_share(spec: CodecOptions, n: int) -> float:
    """|x|_1^2 >= |x|_2^2 in every block: at least one element's worth of it is kept."""
    return 1 / _within_block(spec, n)


def _ternary_variance(spec: CodecOptions, n: int) -> float:
    """E|C(x)|^2 = max|x| |x|_1 <= sqrt(B) |x|^2."""
    return sqrt(_within_block(spec, n)) - 1


def _level_variance(spec: CodecOptions, n: int) -> float:
    """QSGD, lemma 3.1: min(B/s^2, sqrt(B)/s). Scaled by the maximum, an element's variance is at most (max|x|/s)^2 / 4."""
    size, levels = _within_block(spec, n), (1 << (spec.integer("bits") - 1)) - 1
    return min(size / levels**2 / (4 if spec["norm"] == "max" else 1), sqrt(size) / levels)


def _byte_variance(spec: CodecOptions, n: int) -> float | None:
    """Each element is off by less than a level u = max|x|/127, with variance at most u^2/4."""
    return _within_block(spec, n) / (4 * 127**2) if spec["stochastic"] else None


def _byte_share(spec: CodecOptions, n: int) -> float | None:
    """Rounded to the nearest, each element is off by at most u/2."""
    return None if spec["stochastic"] else 1 - _within_block(spec, n) / (4 * 127**2) * (1 + 2.0**-10)


def _float8_share(spec: CodecOptions, n: int) -> float:
    """Normal numbers are off by a relative half step, subnormal ones by half the smallest step, of which the block's maximum holds so many."""
    half_step, smallest = (2.0**-4, 2.0**-10 / 448) if spec["format"] == "e4m3" else (2.0**-3, 2.0**-17 / 57344)
    return 1 - (half_step**2 + _within_block(spec, n) * smallest**2) * (1 + 2.0**-10)


def _scaled_with_feedback(spec: CodecOptions) -> str:
    wrong = spec["scaled"] and spec.feedback
    return "values scaled by 1/density cannot go with error feedback: the residual would grow; say feedback=false" if wrong else ""


DENSITY = Option(name="density", default=0.01, what="share of the elements that is sent, above 0, at most 1", low=1e-9, high=1.0)
SEED = Option(name="seed", default=0, what="of its random numbers; the same on all ranks", low=0, high=2**31)


def _block(default: int) -> Option:
    return Option(name="block", default=default, what="elements that share a scale, a multiple of 8", low=8, high=1 << 20, multiple=8)


def _momentum(default: float) -> Option:
    return Option(name="momentum", default=default, what="of the local momentum; the optimizer then has none", low=0.0, high=0.9999)


CODECS: tuple[CodecKind, ...] = (
    CodecKind(
        name="none", title="the gradient itself", cite=None, aggregation="all-reduce", bias=_exact, feedback=False, payload=_none_bytes,
        variance=lambda spec, n: 0.0, contraction=lambda spec, n: 1.0,
    ),
    CodecKind(
        name="fp16", title="half precision", cite=None, aggregation="all-reduce", bias=_biased, feedback=False, payload=_half_bytes,
        summand="float16",
    ),
    CodecKind(
        name="bf16", title="bfloat16", cite=None, aggregation="all-reduce", bias=_biased, feedback=False, payload=_half_bytes,
        contraction=lambda spec, n: 1 - 2.0**-16, summand="bfloat16",
    ),
    CodecKind(
        name="fp8", title="8-bit floats with a scale per block", aggregation="all-gather", bias=_biased, feedback=True, payload=_block_bytes(8, 1),
        cite=Cite(key="micikevicius2022fp8", title="FP8 Formats for Deep Learning", year=2022, venue="arXiv 2209.05433",
        authors="P. Micikevicius et al."),
        contraction=_float8_share,
        options=(Option(name="format", default="e4m3", what="bits of exponent and mantissa", choices=("e4m3", "e5m2")), _block(256)),
    ),
    CodecKind(
        name="int8", title="8-bit integers with a scale per block", aggregation="all-gather", bias=_when("stochastic", "unbiased", "biased"),
        feedback=True, payload=_block_bytes(8, 1), variance=_byte_variance, contraction=_byte_share, random=True,
        cite=Cite(key="dettmers2016eight", title="8-Bit Approximations for Parallelism in Deep Learning", year=2016, venue="ICLR",
        authors="T. Dettmers"),
        options=(_block(256), Option(name="stochastic", default=False, what="round up or down at random: unbiased"), SEED),
    ),
    CodecKind(
        name="topk", title="largest magnitudes", aggregation="all-gather", bias=_biased, feedback=True, payload=_sparse_bytes,
        contraction=_kept_share,
        cite=Cite(
            key="stich2018sparsified", title="Sparsified SGD with Memory", year=2018, venue="NeurIPS",
            authors="S. U. Stich, J.-B. Cordonnier, M. Jaggi",
        ),
        options=(DENSITY,),
    ),
    CodecKind(
        name="threshold", title="magnitudes above a reused threshold", aggregation="all-gather", bias=_biased, feedback=True,
        payload=_threshold_bytes,
        cite=Cite(
            key="li2022oktopk", title="Near-Optimal Sparse Allreduce for Distributed Deep Learning", year=2022, venue="PPoPP",
            authors="S. Li, T. Hoefler",
        ),
        options=(DENSITY, Option(name="every", default=32, what="steps between exact thresholds", low=1, high=1 << 30)),
    ),
    CodecKind(
        name="randomk", title="random elements, the same on all ranks", aggregation="all-reduce", bias=_when("scaled", "unbiased", "biased"),
        feedback=True, payload=_shared_bytes, contraction=_random_share, variance=_random_variance, random=True, refusal=_scaled_with_feedback,
        keeps_loss=False,
        cite=Cite(
            key="wangni2018gradient", title="Gradient Sparsification for Communication-Efficient Distributed Optimization", year=2018,
            venue="NeurIPS",
            authors="J. Wangni, J. Wang, J. Liu, T. Zhang",
        ),
        options=(DENSITY, Option(name="scaled", default=False, what="send x / density: unbiased, without error feedback"), SEED),
    ),
    CodecKind(
        name="dgc", title="deep gradient compression", aggregation="all-gather", bias=_biased, feedback=False, payload=_warm_bytes, own_memory=True,
        cite=Cite(
            key="lin2018deep", title="Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", year=2018,
            venue="ICLR",
            authors="Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally",
        ),
        options=(
            DENSITY, _momentum(0.9), Option(name="clip", default=0.0, what="limit of the group's gradient norm, all ranks together; 0: none",
            low=0.0),
            Option(name="warmup", default=0, what="steps of warm-up: densities 1/4, 1/16, 1/64, 1/256 for a quarter of them each", low=0,
            high=1 << 30),
        ),
    ),
    CodecKind(
        name="efsign", title="signs and a mean magnitude", aggregation="all-gather", bias=_biased, feedback=True, payload=_block_bytes(1, 1),
        contraction=_sign_share,
        cite=Cite(
            key="karimireddy2019error", title="Error Feedback Fixes SignSGD and other Gradient Compression Schemes", year=2019, venue="ICML",
            authors="S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi",
        ),
        options=(_block(64),),
    ),
    CodecKind(
        name="onebit", title="signs and the means of both sides", aggregation="all-gather", bias=_biased, feedback=True, payload=_block_bytes(1, 2),
        contraction=_sign_share,
        cite=Cite(
            key="seide2014onebit", title="1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech DNNs",
            year=2014, venue="Interspeech", authors="F. Seide, H. Fu, J. Droppo, G. Li, D. Yu",
        ),
        options=(_block(64),),
    ),
    CodecKind(
        name="signsgd", title="majority of signs", aggregation="all-gather", bias=_biased, feedback=False, payload=_sign_bytes, own_memory=True,
        keeps_loss=False,
        cite=Cite(
            key="bernstein2018signsgd", title="signSGD: Compressed Optimisation for Non-Convex Problems", year=2018, venue="ICML",
            authors="J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar",
        ),
    ),
    CodecKind(
        name="signum", title="majority of signs of momenta", aggregation="all-gather", bias=_biased, feedback=False, payload=_sign_bytes,
        own_memory=True,
        keeps_loss=False,
        cite=Cite(
            key="bernstein2019majority", title="signSGD with Majority Vote is Communication Efficient and Fault Tolerant", year=2019, venue="ICLR",
            authors="J. Bernstein, J. Zhao, K. Azizzadenesheli, A. Anandkumar",
        ),
        options=(_momentum(0.9),),
    ),
    CodecKind(
        name="terngrad", title="ternary levels, rounded at random", aggregation="all-gather", bias=_unbiased, feedback=False, random=True,
        keeps_loss=False,
        payload=_block_bytes(2, 1), variance=_ternary_variance,
        cite=Cite(
            key="wen2017terngrad", title="TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", year=2017,
            venue="NeurIPS",
            authors="W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li",
        ),
        options=(_block(512), SEED),
    ),
    CodecKind(
        name="qsgd", title="a few levels, rounded at random", aggregation="all-gather", bias=_unbiased, feedback=False, random=True,
        payload=_block_bytes("bits", 1), variance=_level_variance,
        cite=Cite(
            key="alistarh2017qsgd", title="QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", year=2017, venue="NeurIPS",
            authors="D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic",
        ),
        options=(Option(name="bits", default=4, what="of an element: 1, 7 or 127 levels of each sign", choices=(2, 4, 8)),
            Option(name="norm", default="max", what="what a block is scaled by", choices=("max", "2")), _block(512), SEED),
    ),
    CodecKind(
        name="powersgd", title="low-rank factors", aggregation="all-reduce", bias=_biased, feedback=True, payload=_factor_bytes,
        cite=Cite(
            key="vogels2019powersgd", title="PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", year=2019,
            venue="NeurIPS",
            authors="T. Vogels, S. P. Karimireddy, M. Jaggi",
        ),
        options=(
            Option(name="rank", default=4, what="columns of the factors", low=1, high=1024),
            Option(name="warm", default=True, what="start from the last step's factor"), SEED,
        ),
    ),
)  # fmt: skip
"""In the order in which they are listed to people."""
