"""`meshwright profile show`: what layer-profile files hold, what they lack, and what in them looks wrong."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .frame import Result

if TYPE_CHECKING:
    from ..profile.layer_profile import LayerProfile

HELP = "what a layer profile holds, lacks, and what in it looks wrong"
EPILOG = """Files: Metis (DeviceType.<device>_tp<n>_bs<n>.json), Sailor (times, memory table), network coefficients; told by their content."""


def file_arguments(parser: argparse.ArgumentParser) -> None:
    """What all `profile` commands read."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="layer times, memory table, network coefficients; in any order")
    parser.add_argument("--model", help="which model of the files; also the name of a model that a file does not name")
    parser.add_argument("--device", help="GPU of files that do not name theirs")


def arguments(parser: argparse.ArgumentParser) -> None:
    file_arguments(parser)
    parser.add_argument(
        "--peak", action="append", default=[], metavar="DEVICE=FLOPS",
        help="peak FLOP/s of a device, to find times below the compute bound",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=0, help="tokens per sample, for the same check")


def run(args: argparse.Namespace) -> Result:
    from ..io.costs.profile_layers import read_profile_files

    found = read_profile_files(args.files, model=args.model, device=args.device)
    profile = found.profile(args.model if args.model in found.times else None)
    findings = profile.findings(peak_flops=_peaks(args.peak), values_per_sample=args.tokens)
    gaps = profile.gaps()
    document: dict[str, Any] = {
        "schema": "meshwright.profile", "version": 1, "model": profile.model, "layers": profile.layers, "files": found.files,
        "devices": list(profile.devices), "microbatches": list(profile.microbatches), "tensors": list(profile.tensors),
        "entries": [list(e) for e in profile.times], "missing": [list(e) for e in gaps], "sizes_for_tensor": sorted(profile.sizes),
        "network": {"inside": [list(k) for k in found.inside], "between": [list(k) for k in found.between]},
        "split_assumed": profile.split_assumed, "findings": [f.to_json() for f in findings],
    }  # fmt: skip
    lines = [f"{profile.model}: {profile.layers} layers, {len(profile.times)} entries, {len(gaps)} of the grid missing"]
    lines += _grid(profile)
    lines.append(f"sizes: {'tensor degrees ' + ', '.join(map(str, sorted(profile.sizes))) if profile.sizes else 'none (no memory table)'}")
    lines.append(f"network: {len(found.inside)} curves inside servers, {len(found.between)} between")
    if profile.split_assumed:
        lines.append(f"forward and backward were measured together; forward is taken as {profile.split_assumed:.0%}")
    lines += [f"{f.kind}: {'; '.join(map(str, f.entries[:4]))}{' ...' if len(f.entries) > 4 else ''}: {f.detail}" for f in findings]
    return Result(document, "\n".join(lines))


def _grid(profile: LayerProfile) -> list[str]:
    """Milliseconds of forward and backward of all layers, per device; `-` where nothing was measured."""
    from ..profile.layer_profile import Entry

    lines = []
    for device in profile.devices:
        lines.append(f"{device}: forward + backward of all layers, ms")
        lines.append("  micro-batch " + "".join(f"{f'tp {t}':>12}" for t in profile.tensors))
        for m in profile.microbatches:
            cells = []
            for t in profile.tensors:
                entry = Entry(device, m, t)
                span = profile.span(entry, 0, profile.layers) if entry in profile.times else None
                cells.append(f"{(span.forward_s + span.backward_s) * 1e3:12.3f}" if span else f"{'-':>12}")
            lines.append(f"  {m:>11} " + "".join(cells))
    return lines


def _peaks(words: list[str]) -> dict[str, float]:
    from ..errors import UsageError

    found = {}
    for word in words:
        device, _, value = word.partition("=")
        try:
            found[device] = float(value)
        except ValueError:
            found[device] = 0.0
        if not (device and 0 < found[device] < 1e21):
            raise UsageError(f"{word!r} is not DEVICE=FLOPS", where="--peak", hint="e.g. --peak A100=312e12")
    return found
