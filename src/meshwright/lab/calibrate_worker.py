"""Measures links from inside a lab: `python -m meshwright.lab.calibrate_worker JOBS.json`.

JOBS is a list of phases, each a list of transfers at the same moment; the results go to stdout as one JSON list.
One process holds the sockets of all transfers: a socket belongs to the network namespace in which it was made, whoever uses it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ..run.machine.process import prompt_scheduling
from . import namespaces as ns
from .batches import HERE

__all__ = ["main"]

CHUNK_BYTES = 1 << 18
MIN_PINGS, MAX_PINGS, MAX_PINGS_S = 3, 40, 4.0  # round trips of a link; no more than the least after so many seconds
MAX_SILENCE_S = 60.0  # of a socket, before the measurement has failed
UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h; Python has no names for them
MAX_UDP_BATCH_PACKETS = 40  # packets handed to the kernel at once; at most 64 KiB


def main() -> None:
    prompt_scheduling()
    phases = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write(json.dumps([result for jobs in phases for result in _phase(jobs)]))


def _phase(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Transfers at the same moment."""
    pairs = [_sockets(job) for job in jobs]
    results: list[dict[str, Any]] = [{"datagrams": job["datagrams"], "round_trip_s": 0.0, "goodput_Bps": 0.0} for job in jobs]
    for job, (sends, receives), result in zip(jobs, pairs, results, strict=True):
        if job["pings"] and not job["datagrams"]:
            result["round_trip_s"] = _round_trip_s(sends, receives, job["max_round_trip_s"])
    threads = [threading.Thread(target=_goodput, args=(job, *pair, result)) for job, pair, result in zip(jobs, pairs, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _inside(namespace: str) -> None:
    fd = os.open(HERE / namespace, os.O_RDONLY)
    ns.setns(fd, ns.NEWNET)
    os.close(fd)


def _sockets(job: dict[str, Any]) -> tuple[socket.socket, socket.socket]:
    """(sending, receiving) sockets of one transfer, made in the namespaces at the two ends of the cable."""
    kind = socket.SOCK_DGRAM if job["datagrams"] else socket.SOCK_STREAM
    _inside(job["target"])
    listens = socket.socket(socket.AF_INET, kind)
    listens.bind((job["target_address"], 0))
    listens.settimeout(MAX_SILENCE_S)
    if job["datagrams"]:
        listens.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    else:
        listens.listen(1)
    _inside(job["source"])
    sends = socket.socket(socket.AF_INET, kind)
    sends.bind((job["source_address"], 0))
    sends.settimeout(MAX_SILENCE_S)
    if job["datagrams"]:
        sends.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, job["segment_bytes"])
    sends.connect(listens.getsockname())
    if job["datagrams"]:
        return sends, listens
    receives, _ = listens.accept()
    listens.close()
    receives.settimeout(MAX_SILENCE_S)
    for sock in (sends, receives):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sends, receives


def _round_trip_s(a: socket.socket, b: socket.socket, enough_s: float) -> float:
    """Least time of one byte there and back. A busy machine only adds to it, so it is tried again while even the least is above `enough_s`."""
    least_s, pings = math.inf, 0
    began = time.perf_counter()
    while pings < MIN_PINGS or (least_s > enough_s and pings < MAX_PINGS and time.perf_counter() - began < MAX_PINGS_S):
        start = time.perf_counter()
        a.send(b"x")
        b.recv(1)
        b.send(b"x")
        a.recv(1)
        least_s = min(least_s, time.perf_counter() - start)
        pings += 1
    return least_s


def _goodput(job: dict[str, Any], sends: socket.socket, receives: socket.socket, result: dict[str, Any]) -> None:
    """Steady rate at the receiver: time starts when `skip_bytes` have arrived."""
    total = job["skip_bytes"] + job["measured_bytes"]
    stop = threading.Event()
    sender = threading.Thread(target=_send, args=(job, sends, total, stop))
    buffer = bytearray(CHUNK_BYTES)
    got, began, at_start = 0, 0.0, 0
    sender.start()
    try:
        while got < total:
            size = receives.recv_into(buffer)
            if not size:
                break
            got += size
            if not began and got >= job["skip_bytes"]:
                began, at_start = time.perf_counter(), got
        ended = time.perf_counter()
        if began and ended > began:
            result["goodput_Bps"] = (got - at_start) / (ended - began)
    except OSError:  # too slow by far: the goodput stays 0
        pass
    finally:
        stop.set()
        receives.close()
        sender.join()
        sends.close()


def _send(job: dict[str, Any], sends: socket.socket, total: int, stop: threading.Event) -> None:
    size = job["segment_bytes"] * min(MAX_UDP_BATCH_PACKETS, 65_000 // job["segment_bytes"]) if job["datagrams"] else CHUNK_BYTES
    data = memoryview(bytes(size))
    sent = 0
    try:
        while not stop.is_set() and (job["datagrams"] or sent < total):
            sent += sends.send(data)
    except OSError:  # the receiver has what it wants and has closed
        pass


if __name__ == "__main__":
    main()
