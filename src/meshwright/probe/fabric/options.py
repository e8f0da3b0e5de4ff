"""Options and results that `meshwright fabric probe` and a probe within a job have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .infer import Inferred
    from .measurements import Measurements

__all__ = ["check_arguments", "outcome", "probe_arguments"]


def probe_arguments(parser: argparse.ArgumentParser) -> None:
    """What is common to all sources of measurements."""
    parser.add_argument("-o", "--out", metavar="FILE", help="write the fabric to this FILE.toml or FILE.json")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the measurements to this file (JSON; .json.gz is compressed)")
    parser.add_argument("--save-matrix", type=Path, metavar="FILE", help="write the costs to this file, for `collective order --matrix`")
    parser.add_argument("--name", default="probed", help="the fabric's name (default probed)")
    parser.add_argument("--budget", type=float, default=90.0, metavar="S", help="seconds to measure in (default 90)")
    parser.add_argument("--tolerance", type=float, default=0.1, metavar="X", help="largest relative error of a trial (default 0.1)")
    parser.add_argument("--unexplained", type=float, default=0.05, metavar="X", help="share of trials that may exceed it; 1 = all (default 0.05)")
    parser.add_argument("--window", type=float, default=0.3, metavar="S", help="seconds in which a transfer is counted (default 0.3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of trials (default 0)")


def check_arguments(args: argparse.Namespace) -> None:
    """Before anything is measured. Raises: UsageError."""
    from ...errors import UsageError

    if args.out is not None and not args.out.lower().endswith((".toml", ".json")):
        raise UsageError(f"--out must end in .toml or .json, got {args.out!r}", hint="name a file with one of these endings")
    limits = (("seed", -1, 2**63), ("tolerance", 0.0, 1.0), ("unexplained", -1e-9, 1.0), ("window", 0.02, 20.0), ("budget", 0.0, 86400.0))
    for name, low, high in limits:
        if not low < getattr(args, name) <= high:
            raise UsageError(f"must be above {max(low, 0):g} and at most {high:g}, got {getattr(args, name):g}", where=f"--{name}")


def outcome(args: argparse.Namespace, measured: Measurements, found: Inferred) -> tuple[dict[str, Any], str]:
    """Save what was measured; write the fabric if it explains it; (document, text). Raises: CheckFailed."""
    import json
    from dataclasses import replace

    from ...fabric.fabric import Provenance
    from ...io.atomic import write_text
    from ...io.fabric.toml import fabric_document
    from .costs import cost_matrix
    from .infer import require_explained
    from .measurements import write_measurements
    from .report import probe_document, probe_text, probed_toml

    written = []
    if args.save is not None:  # also what nothing explains: it can be looked at, and inferred from again
        write_measurements(args.save, measured)
        written.append(str(args.save))
    require_explained(found, measured.names, args.tolerance, args.unexplained)
    bad = found.unexplained(args.tolerance)
    if bad:
        source = f"{len(bad)} of {len(found.checks)} trials, by up to {found.worst.error:.0%}"
        found = replace(found, fabric=replace(found.fabric, provenance=(*found.fabric.provenance, Provenance(what="unexplained", source=source))))
    if args.out is not None:
        toml = args.out.lower().endswith(".toml")
        text = probed_toml(measured, found, args.tolerance) if toml else json.dumps(fabric_document(found.fabric), ensure_ascii=False) + "\n"
        write_text(args.out, text)
        written.append(args.out)
    if args.save_matrix is not None:
        write_text(args.save_matrix, json.dumps(cost_matrix(measured, found).to_document()) + "\n")
        written.append(str(args.save_matrix))
    document = probe_document(measured, found, args.tolerance)
    return document, "\n".join([probe_text(measured, found, args.tolerance), *(f"written: {x}" for x in written)])
