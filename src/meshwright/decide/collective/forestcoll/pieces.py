"""How many pieces follow each other down a forest's trees, how many of them a channel holds, and how many long ways are ahead of short ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....cost import Transport
from ....errors import UsageError
from ..problem import CollectiveProblem
from ..trees.parts import Part, turns_of
from .arrival import HopTimes, arrival_s
from .forest import Forest
from .prepared import Prepared, bandwidth_s
from .windows import WINDOW_SERVERS

__all__ = ["depth_of", "evenly_cut", "large_parts", "lead_of", "require_numbers", "round_number", "rounded", "wanted_pieces"]

# Messages in flight on a channel of many pieces: the first is taken that lets a hop's latency overlap with the pieces that follow.
DEPTHS = (4, 8, 16, 32, 64)
MIN_PIECE_BYTES = 8192  # pieces are not made smaller: that gains nothing ...
MIN_PIECE_BYTES_OF_ONE_ROOT = 4096  # ... but of folded trees of one root, as all wait for a first piece: 0.976 of the bound on 128 boxes, not 0.969,
MIN_SCARCE_PIECE_BYTES = 1024  # and while they are few: 0.968 of the bound on 1,024 boxes with 64 pieces, 0.941 with 32
MIN_PIECES_OF_ONE_ROOT = 128
MAX_POWER_OF_TWO_PIECES = 32  # up to so many pieces are rounded to powers of two, more to three leading binary digits
MAX_LEAD_PIECES = 16  # pieces that the longest way may be ahead: as many are held at once, and stored as one iteration
MAX_ITERATION_STEPS = 400_000  # stored steps of such an iteration


def require_numbers(counts: Mapping[str, int | None], pieces: int | None, lead: int | None, depth: int | None) -> None:
    """Raises: UsageError where options that count something are below 1, or these three do not fit together."""
    for option, value in {**counts, "pieces": pieces, "lead": lead}.items():
        if value is not None and value < 1:
            raise UsageError(f"{option} must be >= 1, got {value}", where="forestcoll")
    if pieces and pieces % (lead or 1):
        raise UsageError(f"a lead of {lead} does not divide {pieces} pieces", where="forestcoll")
    if depth and lead and depth < lead:
        raise UsageError(f"a lead of {lead} needs channels of as many messages, not {depth}", where="forestcoll")


def wanted_pieces(problem: CollectiveProblem, forests: list[Forest], parts: int, *, most: int, depth: int | None) -> int:
    """Square-root rule: filling a pipeline of h hops costs h - 1 pieces' time, every further piece costs one message overhead.

    All trees share the links all the time, so a piece takes 1/pieces of the whole time. The pieces that a channel holds (`depth`, or the most of
    DEPTHS) must outlast the latency of a hop, and a piece smaller than MIN_PIECE_BYTES gains nothing.
    """
    hops = sum(f.height for f in forests)
    if hops <= 1:
        return 1
    time_s = bandwidth_s(problem, forests)
    transport = problem.transport or Transport()
    overhead_s = 2 * transport.per_message_s + 2 * transport.per_step_s
    part = problem.size_bytes // parts
    of_one_root = max(part // MIN_PIECE_BYTES_OF_ONE_ROOT, min(MIN_PIECES_OF_ONE_ROOT, part // MIN_SCARCE_PIECE_BYTES))
    wanted = min(most, of_one_root if forests[0].method == "one root" else part // MIN_PIECE_BYTES)
    # p pieces: (hops - 1) · time / p to fill and p · overhead for messages; the sum is least where both are equal.
    if overhead_s > 0:
        wanted = min(wanted, int(((hops - 1) * time_s / overhead_s) ** 0.5))
    latency_s = _latency_s(problem)
    # A channel's next message waits for a credit, one latency there and one back: depth - 1/2 pieces must take that long. See `depth_of`.
    if latency_s > 0:
        wanted = min(wanted, int(((depth or DEPTHS[-1]) - 0.5) / 2 * time_s / latency_s))
    return round_number(wanted)


def evenly_cut(problem: CollectiveProblem, ready: Prepared, most: int, window: int) -> int:
    """With limbs, of half of `most` to all pieces those with least to send and to wait for: chunks are small, and much is padding. Else `most`."""
    if not ready.limbs:
        return most
    elements, units = -(-problem.size_bytes // problem.element_bytes), ready.units * ready.ranks
    hops, turns = ready.forests[0].height, turns_of(ready.servers, window)

    def sent(pieces: int) -> float:
        return -(-elements // (units * pieces)) * units * pieces * (1 + (hops - 1) / (pieces * turns))

    return min(range(max(1, most // 2), most + 1), key=lambda pieces: (sent(pieces), -pieces))


def depth_of(problem: CollectiveProblem, forests: list[Forest], pieces: int) -> int:
    """Messages in flight that outlast the latency of a hop, there and back."""
    there_and_back = 2 * _latency_s(problem) * pieces / bandwidth_s(problem, forests)
    return next((depth for depth in DEPTHS if depth - 0.5 >= there_and_back), DEPTHS[-1])


def lead_of(problem: CollectiveProblem, forests: list[Forest], pieces: int, steps: int) -> int:
    """Of so many pieces of a reduction, those that its links carry while the latest piece travels, hop by hop, there and back: a power of two.

    It divides `pieces`, is at most MAX_LEAD_PIECES, and with `steps` per piece an iteration has at most MAX_ITERATION_STEPS; 1 = none.
    """
    late_s = arrival_s(forests[0], HopTimes(problem.fabric, forests[0].graph, turned=True))
    wanted, lead = 2 * (late_s * pieces / bandwidth_s(problem, forests) + forests[0].height), 1
    while lead < wanted and 2 * lead <= min(MAX_ITERATION_STEPS // steps, MAX_LEAD_PIECES) and pieces % (2 * lead) == 0:
        lead *= 2
    return lead


def _latency_s(problem: CollectiveProblem) -> float:
    return max(x.latency_s + x.library_latency_s for x in problem.fabric.links)


def large_parts(parts: Sequence[Part]) -> int:
    """Parts that say how small pieces are: those of servers that differ are a small share of a shard each."""
    return sum(bool(part.limbs) for part in parts) or len(parts)


def rounded(ready: Prepared, pieces: int) -> int:
    """`round_number`, but where servers that differ leave few pieces: of those, all count, and `evenly_cut` chooses."""
    return pieces if ready.limbs and ready.servers > WINDOW_SERVERS else round_number(pieces)


def round_number(value: int) -> int:
    """The largest that is no more and has three leading binary digits at most, at least 1; a power of two if small."""
    value = max(value, 1)
    unit = 1 << value.bit_length() - (3 if value > MAX_POWER_OF_TWO_PIECES else 1)
    return value // unit * unit
