"""Stock gloo, only the rank order changed by a probe: two racks of four hosts in a lab, all-reduce in the probed order against random ones.

Run: `python benchmarks/probe_order.py` (raw output in benchmarks/results/probe_order.json; needs root or user namespaces; about five minutes).
Hosts are scattered over the racks. `fabric probe` measures and infers, `collective order` orders, then one process per host runs gloo's own
all_reduce in the probed order, in the given one and in ten random ones (seeded). At the end an unmodified script is
started twice, once under `meshwright run ordered`.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from machine import record

from meshwright.decide.collective.cloudcollectives.cost import CostMatrix, model_of
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.toml import read_fabric_toml
from meshwright.lab import Lab
from meshwright.run.machine.cpu_use import MachineUseRecorder

HOSTS, PORT_Bps, TRUNK_Bps = 8, 50_000_000, 12_500_000  # 400 and 100 Mbit/s
SIZE, ROUNDS, RANDOM = 6 << 20, 5, 10
SCRIPT = """
import time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
data, times = torch.ones(SIZE // 4), []
for _ in range(4):
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(data)
    times.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    print(sorted(times[1:])[1])
dist.destroy_process_group()
"""


def racks() -> Fabric:
    """Every other host is in the other rack: the given order crosses the trunk at every step."""
    links = []
    for i in range(HOSTS):
        links += [(f"host{i}", f"rack{i % 2}", PORT_Bps), (f"rack{i % 2}", f"host{i}", PORT_Bps)]
    links += [("rack0", "rack1", TRUNK_Bps), ("rack1", "rack0", TRUNK_Bps)]
    return Fabric(
        name="two racks", devices=tuple(Device(name=f"host{i}", kind="cpu", group=f"host{i}") for i in range(HOSTS)),
        switches=(Switch(name="rack0"), Switch(name="rack1")), links=tuple(Link(src=a, dst=b, rate_Bps=r) for a, b, r in links),
    )  # fmt: skip


def worker(me: int, port: int, addresses: list[str], orders: list[list[int]]) -> None:
    """One host: all orders in turn, ROUNDS rounds after one to warm up; the last line of host 0 holds seconds[order][round], the slowest rank's."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seconds: list[list[float]] = [[] for _ in orders]
    for turn, order in enumerate(orders):
        where = f"tcp://{addresses[order[0]]}:{port + turn}"
        dist.init_process_group("gloo", init_method=where, rank=order.index(me), world_size=len(order), timeout=timedelta(seconds=120))
        data = torch.ones(SIZE // 4)
        for attempt in range(ROUNDS + 1):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(data)
            taken = torch.tensor([time.perf_counter() - begin])
            if attempt == 0 and not torch.equal(data, torch.full_like(data, float(len(order)))):
                raise SystemExit("the sum is wrong")
            data.fill_(1.0)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if attempt:
                seconds[turn].append(float(taken))
        dist.destroy_process_group()
    if me == 0:
        print(json.dumps(seconds))


def probe(lab: Lab, folder: Path) -> tuple[CostMatrix, list[int], dict[str, Any]]:
    """The product's commands, on agents: (costs, order, what the probe says of itself)."""
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    agents = []
    for k in range(HOSTS):
        where = ["--host", lab.address(k), "--port", "7000", "--token-file", str(token)]
        command = [sys.executable, "-m", "meshwright.probe.fabric.rank_order_agent", *where]
        agents.append(lab.popen(k, command, stdout=-1))
    for agent in agents:
        assert agent.stdout is not None and agent.stdout.readline()
    ends = [x for k in range(HOSTS) for x in ("--probe", f"host{k}={lab.address(k)}:7000")]
    files = ["-o", str(folder / "fabric.toml"), "--save-matrix", str(folder / "costs.json")]
    said = meshwright(lab, ["fabric", "probe", *ends, "--token-file", str(token), *files, "--json"])
    for agent in agents:
        agent.kill()
        agent.wait(10)
    size = f"{SIZE >> 20}MiB"
    order = ["collective", "order", "--matrix", str(folder / "costs.json"), "--sizes", size, "--save-order", str(folder / "order.json"), "--json"]
    ordered = meshwright(lab, order)
    matrix = CostMatrix.from_document(json.loads((folder / "costs.json").read_text()))
    return matrix, ordered["rows"][0]["order"], said


def meshwright(lab: Lab, words: list[str]) -> dict[str, Any]:
    process = lab.popen(0, [sys.executable, "-m", "meshwright", *words], stdout=-1, stderr=-1)
    out, error = process.communicate(300)
    if process.returncode:
        raise SystemExit(error.decode())
    found: dict[str, Any] = json.loads(out)
    return found


def measure(lab: Lab, orders: list[list[int]]) -> list[list[float]]:
    addresses = json.dumps([lab.address(k) for k in range(HOSTS)])
    command = [sys.executable, str(Path(__file__)), "--worker", addresses, json.dumps(orders)]
    done = lab.run(command, timeout_s=600)
    found: list[list[float]] = json.loads(done.outputs[0].splitlines()[-1])
    return found


def launched(lab: Lab, folder: Path) -> list[float]:
    """The unmodified script as given, and under the wrapper: rank 0's median seconds."""
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("SIZE", str(SIZE)))
    plain = [sys.executable, str(script)]
    wrapped = [sys.executable, "-m", "meshwright", "run", "ordered", "--order", str(folder / "order.json"), "--", *plain]
    return [float(b"".join(lab.run(c, timeout_s=200).outputs).split()[-1]) for c in (plain, wrapped)]


def spearman(a: list[float], b: list[float]) -> float:
    def places(values: list[float]) -> np.ndarray:
        _, where, counts = np.unique(np.round(values, 6), return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[where]

    return float(np.corrcoef(places(a), places(b))[0, 1])


def say(begin: float, text: str) -> None:
    print(f"{time.monotonic() - begin:4.0f} s: {text}", file=sys.stderr, flush=True)


def main() -> None:
    begin = time.monotonic()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name, Lab.up(racks()) as lab:
        folder = Path(name)
        say(begin, "lab is up")
        matrix, order, said = probe(lab, folder)
        probed = read_fabric_toml(folder / "fabric.toml")
        model = model_of(matrix, "ring", "all-reduce", SIZE)
        say(begin, f"probed in {said['seconds']:.0f} s, largest error {said['error']:.1%}; the order is {order}")
        orders = [order, list(range(HOSTS)), *(rng.permutation(HOSTS).tolist() for _ in range(RANDOM))]
        with MachineUseRecorder() as use:
            seconds = measure(lab, orders)
        say(begin, "all orders measured")
        by_launch = launched(lab, folder)
    median = [statistics.median(s) for s in seconds]
    predicted = [model(tuple(o)).time_s for o in orders]
    mean = statistics.mean(median[2:])
    errors = [p / m - 1 for p, m in zip(predicted, median, strict=True)]
    size = f"{SIZE >> 20} MiB"
    rows = [
        {"what": f"gloo all_reduce of {size}: mean of {RANDOM} random orders over the probed order", "value": mean / median[0], "unit": "x",
         "limit": 1.4, "probed_s": seconds[0], "random_mean_s": mean, "random_s": median[2:]},
        {"what": "the same: the given order (every step crosses) over the probed one", "value": median[1] / median[0], "unit": "x"},
        {"what": f"rank correlation of predicted and measured times over the {RANDOM} random orders", "value": spearman(predicted[2:], median[2:]),
         "unit": "", "limit": 0.9, "predicted_s": predicted, "measured_s": median, "orders": orders},
        {"what": "predicted over measured time, median error of all orders", "value": statistics.median(abs(e) for e in errors), "unit": ""},
        {"what": "unmodified script: as given over `meshwright run ordered`", "value": by_launch[0] / by_launch[1], "unit": "x",
         "seconds": by_launch},
        {"what": "probe: largest error on trials held out", "value": said["held_out_error"], "unit": "", "limit": 0.1, "trials": said["trials"],
         "trunks": said["trunks"], "idle": said["idle"], "error": said["error"]},
        {"what": "probe", "value": said["seconds"], "unit": "wall s"},
    ]  # fmt: skip
    facts = {"ports_Bps": PORT_Bps, "trunk_Bps": TRUNK_Bps, "probed_links_Bps": {f"{x.src} -> {x.dst}": x.rate_Bps for x in probed.links}}
    document = record("probe_order", rows, **facts, machine_use=use.result.to_json(), wall_s=round(time.monotonic() - begin, 1))
    for row in document["rows"]:
        print(f"{row['what']}: {row['value']:.4g} {row['unit']}" + (f" (asked: {row['limit']})" if "limit" in row else ""))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]) + 100, json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
