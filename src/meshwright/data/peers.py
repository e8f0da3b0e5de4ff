"""Files of a dataset kept in the memory of several nodes: each node keeps a part, and hands it to the others over TCP.

Cite: J. Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (VLDB 2021, arXiv 2007.06775), section 5.2 (partitioned caching).
Left open by the paper: what happens when nodes come and go. Ours: a file's owner is the node with the largest hash of node and file among those
with room (rendezvous hashing), so one node more or less moves its share of the files and no other.
Deviations: the memory is the owner's page cache, from which the kernel sends (`sendfile`). In the first epoch too a file is read from storage by its
owner alone, whoever asks first. Whoever cannot reach an owner reads from storage itself.
Invariant: all nodes that are given the same files, sizes, names and budgets compute the same owners, and need no directory.
Cost: (n - 1) / n of the bytes of an epoch cross the network. It pays where that is faster than storage.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PortInUse, RunError, UsageError
from . import pages
from .kept import FileRange, ranges_of
from .limits import memory_budget_bytes
from .wire import exactly, parse_address

__all__ = ["PeerFiles", "Served"]

MAX_RETRY_S = 5.0  # until a node that did not answer is asked again
HELLO = struct.Struct("<8s16s")  # a word, and a hash of files, sizes, nodes and budgets
WORD = b"mw-peer1"
ASK = struct.Struct("<q")  # an item's number
ANSWER = struct.Struct("<q")  # bytes that follow; -1: the owner could not read it
OTHER_FILES = -2  # the answer to a node that has another list


@dataclass
class Served:
    """Bytes that this process got: from files of its own node, from other nodes, from storage; and how often an owner did not answer.

    What its own node keeps comes from storage once, in the first epoch; it counts as `local_bytes`.
    """

    local_bytes: int = 0
    peer_bytes: int = 0
    storage_bytes: int = 0
    unanswered: int = 0


class PeerFiles:
    """A map-style dataset of files: item i is `transform(bytes of file i)`, or the bytes.

    files: paths or `FileRange`s, in the same order on all nodes; each node must be able to read all of them from its storage.
    nodes: names of all nodes as `HOST:PORT`; node: which of them this process is on. budget_bytes: of each node, or one for all (default: this
        process's memory limit less a quarter, which must then be the same everywhere).
    serve: one process of each node serves, by a thread; loaders' workers and other ranks of the node are given `serve=False`, or a pickled copy.

    A file that is shorter or longer than when this was made is refused, with its name.

    Raises: UsageError for nodes that are not addresses, a budget above the limit; PortInUse; RunError where a node has other files.
    """

    def __init__(
        self, files: Sequence[str | os.PathLike[str] | FileRange], nodes: Sequence[str], node: int,
        budget_bytes: int | Sequence[int] | None = None, *, transform: Callable[[bytes], Any] | None = None, serve: bool = True,
        timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.files = [ranges_of(f)[0] for f in files]
        self.nodes = [parse_address(n, where="nodes", own=False)[1] for n in nodes]
        if not 0 <= node < len(nodes):
            raise UsageError(f"node {node} of {len(nodes)}", where="node", hint="its place in nodes=, from 0")
        self.node, self.transform, self.timeout_s = node, transform, timeout_s
        each = [budget_bytes] * len(nodes) if budget_bytes is None or isinstance(budget_bytes, int) else list(budget_bytes)
        if len(each) != len(nodes):
            raise UsageError(f"{len(each)} budgets for {len(nodes)} nodes", where="budget_bytes", hint="one for each node, or one for all")
        budgets = [memory_budget_bytes() if b is None else b for b in each]
        memory_budget_bytes(budgets[node])
        self.sizes = [length or pages.file_bytes(path) - offset for path, offset, length in self.files]
        self.owner = _owners(self.sizes, nodes, budgets)
        facts = repr((self.sizes, [f.path.rsplit("/", 1)[-1] for f in self.files], list(nodes), budgets))
        self._key = hashlib.blake2b(facts.encode(), digest_size=16).digest()
        self._clear()
        self._server: _Server | None = _Server(self) if serve else None

    def _clear(self) -> None:
        self.served = Served()
        self._sockets: dict[int, socket.socket] = {}
        self._down: dict[int, float] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_server", "_sockets")} | {"_server": None, "_sockets": {}}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        data = self.read(range(len(self))[index])
        return self.transform(data) if self.transform else data

    def read(self, index: int) -> bytes:
        """The bytes of a file: from here where this node keeps it, from its owner, or from storage. Raises: OSError; UsageError where it changed."""
        if self._pid != os.getpid():  # a forked worker must not share its parent's connections
            self._clear()
        owner = self.owner[index]
        if owner not in (self.node, None):
            data = self._asked(owner, index)
            if data is not None:
                self.served.peer_bytes += len(data)
                return data
        path, offset, length = self.files[index]
        if not length and (size := pages.file_bytes(path) - offset) > self.sizes[index]:
            raise UsageError(f"has grown from {self.sizes[index]} to {size} bytes", where=path, hint="the file changed: make the dataset again")
        data = pages.read(path, offset, self.sizes[index])
        if owner == self.node:
            self.served.local_bytes += len(data)
        else:
            self.served.storage_bytes += len(data)
            pages.drop(path, offset, self.sizes[index])
        return data

    def _asked(self, owner: int, index: int) -> bytes | None:
        """What the owner sends; None where it does not answer, which is noted for a while. Raises: RunError where it has other files, or is
        no node."""
        if self._down.get(owner, 0.0) > time.monotonic():
            return None
        for fresh in (False, True):  # a connection that was kept may have been closed meanwhile
            kept = self._sockets.pop(owner, None)
            if kept is None and not fresh:
                continue
            try:
                channel = kept or self._connected(owner)
                channel.sendall(ASK.pack(index))
                (size,) = ANSWER.unpack(exactly(channel, ANSWER.size))
                if size == OTHER_FILES:
                    where = ":".join(map(str, self.nodes[owner]))
                    raise RunError(f"node {owner} has other files, sizes, nodes or budgets", where=where, hint="start all alike")
                if size not in (-1, self.sizes[index]):
                    where = ":".join(map(str, self.nodes[owner]))
                    raise RunError(f"node {owner} sends what no node sends", where=where, hint="another program listens there: give it another port")
                data = bytes(exactly(channel, size)) if size >= 0 else None
                self._sockets[owner] = channel
                return data
            except (OSError, EOFError):
                continue
        self._down[owner] = time.monotonic() + MAX_RETRY_S
        self.served.unanswered += 1
        return None

    def _connected(self, owner: int) -> socket.socket:
        channel = socket.create_connection(self.nodes[owner], timeout=self.timeout_s)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.sendall(HELLO.pack(WORD, self._key))
        return channel

    def close(self) -> None:
        """Closes connections, and ends serving."""
        for channel in self._sockets.values():
            channel.close()
        self._sockets.clear()
        if self._server is not None:
            self._server.close()
            self._server = None


class _Server:
    """Sends files that this node keeps, a thread for each connection."""

    def __init__(self, files: PeerFiles) -> None:
        self.files = files
        host, port = files.nodes[files.node]
        try:
            self.listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            hint = "another port, or an address of this machine"
            raise PortInUse(f"cannot serve files: {error.strerror}", where=f"{host}:{port}", hint=hint) from error
        self.open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="peer files", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                channel, _ = self.listener.accept()
                self.open.add(channel)
                threading.Thread(target=self._serve, args=(channel,), name="peer files", daemon=True).start()

    def _serve(self, channel: socket.socket) -> None:
        files = self.files
        try:
            word, key = HELLO.unpack(exactly(channel, HELLO.size))
            if word != WORD:
                return
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                (index,) = ASK.unpack(exactly(channel, ASK.size))
                if key != files._key:
                    channel.sendall(ANSWER.pack(OTHER_FILES))
                    return
                if not 0 <= index < len(files) or files.owner[index] != files.node:
                    channel.sendall(ANSWER.pack(-1))
                    continue
                path, offset, length = files.files[index]
                try:
                    file = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115  # by a text, as often as items are asked for
                except OSError:
                    channel.sendall(ANSWER.pack(-1))
                    continue
                with file:
                    if not length and os.fstat(file.fileno()).st_size != offset + files.sizes[index]:  # it changed: whoever asks looks for itself
                        channel.sendall(ANSWER.pack(-1))
                        continue
                    channel.sendall(ANSWER.pack(files.sizes[index]))
                    if channel.sendfile(file, offset, files.sizes[index]) != files.sizes[index]:
                        return  # it became shorter: the other side sees the end
        except (OSError, EOFError, struct.error):
            return
        finally:
            self.open.discard(channel)
            channel.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for channel in list(self.open):
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)


def _owners(sizes: Sequence[int], nodes: Sequence[str], budgets: Sequence[int]) -> list[int | None]:
    """The node of each file, None for one that no node has room for. In an order by hash, each goes to the node of the largest hash that has room.

    A file is known by its number: the folder may have another name on each node.
    """

    def weight(*parts: str) -> bytes:
        return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=8).digest()

    left = list(budgets)
    owner: list[int | None] = [None] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: weight(str(i))):
        for node in sorted(range(len(nodes)), key=lambda n: weight(nodes[n], str(index)), reverse=True):
            if pages.rounded(sizes[index]) <= left[node]:
                left[node] -= pages.rounded(sizes[index])
                owner[index] = node
                break
    return owner
