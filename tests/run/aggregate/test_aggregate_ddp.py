"""Training through a switch: the weights of DDP over gloo within the bound of the sums, and the same bits on both ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from aggregate_rig import switch

from meshwright.errors import UsageError
from meshwright.run.aggregate.hook import average_bucket
from ports import free_port


@pytest.mark.real
def test_two_ranks_train_as_over_gloo() -> None:
    script = str(Path(__file__).with_name("ddp_worker.py"))
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with switch() as up:
        words = [sys.executable, script, str(up.address)]
        ranks = [subprocess.Popen(words, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        said = [process.communicate(timeout=100)[0].split() for process in ranks]
        contributions = up.aggregator.status().counters["contributions"]
    assert [process.returncode for process in ranks] == [0, 0]
    assert said[0][0] == said[1][0] and said[0][2] == said[1][2] == "None"
    assert float(said[0][1]) < 1e-6 and contributions > 500


def test_gradients_of_other_types_are_refused() -> None:
    class Bucket:
        def buffer(self) -> Any:
            return torch.zeros(3, dtype=torch.bfloat16)

    with pytest.raises(UsageError, match="bfloat16"):
        average_bucket(None, Bucket())  # type: ignore[arg-type]
