"""A rank that is lost between selecting and sending: a typed error on the others within the deadline, and their residuals as they were."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import RankPool
from virtual_reduce import decaying

from meshwright.errors import GroupFailed, MeshwrightError
from meshwright.run.group.walk import Wait
from meshwright.run.sparse import SparseAllReduce, transport
from meshwright.run.sparse.transport import TorchRunner

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]
LOST, DEADLINE_S, PATIENCE_S = 1, 3.0, 60.0


def lose(rank: int, group: Any, how: str, backend: str, store: str) -> dict[str, Any]:
    """What a rank says of a step in which rank LOST gets a signal between selecting and sending."""
    import torch.distributed as dist

    if backend == "meshwright":
        import meshwright.torch

        del meshwright
        dist.init_process_group(backend, store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=PATIENCE_S))
        group = dist.group.WORLD
    reducer = SparseAllReduce(group, 4000, k=40, timeout_s=PATIENCE_S)  # the first steps compile their kernels, at each rank when it can
    source = decaying(rank, 4000)
    for _ in range(2):
        reducer.step(next(source))
    reducer.runner.timeout_s = DEADLINE_S
    before = reducer.residual.copy()
    if rank == LOST:
        send = reducer.runner.send

        def signalled(data: Any, peer: int, tag: int, at: Any) -> Any:
            if at.phase == "regions":
                os.kill(os.getpid(), getattr(signal, how))
            return send(data, peer, tag, at)

        reducer.runner.send = signalled  # type: ignore[method-assign]
    found = []
    for _ in range(2):
        try:
            reducer.step(next(source))
        except MeshwrightError as error:
            found.append(error)
    kept = bool(np.array_equal(before, reducer.residual))
    return {"codes": [e.code for e in found], "kept": kept, "data": found[0].data}


@pytest.mark.parametrize(("how", "backend"), [("SIGKILL", "gloo"), ("SIGSTOP", "gloo"), ("SIGKILL", "meshwright")])
def test_a_rank_lost_between_selecting_and_sending_is_an_error_on_the_others(tmp_path: Path, how: str, backend: str) -> None:
    pool = RankPool(3)
    try:
        for pipe in pool.pipes:
            pipe.send((lose, 3, str(tmp_path / "gloo"), 60.0, (how, backend, str(tmp_path / "store"))))
        assert all(pool.pipes[r].poll(90) for r in (0, 2))
        said = [pool.pipes[r].recv() for r in (0, 2)]
    finally:
        pool.processes[LOST].kill()
        pool.close()
    for ok, facts in said:
        assert ok, facts
        assert facts["kept"]
        assert len(facts["codes"]) == 2 and len(set(facts["codes"])) == 1
        if backend == "meshwright":
            assert facts["codes"][0] == "rank-died" and facts["data"]["rank"] == LOST
        else:
            assert facts["codes"][0] in ("group-failed", "run-timeout")
    if how == "SIGSTOP":
        assert "run-timeout" in {facts["codes"][0] for _, facts in said}


def test_a_group_that_has_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def wait(self, limit: timedelta) -> None:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(transport, "end_waits", lambda *_: None)
    runner = TorchRunner(SimpleNamespace(rank=lambda: 0, size=lambda: 2), 1.0)
    waits = iter([Wait(step=0, peer=1, work=Lost(), receives=True), Wait(step=1, peer=1, work=Lost(), receives=True)])
    with pytest.raises(GroupFailed, match="a connection was closed") as first:
        runner.run(waits, 3)  # type: ignore[arg-type]
    with pytest.raises(GroupFailed) as second:
        runner.run(waits, 4)  # type: ignore[arg-type]
    assert second.value is first.value and len(list(waits)) == 1
