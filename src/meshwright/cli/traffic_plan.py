"""`meshwright traffic plan`: which gradients are sent together and with which codec, as a file that the DDP hook reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import TIME_LIMIT, at_least_one
from .collective_bound import seconds
from .frame import Result

if TYPE_CHECKING:
    from ..traffic import TrafficProfile

CODECS = "fp16,topk:density=0.01,powersgd:rank=1,powersgd:rank=4"  # that are timed unless others are named
HELP = "which gradients to send together, and how small, beside the best step without compression"


def traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, on which fabric, with which codecs to choose from."""
    parser.add_argument("--model", help="FILE.py:function or module:function that returns (module, example inputs): its backward is timed")
    parser.add_argument("--tensors", type=Path, help="a CSV file with name, shape, ready_s instead of --model")
    parser.add_argument("--profile", type=Path, help="a whole profile (JSON), with the codecs' costs in it, instead of --model and --fabric")
    parser.add_argument("--loss", default="cross-entropy", help="cross-entropy (default), mse, output, or module:function")
    parser.add_argument("--batch", type=at_least_one, help="rows of one rank's batch (default: as the example inputs)")
    parser.add_argument("--fabric", help="FILE.toml or PRESET:n, one rank per device")
    parser.add_argument("--devices", help="use only these devices, e.g. 0-3,8")
    parser.add_argument(
        "--codecs",
        help=f"codecs to choose from, separated by semicolons or commas; `none` is always included (default {CODECS}; all of a --profile)",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=seconds, default=float("inf"), metavar="S", help=TIME_LIMIT.format("none"))
    parser.add_argument("--interference", type=float, default=0.0, help="how much slower compute runs during messages, in percent (default 0)")


def profile_given(args: argparse.Namespace) -> TrafficProfile:
    """Of the model, tensors or profile that the arguments name; codecs are timed here. Raises: UsageError, what the readers raise."""
    from ..errors import UsageError
    from ..io.plan.traffic import read_tensors, read_traffic_profile

    if sum(x is not None for x in (args.model, args.tensors, args.profile)) != 1:
        raise UsageError("give one of --model, --tensors and --profile", hint="e.g. --model examples/gpt.py:small --fabric laptop:4")
    if args.profile is not None:
        for option, value in (("--fabric", args.fabric), ("--devices", args.devices)):
            if value is not None:
                raise UsageError("belongs to --model and --tensors", where=option, hint="a profile says for which ranks and fabric it was made")
        profile = read_traffic_profile(args.profile)
        return profile if args.codecs is None else with_codecs(profile, codec_names(args.codecs))
    if args.fabric is None:
        raise UsageError("is missing", where="--fabric", hint="e.g. --fabric laptop:4; see `meshwright fabric list`")
    if not 0 <= args.interference <= 10000:
        raise UsageError(f"must be 0 to 10000 percent, got {args.interference:g}", where="--interference")
    from ..drive.plans import read_fabric
    from ..probe.traffic.profile import model_tensors, profile_tensors

    fabric = read_fabric(args.fabric, args.devices)
    tensors, backward_ns = (read_tensors(args.tensors), 0) if args.tensors is not None else model_tensors(args.model, args.loss, args.batch)
    return profile_tensors(tensors, backward_ns, fabric, codec_names(args.codecs or CODECS), interference_permille=round(args.interference * 10))


def with_codecs(profile: TrafficProfile, names: list[str]) -> TrafficProfile:
    """Of the profile's codecs those named, and `none`. Raises: UsageError for one that it has no costs of."""
    import msgspec

    from ..codec.codec import parse_codec
    from ..drive.traffic import UNCOMPRESSED

    wanted = {profile.position(parse_codec(name).text) for name in names}
    return msgspec.structs.replace(profile, codecs=tuple(c for i, c in enumerate(profile.codecs) if i in wanted or c.codec == UNCOMPRESSED))


def codec_names(text: str) -> list[str]:
    """`topk:density=0.01,rank=2,fp16` by codecs: a part with `=` belongs to the codec before it."""
    found: list[str] = []
    for part in filter(None, (p.strip() for p in text.replace(";", ",;").split(","))):
        name = part.lstrip(";").strip()
        if "=" in name and ":" not in name and found and not part.startswith(";"):
            found[-1] += f",{name}"
        elif name:
            found.append(name)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    traffic_arguments(parser)
    parser.add_argument("--strategy", default="cupcake", help="cupcake (default), or another of `strategies list traffic`")
    parser.add_argument("--only", help="use this codec for every group, whatever it costs")
    parser.add_argument("--out", type=Path, help="write the plan here, for `meshwright.torch.planned_traffic`")


def run(args: argparse.Namespace) -> Result:
    from ..drive.traffic import codecs_alone, cut_of_traffic, plan_traffic
    from ..io.plan.traffic import write_traffic_plan
    from ..report.traffic_text import candidates_text, plan_summary, plan_text, row_document
    from .arguments import require_directory

    if args.out:
        require_directory(args.out)
    profile = profile_given(args)
    plan = plan_traffic(profile, strategy=args.strategy, codecs=[args.only] if args.only else None, time_limit_s=args.time_limit)
    rows = [] if args.only else codecs_alone(profile)
    text = plan_text(plan) + (f"\n{candidates_text(rows)}" if rows else "")
    if args.out:
        write_traffic_plan(args.out, plan)
        text += f"\nwrote {args.out}"
    document = {"schema": "meshwright.traffic.plan", "version": 1, **plan_summary(plan), "candidates": [row_document(r) for r in rows]}
    return Result(document, text, cut=cut_of_traffic(plan))
