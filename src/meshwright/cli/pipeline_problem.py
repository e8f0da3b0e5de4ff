"""The arguments by which the pipeline commands are told what a step consists of."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .arguments import TIME_LIMIT, at_least_one

if TYPE_CHECKING:
    from ..decide.pipeline import PipelineProblem

__all__ = ["EACH", "numbers", "problem_arguments", "problem_of"]

EACH = "one number, or one per stage with commas"


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=at_least_one, required=True, help="stages of the model = devices of the pipeline")
    add("--microbatches", type=at_least_one, required=True, help="micro-batches per step (and replica)")
    add("--forward-s", default="1", metavar="S", help=f"time of the forward of a stage for one micro-batch, seconds: {EACH} (default 1)")
    add("--backward-s", metavar="S", help=f"time of the whole backward: {EACH} (default: its two parts together)")
    add(
        "--input-grad-s", metavar="S",
        help=f"time of the input's gradient, if the backward is split: {EACH} (default: the rest of the backward, or half)",
    )  # fmt: skip
    add(
        "--weight-grad-s", metavar="S",
        help=f"time of the weights' gradient, if the backward is split: {EACH} (default: the rest of the backward, or half)",
    )  # fmt: skip
    add(
        "--p2p-latency-s", default="0", metavar="S",
        help="latency of a message between neighbours: one number, or one per device i for i to i+1 (default 0)",
    )  # fmt: skip
    add("--p2p-rate-Bps", metavar="B/S", help="bytes/s of a message between neighbours, as above (default: messages take no time)")
    add(
        "--activation-bytes", default="1", metavar="B",
        help=f"bytes that a stage keeps for one micro-batch until its backward is done: {EACH} (default 1)",
    )  # fmt: skip
    add("--message-bytes", metavar="B", help=f"bytes that cross the border after a stage, in each direction: {EACH} (default: the activation bytes)")
    add("--weight-bytes", default="0", metavar="B", help=f"bytes of parameters, gradients and optimizer state of a stage: {EACH} (default 0)")
    add("--gradient-bytes", default="0", metavar="B", help=f"bytes that copies and replicas of a stage sum: {EACH} (default 0: no sum)")
    add(
        "--memory-cap-bytes", metavar="B",
        help="bytes of weights and activations that a device may hold: one number, or one per device (default: no limit)",
    )  # fmt: skip
    add("--speeds", default="1", metavar="X", help="speed of the devices; 1 = the times as given: one number, or one per device (default 1)")
    add("--data", type=at_least_one, default=1, help="replicas of the whole pipeline (default 1)")
    add("--pair-s", metavar="S", help=f"time of a forward and a backward of a stage that run at once: {EACH} (default: see --pair-overlap)")
    add(
        "--exchange-s", metavar="S",
        help=f"of a forward's time, and again of its backward's: all-to-all exchanges of experts, which pass beside the other half of a pair: {EACH}",
    )  # fmt: skip
    add(
        "--pair-overlap", type=float, default=0.0, metavar="SHARE",
        help="share of the shorter of the two that is hidden: 0 (default): a pair takes their sum, 1: it takes the longer",
    )  # fmt: skip
    add(
        "--host-copies", default="", metavar="RATES|measure",
        help="activations may wait in the host's memory where a schedule would not fit: bytes/s of copies there and back, e.g. 24GB,22GB; "
        "measure: those of this machine's processor (default: nothing is copied)",
    )  # fmt: skip
    add("--no-first-input-grad", action="store_true", help="the first stage of the model has no input gradient to compute")
    add("--time-limit", type=float, default=120.0, metavar="S", help=TIME_LIMIT.format(120))
    add("--seed", type=int, default=0, help="seed of the search: equal seeds give equal plans (default 0)")


def problem_of(args: argparse.Namespace) -> PipelineProblem:
    from ..decide.pipeline import PipelineProblem

    out_Bps, in_Bps = _host_copies(args.host_copies)

    def times(name: str) -> list[float] | None:
        return numbers(getattr(args, name), "--" + name.replace("_", "-"), size=False)

    def sizes(name: str) -> list[float] | None:
        return numbers(getattr(args, name), "--" + name.replace("_", "-"), size=True)

    return PipelineProblem.of(
        args.stages, args.microbatches, forward_s=times("forward_s") or 1.0, backward_s=times("backward_s"), input_grad_s=times("input_grad_s"),
        weight_grad_s=times("weight_grad_s"), activation_bytes=sizes("activation_bytes") or 1, message_bytes=sizes("message_bytes"),
        weight_bytes=sizes("weight_bytes") or 0, gradient_bytes=sizes("gradient_bytes") or 0, p2p_latency_s=times("p2p_latency_s") or 0.0,
        p2p_rate_Bps=sizes("p2p_rate_Bps"), speeds=times("speeds") or 1.0, memory_cap_bytes=sizes("memory_cap_bytes"), data=args.data,
        first_input_grad=not args.no_first_input_grad, pair_s=times("pair_s"), pair_overlap=args.pair_overlap,
        exchange_s=times("exchange_s"),
        host_out_Bps=out_Bps, host_in_Bps=in_Bps,
    )  # fmt: skip


def _host_copies(text: str) -> tuple[float, float]:
    """Rates to the host's memory and back; one number is both."""
    if text == "measure":
        from ..errors import MissingExtra

        try:
            from ..probe.steps.host_copies import measured_rates
        except ImportError:
            raise MissingExtra("torch", extra="torch", needed_for="measuring copies") from None
        rates = measured_rates()
        return rates.to_host_Bps, rates.from_host_Bps
    found = numbers(text or None, "--host-copies", size=True) or [0.0]
    return found[0], found[-1]


def numbers(text: str | None, where: str, *, size: bool) -> list[float] | None:
    """Numbers with commas between them; sizes may have a unit."""
    from ..errors import UsageError
    from ..io.limits import MAX_QUANTITY
    from ..io.quantity import parse_size_bytes

    if text is None:
        return None
    found = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            try:
                if not size:
                    raise ValueError(f"{part!r} is not a number") from None
                found.append(float(parse_size_bytes(part)))
            except ValueError:
                raise UsageError(f"{part!r} is not a number", where=where, hint=f"{EACH}, e.g. 0.02 or 0.02,0.03") from None
    if size and any(x > MAX_QUANTITY for x in found):
        raise UsageError(f"must be at most {MAX_QUANTITY:.0e} bytes, got {text[:64]}", where=where)
    return found
