"""The control connections of a process: one listener and one thread for all its groups, one TCP connection per pair of ranks and group.

They carry views and verdicts only, so they are silent while all is well; but the end of a connection tells of a death at once, also to ranks that do
not wait for the dead one, and a peer's kernel that takes bytes which nobody reads tells a frozen process from a cut link (SIOCOUTQ).

The first frame of a connection (`control_frames`) names the protocol's version, the group and its token, which comes from the group's store;
anything else is closed without an answer. The listener is bound to the one address that peers use.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hmac
import math
import os
import selectors
import socket
import struct
import termios
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from .addresses import transferred
from .agreement import Agreement, Message
from .control_frames import HELLO, LENGTH, MAX_FRAME_BYTES, MAX_HELLO_BYTES, MESSAGE, PROTOCOL_VERSION, Hello, frame
from .verdict import CRAWLS, CUT, SILENT, Verdict

__all__ = ["Control", "Member", "control"]

MAX_HELLO_S = 10.0  # that a new connection may stay without a hello
MAX_STRANGERS = 256  # connections at once that have not said hello: a port scan must not use up the descriptors
SAMPLES_PER_TIMEOUT = 8  # how often links are sampled within the group's timeout, so that several samples lie before a deadline
MAX_SAMPLES = 5  # the latest samples of a link that count: bytes in any of them make it slow and not cut, as a slow link stalls at times


class Member:
    """A group's place in the control thread. `ended(verdict)` is called there, once; while `busy()`, links are sampled every `period_s`."""

    def __init__(
        self, group: str, token: str, agreement: Agreement, ended: Callable[[Verdict], None], busy: Callable[[], bool], period_s: float
    ) -> None:  # fmt: skip
        self.group, self.token, self.agreement, self.ended = group, token, agreement, ended
        self.connections: dict[int, _Connection] = {}
        self.attached = threading.Event()
        self.over = threading.Event()
        self.gone = False
        agreement.judge = self.judge
        self.busy, self.period_s, self.next_sample_s = busy, period_s, 0.0
        self.seen: dict[str, int] = {}
        self.moved: dict[int, collections.deque[bool]] = {}  # in the last few samples: a slow link stalls at times
        if agreement.size == 1:
            self.attached.set()

    def judge(self, peer: int) -> str:
        """SILENT: the peer's kernel took everything, nobody answered; CRAWLS: it did not, but lately some bytes got through; CUT: none did."""
        connection = self.connections.get(peer)
        if connection is None:
            return CUT
        if self._taken(connection):
            return SILENT
        return CRAWLS if any(self.moved.get(peer, ())) else CUT

    def _taken(self, connection: _Connection) -> bool:
        if connection.out:
            return False
        try:
            # Bytes that the peer's kernel has not acknowledged: that of a stopped process still acknowledges, behind a cut link nothing does.
            left = struct.unpack("i", fcntl.ioctl(connection.socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        except OSError:
            return False
        return not left

    def sample(self, now_s: float) -> None:
        """Note which peers' machines have moved any byte since the last sample, over any connection of this process.

        A full queue in front of a slow link holds back the messages of this protocol like all others: only the bytes tell it from a cut one. Peers
        that share an address with others, or with this process, cannot be told apart and have no slow link between them.
        """
        if self.agreement.alarmed_s != math.inf:  # a lost wait has closed connections: what was seen before counts
            self.next_sample_s = math.inf
        if now_s < self.next_sample_s:
            return
        self.next_sample_s = now_s + self.period_s
        if not self.busy():
            self.seen.clear()
            return
        hosts: dict[str, list[int]] = {}
        for peer, connection in self.connections.items():
            with contextlib.suppress(OSError):
                hosts.setdefault(connection.socket.getpeername()[0], []).append(peer)
        # Bytes are counted by address, so those of two ranks on one address cannot be told apart.
        alone = {host: peers[0] for host, peers in hosts.items() if len(peers) == 1}
        now = transferred(set(alone))
        for host, peer in alone.items():
            if host in self.seen:
                self.moved.setdefault(peer, collections.deque(maxlen=MAX_SAMPLES)).append(now.get(host, 0) > self.seen[host])
        self.seen = now


class _Connection:
    def __init__(self, connection: socket.socket, member: Member | None, peer: int) -> None:
        self.socket, self.member, self.peer = connection, member, peer
        self.into, self.out = bytearray(), bytearray()
        self.since_s = time.monotonic()


class Control:
    """`address`: what to bind. Everything but `call`, `attach`, `flush` and `close` runs in its own thread."""

    def __init__(self, address: str) -> None:
        self.pid = os.getpid()
        self.listener = socket.create_server((address, 0), backlog=512)
        self.listener.setblocking(False)
        self.address, self.port = address, int(self.listener.getsockname()[1])
        self.members: dict[str, Member] = {}
        self.users = 0
        self._strangers: set[_Connection] = set()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._ear, self._wake = socket.socketpair()
        self._ear.setblocking(False)
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name="meshwright-control", daemon=True)
        self._thread.start()

    # ---- from other threads ------------------------------------------------------------------------------------
    def call(self, what: Callable[[], None]) -> None:
        """Have `what` done in the control thread."""
        self._calls.append(what)
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def join(self, member: Member) -> None:
        self.members[member.group] = member

    def attach(self, member: Member, peer: int, connection: socket.socket) -> None:
        """A connection that this rank made, its hello sent."""
        connection.setblocking(False)
        self.call(lambda: self._attach(_Connection(connection, member, peer)))

    def flush(self, timeout_s: float) -> None:
        """Wait until what was asked for before is done, and what it sent is with the kernel (best effort)."""
        done = threading.Event()
        deadline = time.monotonic() + timeout_s

        def look() -> None:
            waiting = any(m.agreement.out or any(c.out for c in m.connections.values()) for m in self.members.values())
            if waiting and time.monotonic() < deadline:
                self._calls.append(look)
            else:
                done.set()

        self.call(look)
        done.wait(timeout_s)

    def leave(self, member: Member) -> None:
        done = threading.Event()

        def close() -> None:
            member.gone = True
            self.members.pop(member.group, None)
            for connection in list(member.connections.values()):
                self._drop(connection, quiet=True)
            done.set()

        self.call(close)
        if threading.current_thread() is not self._thread:
            done.wait(2.0)

    def close(self) -> None:
        self._ending = True
        self.call(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def forked(self) -> None:
        """In a forked child: its copies of the sockets must not keep connections open when the parent dies."""
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                os.close(key.fd)
        with contextlib.suppress(OSError):
            self._wake.close()

    # ---- the thread --------------------------------------------------------------------------------------------
    def _loop(self) -> None:
        while not self._ending:
            due = min((min(m.agreement.due_s, m.next_sample_s) for m in self.members.values()), default=float("inf"))
            limit = None if due == float("inf") else max(0.0, due - time.monotonic())
            if self._strangers:
                limit = min(limit if limit is not None else 1.0, 1.0)
            if self._calls:
                limit = 0.0
            for key, events in self._selector.select(limit):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj is self._ear:
                    with contextlib.suppress(OSError):
                        self._ear.recv(4096)
                else:
                    self._serve(key.data, events)
            # Only those that are there now: `flush` puts itself back, and must not keep the loop from reading.
            for _ in range(len(self._calls)):
                self._safely(self._calls.popleft())
            # Last: a verdict that has just been read must win over a timer that would make another one.
            self._safely(self._deal)
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._ear:
                with contextlib.suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._ear.close()
        self._wake.close()

    def _safely(self, what: Callable[[], None]) -> None:
        """A mistake in one group's handling must not silence this thread for the others."""
        try:
            what()
        except Exception:
            traceback.print_exc()

    def _deal(self) -> None:
        """Timers, outgoing messages, verdicts."""
        now = time.monotonic()
        for connection in [c for c in self._strangers if now - c.since_s > MAX_HELLO_S]:
            self._drop(connection)
        for member in list(self.members.values()):
            agreement = member.agreement
            member.sample(now)
            agreement.look_around(now)
            agreement.tick(now)
            self._send(member)
            if agreement.verdict is not None and not member.over.is_set():
                member.over.set()
                member.ended(agreement.verdict)

    def _send(self, member: Member) -> None:
        out, member.agreement.out = member.agreement.out, []
        kept: tuple[Message, bytes] | None = None
        for peer, message in out:
            connection = member.connections.get(peer)
            if connection is None:
                continue
            # A view goes to all peers as one object: it is encoded once.
            if kept is None or kept[0] is not message:
                kept = message, frame(message)
            connection.out += kept[1]
            self._write(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        if len(self._strangers) >= MAX_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        stranger = _Connection(connection, None, -1)
        self._strangers.add(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _attach(self, connection: _Connection) -> None:
        member = connection.member
        assert member is not None
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = member.connections.get(connection.peer)
        if member.gone or before is not None:
            connection.socket.close()
            return
        # A connection that was accepted is watched already, as a stranger's; one that was made here is not.
        member.connections[connection.peer] = connection
        try:
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
        except KeyError:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        if len(member.connections) == member.agreement.size - 1:
            member.attached.set()

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(connection)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.into += data
        # No data is the end of the stream; what was complete before it, a farewell perhaps, has been handled first.
        if not self._frames(connection) or not data:
            self._drop(connection)

    def _frames(self, connection: _Connection) -> bool:
        """Handle what is complete; False for a peer that breaks the rules."""
        into = connection.into
        while len(into) >= 4:
            length = LENGTH.unpack_from(into)[0]
            if length > (MAX_FRAME_BYTES if connection.member is not None else MAX_HELLO_BYTES):
                return False
            if len(into) < 4 + length:
                return True
            body = bytes(into[4 : 4 + length])
            del into[: 4 + length]
            try:
                if connection.member is None:
                    if not self._hello(connection, HELLO.decode(body)):
                        return False
                else:
                    connection.member.agreement.receive(time.monotonic(), connection.peer, MESSAGE.decode(body))
            except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError):
                return False
        return True

    def _hello(self, connection: _Connection, hello: Hello) -> bool:
        member = self.members.get(hello.group)
        # Compared in constant time: how long a wrong token takes must not tell how much of it was right.
        if hello.protocol != PROTOCOL_VERSION or member is None or not hmac.compare_digest(hello.token.encode(), member.token.encode()):
            return False
        if not 0 <= hello.rank < member.agreement.size or hello.rank == member.agreement.rank or hello.rank in member.connections:
            return False
        connection.member, connection.peer = member, hello.rank
        self._strangers.discard(connection)
        self._attach(connection)
        return True

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.out:
                sent = connection.socket.send(connection.out)
                del connection.out[:sent]
        except BlockingIOError:
            pass  # the rest goes when the selector says that there is room
        except OSError:
            connection.out.clear()  # reading will find the end
        # A socket is nearly always writable: asked for without need, that would make the loop spin.
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(connection.socket, wanted, connection)

    def _drop(self, connection: _Connection, quiet: bool = False) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        self._strangers.discard(connection)
        member = connection.member
        if member is not None and member.connections.get(connection.peer) is connection:
            del member.connections[connection.peer]
            if not quiet:
                member.agreement.closed(time.monotonic(), connection.peer)


_lock = threading.Lock()
_controls: dict[str, Control] = {}


def control(address: str) -> Control:
    """The process's control thread for an address."""
    with _lock:
        found = _controls.get(address)
        # A forked child has the object, but not its thread.
        if found is None or found.pid != os.getpid():
            found = _controls[address] = Control(address)
        found.users += 1
        return found


def release(used: Control) -> None:
    with _lock:
        used.users -= 1
        if used.users == 0:
            if _controls.get(used.address) is used:
                del _controls[used.address]
            used.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for each in _controls.values():
        each.forked()
    _controls.clear()


os.register_at_fork(after_in_child=_after_fork)
