"""A probe within a running job: every rank becomes an agent for a while, rank 0 measures and infers, everyone gets the fabric.

Beside the network the job has its library: small messages of the group's own send and receive, beyond half a round trip, give `library_latency_s`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...errors import RunError, Unsupported
from ...fabric.fabric import Fabric
from ...io.fabric.toml import fabric_toml, parse_fabric_toml
from .campaign import MAX_CAMPAIGN_S, probe_fabric
from .first_rank import first_rank_bytes
from .infer import MAX_ERROR_SHARE, Inferred
from .measurements import Measurements
from .network import AgentNetwork
from .rank_order import LOW_PERCENTILE, Endpoint
from .rank_order_agent import Agent

__all__ = ["ProbedGroup", "own_address", "probe_group"]

INFO_BYTES = 512  # of what a rank tells the others, as JSON
PINGS = 24  # round trips of a pair of ranks, the first quarter of which is a warm-up
SIOCGIFADDR = 0x8915


@dataclass(frozen=True, kw_only=True)
class ProbedGroup:
    """`fabric`: on every rank, device r of it is `rank<r>`. `measured` and `found`: on the group's rank 0 only."""

    fabric: Fabric
    measured: Measurements | None
    found: Inferred | None


def own_address() -> str:
    """Address by which gloo reaches this rank: that of GLOO_SOCKET_IFNAME, else of the interface towards MASTER_ADDR.

    Raises: RunError when the interface has none.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            if name:
                import fcntl

                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                return socket.inet_ntoa(answer[20:24])
            asked.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return str(asked.getsockname()[0])
    except OSError as error:
        what = f"interface {name!r}" if name else "the way to MASTER_ADDR"
        raise RunError(f"no IPv4 address of {what}: {error.strerror or error}", hint="set GLOO_SOCKET_IFNAME to an interface of this host") from None


def probe_group(
    group: dist.ProcessGroup | None = None, *, name: str = "probed", budget_s: float = MAX_CAMPAIGN_S, tolerance: float = MAX_ERROR_SHARE,
    window_s: float = 0.3, seed: int = 0, say: Callable[[str], None] = lambda _: None,
) -> ProbedGroup:  # fmt: skip
    """Call it on all ranks of an initialised gloo group (default: the whole job), with nothing else running; its timeout must exceed the budget.

    Whether the fabric explains what was measured is for the caller to ask: `fabric_infer.require_explained(found, ...)` on rank 0.
    Raises: Unsupported (another backend), UsageError, RunError; what rank 0 raises is raised as RunError by the others.
    """
    if dist.get_backend(group) != "gloo":
        raise Unsupported(f"a probe needs a gloo group, not {dist.get_backend(group)}", hint='dist.new_group(backend="gloo")')
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    token = first_rank_bytes(secrets.token_hex(16).encode(), group).decode()
    address = own_address()
    agent = Agent(address, 0, token, patience_s=1e9)
    serving = threading.Thread(target=agent.serve, daemon=True)
    serving.start()
    try:
        ends = _gathered({"address": address, "port": agent.port}, group)
        pings = _gathered({"ping_s": _ping(rank, size, group)}, group)
        answer: dict[str, Any] = {}
        outcome: tuple[Measurements, Inferred] | None = None
        failure: Exception | None = None
        if rank == 0:
            endpoints = [Endpoint(f"rank{r}", str(e["address"]), int(e["port"]), str(e["address"])) for r, e in enumerate(ends)]
            try:
                network = AgentNetwork(endpoints, token, window_s=window_s)
                outcome = probe_fabric(network, name=name, budget_s=budget_s, tolerance=tolerance, seed=seed, say=say)
                outcome = _with_library(outcome, [float(p["ping_s"]) for p in pings])
                answer = {"fabric": fabric_toml(outcome[1].fabric)}
            except Exception as error:
                failure, answer = error, {"error": str(error)}
        answer = json.loads(first_rank_bytes(json.dumps(answer).encode(), group))
    finally:
        agent.stopped.set()
        serving.join(5)
    if failure is not None:
        raise failure
    if "error" in answer:
        raise RunError(f"the probe failed on rank 0: {answer['error']}", hint="see rank 0's output")
    measured, found = outcome if outcome is not None else (None, None)
    return ProbedGroup(fabric=parse_fabric_toml(answer["fabric"], where="probed.toml"), measured=measured, found=found)


def _with_library(outcome: tuple[Measurements, Inferred], ping_s: list[float]) -> tuple[Measurements, Inferred]:
    """Rank r's pings went to rank r + 1."""
    measured, found = outcome
    n = len(ping_s)
    beyond = [(ping_s[r] - float(measured.rtt_s[r, (r + 1) % n])) / 2 for r in range(n)]
    library = round(max(0.0, float(np.median(beyond))), 9)
    links = tuple(replace(x, library_latency_s=library) for x in found.fabric.links)
    return replace(measured, library_latency_s=library), replace(found, fabric=replace(found.fabric, links=links))


def _ping(rank: int, size: int, group: dist.ProcessGroup | None) -> float:
    """Low percentile of round trips of 8 bytes to the next rank by the group's send and receive; one pair at a time."""
    found = 0.0
    data = torch.zeros(1, dtype=torch.int64)
    for first in range(size):
        second = (first + 1) % size
        dist.barrier(group)
        if rank not in (first, second) or size < 2:
            continue
        peer = dist.get_global_rank(group, second if rank == first else first) if group is not None else (second if rank == first else first)
        times = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            for sending in (rank == first, rank != first):
                if sending:
                    dist.send(data, peer, group)
                else:
                    dist.recv(data, peer, group)
            times.append(time.perf_counter() - begin)
        if rank == first:
            found = float(np.percentile(times[PINGS // 4 :], LOW_PERCENTILE))
    return found


def _gathered(document: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Every rank's document, in rank order."""
    own = json.dumps(document).encode().ljust(INFO_BYTES)
    parts = [torch.zeros(INFO_BYTES, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.tensor(list(own), dtype=torch.uint8), group)
    return [json.loads(bytes(p.tolist())) for p in parts]
