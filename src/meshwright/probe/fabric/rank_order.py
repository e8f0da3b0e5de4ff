"""Probing which endpoints are near which: echoes and bursts between all pairs, as a tournament, and what it says about rank order.

Method: Cloud Collectives (arXiv 2105.14088). In each of n - 1 rounds every endpoint meets one other, so that probes do not collide; of many round
trips a low percentile is taken, so that queueing is dropped and structure is left; bursts are timed one way, in both directions. A pair's cost is
alpha + m · beta: half the round trip, and the burst's time beyond it per byte.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...decide.collective.cloudcollectives.cost import CostMatrix
from ...decide.collective.cloudcollectives.groups import infer_groups
from ...errors import RunError, RunTimeout, UsageError

__all__ = ["Endpoint", "Probed", "local_agents", "order_agent", "parse_endpoint", "probe", "tournament"]

LOW_PERCENTILE = 10.0  # of round trips and bursts: what a link takes when nothing disturbs it, and no lucky one alone
BURST_BYTES = 1 << 20  # of a timed burst
MAX_PROBE_S = 120.0  # of a whole probe, and of one agent's answer


@dataclass(frozen=True)
class Endpoint:
    """An agent's address. `host` groups endpoints of one machine, which stay together in every order."""

    name: str
    address: str
    port: int
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """`matrix` for the search; `rtt_s[i][j]`: the percentile; `loss`: pairs whose echoes or bursts failed (none, or it raised)."""

    matrix: CostMatrix
    rtt_s: tuple[tuple[float, ...], ...]
    rate_Bps: tuple[tuple[float, ...], ...]
    seconds: float
    echoes: int
    burst_bytes: int


def parse_endpoint(text: str) -> Endpoint:
    """`[name=]host:port`; IPv6 addresses in brackets. Raises: UsageError."""
    name, equals, rest = text.rpartition("=")
    address, colon, port = rest.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or not address:
        raise UsageError(f"not an endpoint: {text!r}", where="--probe", hint="name=host:port, e.g. n0=10.0.0.1:7000")
    address = address.strip("[]")
    return Endpoint(name if equals else rest, address, int(port), address)


def tournament(n: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every pair meets once: n - 1 rounds (n even), n (n odd). The circle method."""
    seats = list(range(n)) + ([-1] if n % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a >= 0 and b >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def probe(
    endpoints: Sequence[Endpoint], token: str, *, echoes: int = 100, bursts: int = 3, burst_bytes: int = BURST_BYTES, limit_s: float = MAX_PROBE_S
) -> Probed:
    """Measure all pairs in both directions. Agents must be running; see `rank_order_agent`.

    Raises: UsageError (fewer than two endpoints, a name twice, counts), RunError (an agent does not answer; names it), RunTimeout.
    """
    n = len(endpoints)
    names = [e.name for e in endpoints]
    if n < 2 or len(set(names)) < n:
        raise UsageError("a probe needs at least two endpoints with names of their own", where="--probe", hint="name=host:port, several times")
    if echoes < 1 or bursts < 0 or burst_bytes < 1:
        raise UsageError(f"echoes and burst_bytes must be >= 1 and bursts >= 0, got {echoes}, {burst_bytes}, {bursts}", where="probe")
    start = time.monotonic()
    rtt, beta = np.zeros((n, n)), np.zeros((n, n))

    def way(i: int, j: int) -> None:
        counts = {"echoes": echoes, "bursts": bursts, "burst_bytes": burst_bytes}
        order = {"do": "probe", "host": endpoints[j].address, "port": endpoints[j].port, **counts}
        found = order_agent(endpoints[i], token, order, limit_s)
        if "error" in found:
            raise RunError(f"{names[i]} cannot reach {found['error']}", hint="is the agent running there, and the port open for UDP and TCP?")
        rtt[i, j] = np.percentile(found["rtt_s"], LOW_PERCENTILE)
        if found["burst_s"]:
            beta[i, j] = max(float(np.percentile(found["burst_s"], LOW_PERCENTILE)) - rtt[i, j], 0.0) / burst_bytes

    with ThreadPoolExecutor(max_workers=max(1, n // 2)) as pool:
        for pairs in tournament(n):
            for direction in ([(i, j) for i, j in pairs], [(j, i) for i, j in pairs]):
                if time.monotonic() - start > limit_s:
                    raise RunTimeout(f"the probe did not end within {limit_s:g} s", hint="fewer echoes or bursts, or a larger limit")
                for done in [pool.submit(way, i, j) for i, j in direction]:
                    done.result()
    return _probed(endpoints, rtt, beta, time.monotonic() - start, echoes, burst_bytes if bursts else 0)


def _probed(endpoints: Sequence[Endpoint], rtt: Any, beta: Any, seconds: float, echoes: int, burst_bytes: int) -> Probed:
    """Round trips are the same both ways: the larger of two low percentiles is kept."""
    rtt = np.maximum(rtt, rtt.T)
    hosts: dict[str, int] = {}
    host = tuple(hosts.setdefault(e.host or e.name, len(hosts)) for e in endpoints)
    n = len(endpoints)
    plain = CostMatrix(
        names=tuple(e.name for e in endpoints), alpha_s=rtt / 2, beta_s_per_byte=beta, host=host, group=(0,) * n,
        address=tuple(e.address for e in endpoints),
        source=f"probed: {echoes} echoes, bursts of {burst_bytes} B, percentile {LOW_PERCENTILE:g}",
    )  # fmt: skip
    matrix = replace(plain, group=infer_groups(plain.message_s(burst_bytes)))
    rate = np.divide(1.0, beta, out=np.zeros_like(beta), where=beta > 0)
    return Probed(
        matrix=matrix, rtt_s=tuple(map(tuple, rtt.tolist())), rate_Bps=tuple(map(tuple, rate.tolist())), seconds=seconds, echoes=echoes,
        burst_bytes=burst_bytes,
    )  # fmt: skip


def order_agent(endpoint: Endpoint, token: str, order: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Send one order to an agent and wait for its answer."""
    try:
        with socket.create_connection((endpoint.address, endpoint.port), timeout=min(10.0, limit_s)) as link:
            link.settimeout(limit_s)
            link.sendall(json.dumps({"token": token, **order}).encode() + b"\n")
            line = link.makefile("rb").readline(1 << 20)
    except TimeoutError:
        raise RunTimeout(f"agent {endpoint.name} did not answer within {limit_s:g} s", hint="is the network up?") from None
    except OSError as error:
        text = f"no agent {endpoint.name} at {endpoint.address}:{endpoint.port}: {error.strerror or error}"
        raise RunError(text, hint="start `python -m meshwright.probe.fabric.rank_order_agent` there") from None
    if not line:
        raise RunError(f"agent {endpoint.name} closed the connection", hint="do both ends have the same token?")
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise RunError(f"agent {endpoint.name} sent an answer that cannot be read", hint="is another program on that port?")
    return answer


@contextmanager
def local_agents(count: int, *, address: str = "127.0.0.1") -> Iterator[tuple[list[Endpoint], str]]:
    """`count` agents as processes on this machine, and their token; they are ended whatever happens.

    Raises: RunError when one does not start.
    """
    token = secrets.token_hex(16)
    running: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-m", "meshwright.probe.fabric.rank_order_agent", "--host", address, "--patience", "120"]
            running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        endpoints = []
        for number, process in enumerate(running):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(token + "\n")
            process.stdin.close()
            line = process.stdout.readline()
            if not line:
                raise RunError(f"agent {number} did not start, exit code {process.wait(10)}", hint="see its message above")
            endpoints.append(Endpoint(f"local{number}", address, int(json.loads(line)["port"]), f"local{number}"))
        yield endpoints, token
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
