"""`meshwright profile fit`: overheads and constant memory of a runtime, from measured runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result
from .profile_predict import runtime_arguments
from .profile_show import file_arguments

HELP = "fit a runtime's overheads and constant memory to measured runs"


def arguments(parser: argparse.ArgumentParser) -> None:
    file_arguments(parser)
    parser.add_argument("--measured", type=Path, required=True, help="a file of measured runs: layouts with seconds and, if known, peak bytes")
    runtime_arguments(parser)
    parser.add_argument("--out", "-o", type=Path, default=Path("runtime.json"), help="where to write the runtime (default runtime.json)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.layout.profiled.fit import OVERHEADS, fit_runtime
    from ..io.costs.profile_documents import read_measured_runs, runtime_document, write_runtime
    from ..io.costs.profile_layers import read_profile_files
    from .profile_predict import runtime_of

    found = read_profile_files(args.files, model=args.model, device=args.device)
    profile = found.profile(args.model if args.model in found.times else None)
    runs = read_measured_runs(args.measured)
    base = runtime_of(args, {r.device for run in runs for s in run.layout.stages for r in s.replicas})
    fitted = fit_runtime(profile, found.network(), runs, base, interpolate=args.interpolate)
    write_runtime(args.out, fitted.runtime)
    document = {
        "schema": "meshwright.profile-fit", "version": 1, "file": str(args.out), "runtime": runtime_document(fitted.runtime)["runtime"],
        "determined": list(fitted.determined), "unfitted_error": fitted.unfitted_error, "validated_error": fitted.validated_error,
        "used": list(fitted.used), "errors": list(fitted.errors), "memory_errors": list(fitted.memory_errors),
        "left_out": [{"kind": f.kind, "runs": list(f.runs), "detail": f.detail} for f in fitted.findings],
    }  # fmt: skip
    lines = [f"{args.out}: fitted to {len(fitted.used)} of {len(runs)} runs, largest error {max(fitted.errors):.2%}"]
    nothing = "nothing: no field predicts a run that was left out better than the runtime as given"
    lines.append(f"determined: {', '.join(fitted.determined) or nothing}")
    bar, found_error, given_error = fitted.runtime.compute_error, fitted.validated_error, fitted.unfitted_error
    lines.append(f"mean error on runs left out {found_error:.2%}, as given {given_error:.2%}; error bar {bar:.0%}")
    lines += [f"  {name} {getattr(fitted.runtime, name):.6g}" for name in OVERHEADS]
    lines += [f"  constant memory of {d}: {b / 2**30:.2f} GiB" for d, b in sorted(fitted.runtime.constant_memory_bytes.items())]
    lines += [f"left out, {f.kind}: runs {', '.join(map(str, f.runs))}: {f.detail}" for f in fitted.findings]
    return Result(document, "\n".join(lines))
