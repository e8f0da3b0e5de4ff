"""`meshwright profile plan`: the layouts of some GPUs, ranked by simulation from a layer profile."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .frame import Result
from .profile_predict import runtime_arguments, runtime_of
from .profile_show import file_arguments

if TYPE_CHECKING:
    from ..decide.layout.profiled.search import JudgedLayout

HELP = "rank the layouts of some GPUs by simulation from a layer profile"


def arguments(parser: argparse.ArgumentParser) -> None:
    file_arguments(parser)
    parser.add_argument("--gpu", required=True, help="kind of GPU, as the profile names it")
    parser.add_argument("--zone", default="", help="zone, as the network file names it")
    parser.add_argument("--gpus", type=at_least_one, required=True, help="number of GPUs")
    parser.add_argument("--global-batch", type=at_least_one, required=True, help="samples per iteration")
    parser.add_argument("--memory", help="memory of a GPU, e.g. 40GiB; layouts that need more are refused")
    parser.add_argument("--limit", type=int, default=50, help="most layouts to simulate (default 50)")
    parser.add_argument("--show", type=int, default=10, help="layouts to print (default 10)")
    runtime_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..decide.layout.profiled.search import ProfiledGrid, ProfileProblem
    from ..errors import UsageError
    from ..io.costs.profile_layers import read_profile_files
    from .collective_export import size_bytes

    if min(args.gpus, args.global_batch, args.limit, args.show) < 1:
        raise UsageError("--gpus, --global-batch, --limit and --show must be >= 1")
    found = read_profile_files(args.files, model=args.model, device=args.device)
    profile = found.profile(args.model if args.model in found.times else None)
    problem = ProfileProblem(
        profile=profile, network=found.network(), runtime=runtime_of(args, {args.gpu}), device=args.gpu, gpus=args.gpus,
        global_batch=args.global_batch, zone=args.zone, memory_bytes=size_bytes(args.memory, "--memory") if args.memory else 0,
    )  # fmt: skip
    judged = ProfiledGrid(limit=args.limit).plan(problem)
    document: dict[str, Any] = {
        "schema": "meshwright.profile-plan", "version": 1, "model": profile.model, "gpus": args.gpus, "global_batch": args.global_batch,
        "layouts": [_row(j) for j in judged],
    }  # fmt: skip
    lines = [f"{profile.model} on {args.gpus} {args.gpu}, global batch {args.global_batch}: {len(judged)} layouts"]
    lines += [_line(j) for j in judged[: args.show]]
    if len(judged) > args.show:
        lines.append(f"... {len(judged) - args.show} more (--show)")
    return Result(document, "\n".join(lines))


def _row(j: JudgedLayout) -> dict[str, Any]:
    import msgspec

    row: dict[str, Any] = {"layout": msgspec.to_builtins(j.layout), "why": j.why}
    return row | ({"prediction": j.prediction.to_json()} if j.prediction is not None else {})


def _line(j: JudgedLayout) -> str:
    layers = ",".join(str(s.layers) for s in j.layout.stages)
    if j.prediction is None:
        return f"  {j.layout.name:<22} layers {layers}: {j.why}"
    memory = max(j.prediction.memory_peak_bytes) / 2**30
    return f"  {j.layout.name:<22} {j.prediction.time_s:.6g} s, {memory:.2f} GiB, layers {layers}"
