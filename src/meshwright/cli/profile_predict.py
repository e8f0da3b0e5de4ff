"""`meshwright profile predict`: iteration time and memory of a layout from a layer profile, by event simulation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .frame import Result
from .profile_show import file_arguments

if TYPE_CHECKING:
    from ..profile.layer_profile import LayerProfile
    from ..profile.network import ProfiledLayout, TrainingRuntime

HELP = "iteration time and memory of a layout from a layer profile"
EPILOG = """The layout is a file (--layout; mixed devices, zones) or the same everywhere: --gpu A100 --stages 12,11,11 --dp 2 --tp 4 --microbatch 1
--global-batch 64. The runtime's fields (blocking sends, NICs, message bytes, overheads, constant memory) come from --runtime; see `profile fit`."""


def layout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", type=Path, help="a layout file instead of the options below")
    parser.add_argument("--gpu", help="kind of GPU, as the profile names it")
    parser.add_argument("--zone", default="", help="zone, as the network file names it")
    parser.add_argument("--stages", help="layers per stage, e.g. 12,11,11; or one number: that many stages, split so that the slowest is fastest")
    parser.add_argument("--dp", type=at_least_one, default=1, help="data-parallel degree (default 1)")
    parser.add_argument("--tp", type=at_least_one, default=1, help="tensor-parallel degree (default 1)")
    parser.add_argument("--microbatch", type=at_least_one, default=1, help="samples per micro-batch (default 1)")
    parser.add_argument("--global-batch", type=at_least_one, help="samples per iteration")


def runtime_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", type=Path, help="a runtime file (`profile fit` writes one)")
    parser.add_argument("--gpus-per-server", type=at_least_one, help="GPUs per server, if the runtime file does not say")
    parser.add_argument("--nics-per-server", type=int, help="NICs that a server's ranks share; 0 = one per GPU")
    parser.add_argument("--p2p", choices=("blocking", "overlapped"), help="whether pipeline sends stop the computation")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any other field of the runtime, e.g. bucket_bytes=25e6")
    parser.add_argument(
        "--interpolate", action="store_true",
        help="fill in missing entries, linear along the micro-batch size; the result marks them",
    )  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    file_arguments(parser)
    layout_arguments(parser)
    runtime_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..decide.layout.profiled.predict import predict
    from ..io.costs.profile_layers import read_profile_files

    found = read_profile_files(args.files, model=args.model, device=args.device)
    profile = found.profile(args.model if args.model in found.times else None)
    layout = layout_of(args, profile)
    runtime = runtime_of(args, {r.device for s in layout.stages for r in s.replicas})
    p = predict(profile, layout, found.network(), runtime, interpolate=args.interpolate)
    document: dict[str, Any] = {
        "schema": "meshwright.profile-prediction", "version": 1, "model": profile.model, "gpus": layout.gpus, "global_batch": layout.global_batch,
        **p.to_json(),
    }  # fmt: skip
    low, high = p.interval_s
    lines = [
        f"{profile.model} on {layout.gpus} GPUs, {len(layout.stages)} stages x {layout.data} pipelines, global batch {layout.global_batch}",
        f"iteration {p.time_s:.6g} s ({low:.6g} to {high:.6g}), {p.samples_per_s:.4g} samples/s",
        f"no schedule is below {p.bound_s:.6g} s; 1F1B without communication and update {p.closed_form_s:.6g} s",
        f"slowest stage {p.bottleneck} ({p.stage_compute_s[p.bottleneck]:.6g} s per micro-batch); busiest link {p.busiest_link[0]} "
        f"({p.busiest_link[1]:.4g} s)",
        "peak memory per stage, GiB: " + ", ".join(f"{x / 2**30:.2f}" for x in p.memory_peak_bytes) + f" (error bar {runtime.memory_error:.0%})",
    ]
    if p.interpolated:
        lines.append("interpolated, not measured: " + "; ".join(map(str, p.interpolated)))
    lines += [f"assumed: {x}" for x in p.assumptions]
    return Result(document, "\n".join(lines))


def layout_of(args: argparse.Namespace, profile: LayerProfile) -> ProfiledLayout:
    from ..errors import UsageError
    from ..profile.network import ProfiledLayout

    if args.layout is not None:
        from ..io.costs.profile_documents import read_layout

        return read_layout(args.layout)
    if args.gpu is None or args.stages is None or args.global_batch is None:
        raise UsageError("give --layout, or --gpu, --stages and --global-batch", hint=f"the profile has {', '.join(profile.devices)}")
    samples = args.dp * args.microbatch
    if samples < 1 or args.global_batch % samples:
        message = f"{args.global_batch} samples are not a whole number of micro-batches of {args.microbatch} on {args.dp} pipelines"
        raise UsageError(message, where="--global-batch", hint=f"use a multiple of {max(samples, 1)}")
    return ProfiledLayout.uniform(
        _stages(args, profile), device=args.gpu, data=args.dp, tensor=args.tp, microbatch=args.microbatch,
        microbatches=args.global_batch // samples, zone=args.zone,
    )  # fmt: skip


def _stages(args: argparse.Namespace, profile: LayerProfile) -> tuple[int, ...]:
    from ..decide.layout.profiled.search import balanced_stages
    from ..errors import UsageError
    from ..profile.layer_profile import Entry

    text: str = args.stages
    words = text.split(",")
    if not all(w.strip().isascii() and w.strip().isdigit() and len(w.strip()) < 8 for w in words):
        raise UsageError(f"{text!r} is not a list of whole numbers", where="--stages", hint="e.g. 12,11,11, or 4")
    numbers = tuple(int(w) for w in words)
    if len(numbers) > 1:
        return numbers
    entry = Entry(args.gpu, args.microbatch, args.tp)
    if args.interpolate:
        profile = profile.completed([entry])
    return balanced_stages(profile, entry, numbers[0])


def runtime_of(args: argparse.Namespace, devices: set[str]) -> TrainingRuntime:
    """The file's, with what the options say instead."""
    import msgspec

    from ..profile.network import TrainingRuntime

    runtime = TrainingRuntime()
    if args.runtime is not None:
        from ..io.costs.profile_documents import read_runtime

        runtime = read_runtime(args.runtime)
    changes: dict[str, Any] = {}
    if args.gpus_per_server is not None:
        changes["gpus_per_server"] = {**runtime.gpus_per_server, **dict.fromkeys(sorted(devices), args.gpus_per_server)}
    if args.nics_per_server is not None:
        changes["nics_per_server"] = args.nics_per_server
    if args.p2p is not None:
        changes["p2p"] = args.p2p
    return with_settings(msgspec.structs.replace(runtime, **changes), args.set)


def require_settings(words: list[str]) -> None:
    """Raises: UsageError for a name that no field has."""
    from difflib import get_close_matches

    from ..errors import UsageError
    from ..profile.network import TrainingRuntime

    known = TrainingRuntime.__struct_fields__
    for name in (word.partition("=")[0] for word in words):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"fields: {', '.join(known)}"
            raise UsageError(f"there is no field {name!r}", where="--set", hint=hint)


def with_settings(runtime: TrainingRuntime, words: list[str]) -> TrainingRuntime:
    """Fields given as FIELD=VALUE; a value is JSON, or else a text."""
    import msgspec

    from ..errors import UsageError
    from ..profile.network import TrainingRuntime

    require_settings(words)
    fields = msgspec.to_builtins(runtime)
    for word in words:
        name, _, text = word.partition("=")
        try:
            fields[name] = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            fields[name] = text
    try:
        return msgspec.convert(fields, TrainingRuntime)
    except msgspec.ValidationError as error:
        hint = f"fields: {', '.join(TrainingRuntime.__struct_fields__)}"
        raise UsageError(str(error).replace("`$.", "`"), where="--set", hint=hint) from None
