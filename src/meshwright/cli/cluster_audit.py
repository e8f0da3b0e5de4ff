"""`meshwright cluster audit FOLDER`: what an engine did, beside what was decided."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "What an engine did, beside what was decided; differences are printed and end with code 4."
MAX_SHOWN = 40


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of a `cluster run`, ended or not")


def run(args: argparse.Namespace) -> Result:
    import statistics

    from ..errors import CheckFailed
    from ..run.engines.audited import audit

    found = audit(args.folder)
    facts, findings = found.verdict.facts, [f.message for f in found.verdict.findings]
    lines = [
        f"{found.engine}: {facts['jobs']} jobs in {facts['attempts']} attempts, {facts['differences']} differences; {len(found.failed)} failed, "
        f"{len(found.unfinished)} not ended",
        *findings[:MAX_SHOWN], *([f"and {len(findings) - MAX_SHOWN} more"] if len(findings) > MAX_SHOWN else []),
    ]  # fmt: skip
    if found.waits_s:
        lines.append(f"release to start: {statistics.median(found.waits_s):.2f} s median, {max(found.waits_s):.2f} s worst")
    if found.engine != "local":
        lines.append(f"{found.engine} picks the GPUs within a server: how many is compared, not which")
    lines += [f"note: {x}" for x in found.notes if x != "closed"]
    document = {
        "schema": "meshwright.cluster-audit", "version": 1, "engine": found.engine, "jobs": facts["jobs"], "attempts": facts["attempts"],
        "differences": findings, "kinds": facts["kinds"], "out_of_order": facts["out_of_order"], "failed": list(found.failed),
        "unfinished": list(found.unfinished), "waits_s": [round(w, 4) for w in found.waits_s], "notes": [x for x in found.notes if x != "closed"],
    }  # fmt: skip
    if findings:
        raise CheckFailed("\n".join(lines), where=str(args.folder), hint="the decisions stand in journal.jsonl, what servers saw in jobs/",
                          data=document)  # fmt: skip
    return Result(document, "\n".join(lines))
