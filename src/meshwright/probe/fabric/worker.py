"""A job that only probes: `torchrun --nnodes ... -m meshwright.probe.fabric.worker -o cluster.toml`. Rank 0 prints and writes."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import MeshwrightError
from .job import probe_group
from .options import check_arguments, outcome, probe_arguments

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m meshwright.probe.fabric.worker", description="Probe the fabric between the ranks of a job.")
    probe_arguments(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        check_arguments(args)
        dist.init_process_group("gloo", timeout=timedelta(seconds=3 * args.budget + 120))
        try:
            probed = probe_group(
                name=args.name, budget_s=args.budget, tolerance=args.tolerance, window_s=args.window, seed=args.seed
            )  # fmt: skip
            if probed.measured is not None and probed.found is not None:
                _, text = outcome(args, probed.measured, probed.found)
                sys.stdout.write(text + "\n")
        finally:
            dist.destroy_process_group()
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
