"""Files kept by several nodes: who keeps which, what crosses the network, what happens when a node is gone. Nodes are ports of this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
from pathlib import Path

import pytest

from effort import few
from meshwright.data import FileRange, PeerFiles, pages, peers
from meshwright.data.peers import ANSWER, ASK, HELLO, _owners
from meshwright.errors import PortInUse, RunError, UsageError
from ports import free_port

SIZES = [3000 + 100 * i for i in range(24)]


def ports(count: int) -> list[str]:
    """Names of nodes, drawn until each of them keeps some of the files: owners follow from the names, and a port may be any."""
    while True:
        names = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        if {*_owners(SIZES, names, [1 << 30] * count)} == {*range(count)}:
            return names


@pytest.fixture
def paths(tmp_path):
    made = []
    for i, size in enumerate(SIZES):
        path = tmp_path / f"{i:02d}"
        path.write_bytes(bytes([i]) * size)
        made.append(str(path))
    return made


@pytest.fixture
def cluster(paths):
    """Three nodes with room for all; the folder has another name on one of them."""
    names, folder = ports(3), Path(paths[0]).parent
    other = folder / "other"
    other.symlink_to(folder)
    nodes = [PeerFiles([str(other / Path(p).name) for p in paths] if i == 1 else paths, names, i, 24 * 8192, timeout_s=100) for i in range(3)]
    yield nodes
    for node in nodes:
        node.close()


def test_every_node_reads_every_file_and_storage_is_not_asked(cluster, paths):
    for node in cluster:
        assert [node[i] for i in range(24)] == [bytes([i]) * (3000 + 100 * i) for i in range(24)] and len(node) == 24
    total = sum(3000 + 100 * i for i in range(24))
    assert all(n.served.storage_bytes == 0 and n.served.unanswered == 0 for n in cluster)
    assert all(n.served.local_bytes + n.served.peer_bytes == total for n in cluster)
    assert sum(n.served.local_bytes for n in cluster) == total  # each file has one owner
    assert cluster[0].owner == cluster[1].owner == cluster[2].owner and {*cluster[0].owner} == {0, 1, 2}


@pytest.mark.parametrize("nodes", range(2, 2 + few(5)))
def test_a_node_more_moves_its_share_alone(nodes):
    sizes = [1000] * 2000
    names = [f"h{i}:1" for i in range(nodes)]
    before, after = _owners(sizes, names, [1 << 40] * nodes), _owners(sizes, [*names, "new:1"], [1 << 40] * (nodes + 1))
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert all(b == nodes for _, b in moved) and abs(len(moved) - 2000 / (nodes + 1)) < 200
    assert min(before.count(n) for n in range(nodes)) > 0.8 * 2000 / nodes


def test_what_no_node_has_room_for_comes_from_storage(paths):
    names = ports(2)
    nodes = [PeerFiles(paths, names, i, [5 * 8192, 3 * 8192], transform=len, timeout_s=100) for i in range(2)]
    try:
        assert [nodes[0][i] for i in range(24)] == [3000 + 100 * i for i in range(24)] and nodes[0][-1] == 5300
        kept = [nodes[0].owner.count(0), nodes[0].owner.count(1)]
        assert nodes[0].owner.count(None) == 24 - sum(kept) > 0
        assert sum(pages.rounded(s) for s, o in zip(nodes[0].sizes, nodes[0].owner, strict=True) if o == 0) <= 5 * 8192
        nodes[0].read(nodes[0].owner.index(None))
        assert nodes[0].served.storage_bytes > 0
    finally:
        for node in nodes:
            node.close()


def test_a_node_that_is_gone_is_done_without(cluster, paths, monkeypatch):
    monkeypatch.setattr(peers, "MAX_RETRY_S", 1e9)
    cluster[1].close()
    assert [cluster[0][i] for i in range(24)] == [bytes([i]) * (3000 + 100 * i) for i in range(24)]
    assert cluster[0].served.unanswered == 1  # it is not asked again for a while
    assert cluster[0].served.storage_bytes == sum(s for s, o in zip(cluster[0].sizes, cluster[0].owner, strict=True) if o == 1)
    cluster[0]._down.clear()
    back = PeerFiles(paths, [":".join(map(str, n)) for n in cluster[0].nodes], 1, 24 * 8192, timeout_s=100)
    before = cluster[0].served.peer_bytes
    mine = cluster[0].owner.index(1)
    assert cluster[0][mine] == bytes([mine]) * (3000 + 100 * mine) and cluster[0].served.peer_bytes > before
    back.close()


def test_a_file_that_its_owner_cannot_read(cluster, paths):
    index = cluster[0].owner.index(1)
    kept = Path(paths[index]).read_bytes()
    Path(paths[index]).unlink()
    with pytest.raises(FileNotFoundError):
        cluster[0][index]
    Path(paths[index]).write_bytes(kept[:100])  # shorter than it was
    with pytest.raises(UsageError, match="ends at byte 100"):
        cluster[0][index]


def test_a_file_that_has_grown_is_not_cut_off(cluster, paths):
    for owner in (0, 1):  # this node, another one
        index = cluster[0].owner.index(owner)
        kept = Path(paths[index]).read_bytes()
        Path(paths[index]).write_bytes(kept + b"more")
        with pytest.raises(UsageError, match=rf"has grown from {len(kept)} to {len(kept) + 4} bytes"):
            cluster[0][index]
        Path(paths[index]).write_bytes(kept)
        assert cluster[0][index] == kept


def test_another_program_at_a_nodes_address(paths):
    """An SSH server, say, which speaks first: eight of its letters would be a size."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        names = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{listener.getsockname()[1]}"]
        node = PeerFiles(paths, names, 0, 24 * 8192, serve=False, timeout_s=100)
        node.owner = [1] * 24

        def speak() -> None:
            channel, _ = listener.accept()
            channel.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
            with contextlib.suppress(OSError):
                channel.recv(4096)
            channel.close()

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(RunError, match="node 1 sends what no node sends"):
            node[0]
        thread.join()
        node.close()


def test_a_copy_in_a_worker_has_connections_of_its_own(cluster, paths):
    index = cluster[0].owner.index(2)
    cluster[0][index]
    copy = pickle.loads(pickle.dumps(cluster[0]))
    assert copy._server is None and not copy._sockets and copy[index] == cluster[0][index]
    copy.close()
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.write(writer, struct.pack("<?q", cluster[0][index] == bytes([index]) * (3000 + 100 * index), cluster[0].served.peer_bytes))
        os._exit(0)
    os.waitpid(pid, 0)
    assert struct.unpack("<?q", os.read(reader, struct.calcsize("<?q"))) == (True, 3000 + 100 * index)
    os.close(reader)
    os.close(writer)


def test_nodes_that_were_started_with_other_files(paths):
    names = ports(2)
    first, second = PeerFiles(paths, names, 0, 24 * 8192, timeout_s=100), PeerFiles(paths[:-1], names, 1, 24 * 8192)
    try:
        with pytest.raises(RunError, match="node 1 has other files"):
            first[first.owner.index(1)]
    finally:
        first.close()
        second.close()


def test_strangers_are_not_served(cluster):
    def asked(*sent: bytes) -> bytes:
        found = b""
        with socket.create_connection(cluster[0].nodes[0], timeout=100) as channel, contextlib.suppress(OSError):  # a stranger is cut off
            for each in sent:
                channel.sendall(each)
            channel.shutdown(socket.SHUT_WR)
            while part := channel.recv(4096):
                found += part
        return found

    hello = HELLO.pack(b"mw-peer1", cluster[0]._key)
    assert asked(b"GET / HTTP/1.1\r\n\r\n" * 3) == b"" and asked(b"x") == b""
    for index in (-1, 24, cluster[0].owner.index(1)):  # no item, or one that another node keeps
        assert asked(hello, ASK.pack(index)) == ANSWER.pack(-1)
    assert asked(HELLO.pack(b"mw-peer1", bytes(16)), ASK.pack(0)) == ANSWER.pack(-2)
    mine = cluster[0].owner.index(0)
    assert asked(hello, ASK.pack(mine)) == ANSWER.pack(3000 + 100 * mine) + bytes([mine]) * (3000 + 100 * mine)


def test_parts_of_files(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(256)) * 64)
    names = ports(2)
    parts = [FileRange(str(tmp_path / "a"), 5000, 300), FileRange(str(tmp_path / "a"), 9000)]
    nodes = [PeerFiles(parts, names, i, 1 << 20, timeout_s=100) for i in range(2)]
    try:
        for node in nodes:
            assert [len(node[0]), len(node[1])] == [300, 16384 - 9000] and node[0][0] == 5000 % 256
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"nodes": ["here"]}, "'here' is no address"), ({"nodes": ["a:99999"]}, "is no address"), ({"node": 1}, "node 1 of 1"),
        ({"budget_bytes": [1, 2]}, "2 budgets for 1 nodes"), ({"budget_bytes": 1 << 60}, "memory limit"),
    ],
)  # fmt: skip
def test_arguments_of_peers(paths, over, message):
    given = {"nodes": ports(1), "node": 0, "budget_bytes": 10, **over}
    with pytest.raises(UsageError, match=message):
        PeerFiles(paths, serve=False, **given)


def test_a_port_in_use(paths):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse, match="cannot serve files"):
            PeerFiles(paths, [f"127.0.0.1:{taken.getsockname()[1]}"], 0, 10)


def test_threads_end(cluster):
    cluster[0][cluster[0].owner.index(1)]
    for node in cluster:
        node.close()
    for thread in [t for t in threading.enumerate() if t.name == "peer files"]:
        thread.join(timeout=60)
    assert not [t for t in threading.enumerate() if t.name == "peer files"]
