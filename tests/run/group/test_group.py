"""The backend in real processes: all operations, types and operators against gloo; DDP, FSDP2 and tensor parallelism; groups that end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.errors import UsageError
from meshwright.run.group.settings import settings_from
from ports import free_port

HERE = Path(__file__).parent
pytestmark = [pytest.mark.timeout(280)]


def run_ranks(n: int, argv: list[str], limit_s: float = 240, **more: str) -> list[tuple[int, str]]:
    """(exit code, what it said) of every rank of a small job on loopback."""
    common = {**os.environ, "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}
    ranks = [
        subprocess.Popen([sys.executable, *argv], env={**common, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(n)
    ]
    try:
        return [(rank.wait(limit_s), rank.stdout.read() if rank.stdout else "") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout:
                rank.stdout.close()


@pytest.fixture(scope="module")
def kept_plans(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of plans for the jobs of this file that ask the same."""
    return str(tmp_path_factory.mktemp("plans"))


@pytest.mark.real
@pytest.mark.parametrize("way", ["thread", "waves"])
def test_everything_that_torch_asks_for(way: str, kept_plans: str) -> None:
    """By the group's thread, and as on accelerators: waves of grouped messages, enqueued by the caller."""
    done = run_ranks(3, [str(HERE / "group_rank.py"), "laptop:3", str(free_port()), way], MESHWRIGHT_CACHE=kept_plans)
    assert [code for code, _ in done] == [0, 0, 0], "\n".join(text[-3000:] for code, text in done if code)
    assert '{"ok": true}' in done[0][1]


SCRIPT = """
    import torch, torch.distributed as dist, meshwright.torch
    from meshwright.errors import MeshwrightError
    torch.set_num_threads(1)
    try:
        dist.init_process_group("meshwright")
        x = torch.ones(20000)
        for _ in range(30):
            dist.all_reduce(x)
            assert (x == dist.get_world_size()).all(); x.fill_(1)
        print("report", meshwright.torch.report())
        dist.destroy_process_group()
    except MeshwrightError as error:
        print("error", error.code, error)
"""


def script(folder: Path) -> str:
    path = folder / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


@pytest.mark.real
def test_trials_end_with_one_choice_everywhere(tmp_path: Path) -> None:
    done = run_ranks(2, [script(tmp_path)], MESHWRIGHT_FABRIC="laptop:2", MESHWRIGHT_TUNE="2", MESHWRIGHT_STRATEGIES="ring,forestcoll,direct")
    assert [code for code, _ in done] == [0, 0], done
    assert all("report" in text for _, text in done), done
    said = [next(line for line in text.splitlines() if line.startswith("report")) for _, text in done]
    assert said[0] == said[1] and "on trial" in said[0]


WITHOUT_PLANS = """
    import torch, torch.distributed as dist, meshwright.torch
    from torch.nn.parallel import DistributedDataParallel
    torch.set_num_threads(1)
    dist.init_process_group("meshwright")
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(5)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert (x == n * n).all()
    out = torch.zeros(2 * n)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out.tolist() == [float(r) for r in range(n) for _ in range(2)]
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.arange(float(n)))
    assert part.item() == n * rank
    rows = [torch.zeros(1) for _ in range(n)]
    dist.all_gather(rows, torch.full((1,), float(rank)))
    assert torch.cat(rows).tolist() == list(range(n))
    group = dist.group.WORLD
    group.allreduce([x]).wait()
    assert (x == n ** 3).all()
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((4, 3), rank + 1.0)).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.full((2, 3), 4 * (n + 1) / 2))
    found = meshwright.torch.report()
    assert not found["planned"] and set(found["builtin"]["all-reduce"]) == {"no plans and no fabric"}, found
    print("counts", {op: sum(why.values()) for op, why in found["builtin"].items()})
    dist.destroy_process_group()
    try:
        group.allreduce([x])
    except Exception as error:
        print("afterwards", type(error).__name__)
"""


@pytest.mark.real
def test_without_plans_everything_is_handed_on_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(WITHOUT_PLANS))
    done = run_ranks(2, [str(path)])
    assert [code for code, _ in done] == [0, 0], done
    for _, text in done:
        assert "'all-reduce': 4" in text and "'all-gather': 3" in text and "'reduce-scatter': 1" in text, text
        assert "afterwards GroupFailed" in text


@pytest.mark.real
def test_plans_for_another_world_are_refused(tmp_path: Path) -> None:
    done = run_ranks(3, [script(tmp_path)], MESHWRIGHT_FABRIC="laptop:2")
    assert all("error plan-mismatch" in text for _, text in done), done


@pytest.mark.real
def test_a_plan_file_for_another_job_is_refused_by_every_rank(tmp_path: Path) -> None:
    made = tmp_path / "plan.json"
    assert main(["collective", "plan", "all-reduce", "--fabric", "star:2", "--size", "64KiB", "--strategy", "ring", "--out", str(made)]) == 0
    done = run_ranks(2, [script(tmp_path)], MESHWRIGHT_PLAN=str(made), MESHWRIGHT_DEVICES="here,there")
    assert all("error plan-mismatch" in text and "other devices" in text for _, text in done), done


@pytest.mark.parametrize(
    ("name", "value"), [("MESHWRIGHT_TIMEOUT_S", "soon"), ("MESHWRIGHT_TIMEOUT_S", "-1"), ("MESHWRIGHT_TUNE", "99"), ("MESHWRIGHT_TUNE_S", "-1"),
     ("MESHWRIGHT_MIN_BYTES", "-5")],
)
def test_settings_that_are_none_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        settings_from({name: value})


def test_unknown_settings_are_refused() -> None:
    from meshwright.run.group.settings import configure, current_settings

    with pytest.raises(UsageError, match="no setting"):
        configure(speed=3)
    configure(tune=2)
    assert current_settings().tune == 2
    configure(tune=None)
    assert current_settings().tune == 0


def test_a_variable_with_nearly_a_settings_name_is_named() -> None:
    with pytest.raises(UsageError, match="did you mean MESHWRIGHT_PLAN") as found:
        settings_from({"MESHWRIGHT_PLANS": "plan.json"})
    assert found.value.where == "MESHWRIGHT_PLANS"
    others = {f"MESHWRIGHT_{n}": "1" for n in ("CPU_SHARE", "LAB_DIR", "CPU_PACING", "BENCH", "LAB", "LAB_RUN", "BENCH_BACKENDS")}
    assert settings_from({**others, "MESHWRIGHT_DEVICE": "n0", "PLANS": "x"}).device == "n0"


@pytest.mark.real
def test_calls_that_differ_from_rank_to_rank_and_views_with_gaps() -> None:
    done = run_ranks(3, [str(HERE / "odd_calls_rank.py")])
    assert [code for code, _ in done] == [0, 0, 0], "\n".join(text[-3000:] for code, text in done if code)
    assert all("all right" in text for _, text in done)


def test_an_unknown_strategy_is_refused_where_it_is_set() -> None:
    with pytest.raises(UsageError, match="rings"):
        settings_from({"MESHWRIGHT_STRATEGIES": "ring,rings"})
    assert settings_from({"MESHWRIGHT_STRATEGIES": "ring, forestcoll"}).strategies == ("ring", "forestcoll")


@pytest.mark.real
@pytest.mark.parametrize("fabric", ["", "laptop:3"], ids=["no-plans", "plans"])
def test_unlike_bytes_never_reach_the_built_in_backend(fabric: str) -> None:
    done = run_ranks(3, [str(HERE / "unlike_bytes_rank.py"), fabric])
    assert [code for code, _ in done] == [0, 0, 0], "\n".join(text[-3000:] for code, text in done if code)
    assert all("all right" in text for _, text in done)
