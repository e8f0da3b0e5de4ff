"""One end of the rank-order probe: answers echoes, takes bursts, and measures the way to others when told to.

    python -m meshwright.probe.fabric.rank_order_agent --host 10.0.0.3 --port 7000 --token-file secret

UDP: a datagram is sent back as it came. TCP: the first line is a JSON order that carries the token,
    {"token": ..., "do": "probe", "host": ..., "port": ..., "echoes": k, "bursts": b, "burst_bytes": m}   measure the way to another agent
    {"token": ..., "do": "sink", "bytes": m}                                                              take m bytes, then answer
    {"token": ..., "do": "flow", "host": ..., "port": ..., ...}, {"token": ..., "do": "take", ...}        stream to another agent (`fabric_flow`)
    {"token": ..., "do": "stop"}
and the answer is one JSON line. Orders are bounded; without the token a connection is closed unanswered, and datagrams above 64 bytes are dropped,
so that an agent never sends more than it gets.
"""

from __future__ import annotations

import argparse
import errno
import hmac
import json
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .flow import MAX_SILENCE_S, drain, stream, take

MAX_ECHO_BYTES, MAX_LINE_BYTES = 64, 4096  # of an echo, and of an order, from anybody
BLOCK_BYTES = 1 << 16  # written and read at once
MAX_ECHOES, MAX_BURSTS, MAX_BURST_BYTES = 10_000, 64, 1 << 30  # that somebody may ask an agent for
MAX_ECHO_S = 0.5  # until an echo counts as lost
MAX_PORT_TRIES = 64


class Agent:
    """Serves until told to stop (or until `patience_s` pass without an order)."""

    def __init__(self, host: str, port: int, token: str, patience_s: float = 600.0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host, self.token, self.patience_s = host, token, patience_s
        self.tcp, self.udp = both_on_one_port(family, host, port)
        self.port: int = self.tcp.getsockname()[1]
        self.tcp.listen(64)
        self.stopped = threading.Event()

    def serve(self) -> None:
        echo = threading.Thread(target=self._echo, daemon=True)
        echo.start()
        self.tcp.settimeout(0.2)
        last = time.monotonic()
        while not self.stopped.is_set() and time.monotonic() - last < self.patience_s:
            try:
                link, _ = self.tcp.accept()
            except TimeoutError:
                continue
            last = time.monotonic()
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()
        self.stopped.set()
        self.tcp.close()
        with suppress(OSError):  # "not connected"; it wakes the thread that waits, which closing alone does not
            self.udp.shutdown(socket.SHUT_RDWR)
        echo.join()
        self.udp.close()

    def _echo(self) -> None:
        while not self.stopped.is_set():
            try:
                data, sender = self.udp.recvfrom(2048)
                if sender and len(data) <= MAX_ECHO_BYTES:
                    self.udp.sendto(data, sender)
            except OSError:
                return

    def _answer(self, link: socket.socket) -> None:
        link.settimeout(MAX_SILENCE_S)
        with link:
            try:
                reader = link.makefile("rb")
                order = json.loads(reader.readline(MAX_LINE_BYTES))
                if not isinstance(order, dict) or not hmac.compare_digest(str(order.get("token")), self.token):
                    return
                link.sendall(json.dumps(self._obey(order, reader)).encode() + b"\n")
                if order["do"] == "take":
                    drain(reader)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                return

    def _obey(self, order: dict[str, Any], reader: Any) -> dict[str, Any]:
        if order["do"] == "stop":
            self.stopped.set()
            return {"ok": True}
        if order["do"] == "take":
            return take(reader, order)
        if order["do"] == "flow":
            return stream(order, self.token, self.host)
        if order["do"] == "sink":
            left = min(int(order["bytes"]), MAX_BURST_BYTES)
            while left:
                data = reader.read1(min(left, BLOCK_BYTES))
                if not data:
                    raise OSError("the burst ended early")
                left -= len(data)
            return {"ok": True}
        try:
            return measure(
                str(order["host"]), int(order["port"]), self.token, echoes=min(int(order["echoes"]), MAX_ECHOES),
                bursts=min(int(order["bursts"]), MAX_BURSTS), burst_bytes=min(int(order["burst_bytes"]), MAX_BURST_BYTES),
            )  # fmt: skip
        except OSError as error:
            return {"error": f"{order['host']}:{order['port']}: {error}"}


def both_on_one_port(family: int, host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """A TCP and a UDP socket on one port. A port that the system picks as free for TCP may be somebody's for UDP: then another one is picked."""
    tries = MAX_PORT_TRIES if port == 0 else 1
    while True:
        tries -= 1
        tcp, udp = socket.socket(family, socket.SOCK_STREAM), socket.socket(family, socket.SOCK_DGRAM)
        try:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((host, port))
            udp.bind((host, tcp.getsockname()[1]))
            return tcp, udp
        except OSError as error:
            tcp.close()
            udp.close()
            if not tries or error.errno != errno.EADDRINUSE:
                raise


def measure(host: str, port: int, token: str, *, echoes: int, bursts: int, burst_bytes: int) -> dict[str, Any]:
    """Round-trip times of echoes, and seconds per burst from its first byte to the receiver's answer; a few of each first, unmeasured."""
    rtts = _round_trips(host, port, echoes)
    times = []
    for number in range(bursts + 1 if bursts else 0):
        with socket.create_connection((host, port), timeout=MAX_SILENCE_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(json.dumps({"token": token, "do": "sink", "bytes": burst_bytes}).encode() + b"\n")
            block, left = bytes(BLOCK_BYTES), burst_bytes
            start = time.perf_counter()
            while left:
                part = block[: min(left, BLOCK_BYTES)]
                link.sendall(part)
                left -= len(part)
            if not link.recv(64):
                raise OSError("the other end refused the burst")
            if number:
                times.append(time.perf_counter() - start)
    return {"rtt_s": rtts, "burst_s": times}


def _round_trips(host: str, port: int, echoes: int) -> list[float]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: list[float] = []
    with socket.socket(family, socket.SOCK_DGRAM) as link:
        link.connect((host, port))
        link.settimeout(MAX_ECHO_S)
        lost = 0
        for number in range(echoes + 3):
            start = time.perf_counter()
            link.send(number.to_bytes(8, "big"))
            try:
                while link.recv(MAX_ECHO_BYTES) != number.to_bytes(8, "big"):
                    continue  # an answer that came too late
            except TimeoutError:
                lost += 1
                if lost > 3 + echoes // 4:
                    raise OSError(f"{lost} of {number + 1} echoes were lost") from None
                continue
            if number >= 3:
                found.append(time.perf_counter() - start)
    if echoes and not found:
        raise OSError("no echo came back")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One end of the rank-order probe.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="0 = any free one, printed")
    parser.add_argument("--token-file", help="file with the shared secret; default: standard input's first line")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds without an order after which it ends (default 600)")
    args = parser.parse_args()
    token = (Path(args.token_file).read_text() if args.token_file else sys.stdin.readline()).strip()
    if len(token) < 16:
        parser.error("the token must have at least 16 characters")
    try:
        agent = Agent(args.host, args.port, token, args.patience)
    except OSError as error:
        parser.error(f"cannot listen on {args.host} port {args.port}: {error.strerror}; choose another with --host or --port")
    sys.stdout.write(json.dumps({"port": agent.port}) + "\n")
    sys.stdout.flush()
    agent.serve()


if __name__ == "__main__":
    main()
