"""Jobs at a switch: who may join, quotas, foreign and broken packets, workers and switches that die or freeze, and hosts that finish alone."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from aggregate_rig import HERE, Switch, floats, fold, numbers, reduced, seat, switch, together

from meshwright.errors import GroupFailed, LinkLost, NotFinite, PortInUse, RankFrozen, RunTimeout, Unsupported, UsageError
from meshwright.run.aggregate.client import Stream, ask_status
from meshwright.run.aggregate.control import Hop
from meshwright.run.aggregate.doctor import status_lines
from meshwright.run.aggregate.fallback import GlooHosts, Reducer
from meshwright.run.aggregate.frames import CONTRIBUTION, JOIN, MAGIC, RESULT, VERSION
from meshwright.run.aggregate.server import Aggregator
from meshwright.run.aggregate.sockets import Address, parse_address
from meshwright.run.aggregate.switch_loop import MAX_JOBS


def packet(kind: int, world: int, *, worker: int = 0, version: int = VERSION, chunk: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack("<HBBIQ", MAGIC, kind | version << 4, worker, world, chunk) + payload


def test_packets_of_others_change_nothing() -> None:
    parts = numbers(2, 64 * 40)
    rng = np.random.default_rng(0)
    with switch() as up:
        ending = threading.Event()

        def disturb() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                while not ending.is_set():
                    job = next(iter(up.aggregator.known.values()), None)
                    world = 0 if job is None else job.world
                    for sent in (
                        b"", b"\0", rng.bytes(15), rng.bytes(300), packet(CONTRIBUTION, world, payload=bytes(256)),
                        packet(RESULT, world, payload=bytes(256)), packet(CONTRIBUTION, world, version=2), packet(CONTRIBUTION, world ^ 1),
                        packet(CONTRIBUTION, world, worker=61, payload=bytes(255)),
                        packet(CONTRIBUTION, world, chunk=1 << 39), packet(JOIN, 0, payload=b"[" * 900), packet(JOIN, 0, payload=rng.bytes(100)),
                        packet(JOIN, 0, payload=b'{"job": "\xae", "worker": 0}'),
                    ):  # fmt: skip
                        sock.sendto(sent, (up.address.host, up.address.port))
                    time.sleep(0.001)

        noise = threading.Thread(target=disturb)
        noise.start()
        try:
            results = reduced(up.address, parts, times=20)
        finally:
            ending.set()
            noise.join()
        counters = up.aggregator.status().counters
    total = np.sum(parts, axis=0, dtype=np.int64)
    assert all((x == total).all() for result in results for x in result)
    assert counters["foreign"] > 0 and counters["malformed"] > 0


def test_a_truncated_packet_of_a_worker_itself_ends_the_job() -> None:
    with switch() as up:

        def work(worker: int) -> Any:
            stream = Stream.join(up.address, seat(worker, 2))
            if worker:
                stream.sock.send(packet(CONTRIBUTION, stream.world, worker=1, payload=bytes(8)))
                time.sleep(0.1)
            return stream.all_reduce(np.ones(64, np.int32))

        results = together(2, work)
    assert all(isinstance(x, GroupFailed) and x.data["code"] == "mismatch" for x in results)


def test_several_jobs_share_the_slots_and_one_too_many_is_refused() -> None:
    with switch(slots=16) as up:
        first, second = (Stream.join(up.address, seat(0, 1, job=name, slots=8)) for name in "ab")
        assert up.aggregator.status().free_slots == 0
        with pytest.raises(Unsupported, match=r"0 of 16 slots are free; job '[ab]' has 8, last heard \d+ s ago, of the 600 s that"):
            Stream.join(up.address, seat(0, 1, job="c"))
        with pytest.raises(Unsupported, match="it runs already, with another such worker, last heard"):
            Stream.join(up.address, seat(0, 1, job="a"))
        for stream in (first, second):
            assert stream.all_reduce(np.arange(3000, dtype=np.int32))[2999] == 2999
        first.close()
        with Stream.join(up.address, seat(0, 1, job="c", slots=99)) as third:  # takes what there is
            assert third.slots == 8
        second.close()


def test_a_failed_job_holds_no_slots() -> None:
    """They were held for ten minutes: the next run under another name was refused."""
    with switch(slots=8) as up:
        for name in ("a", "b", "c"):
            with Stream.join(up.address, seat(0, 1, job=name)) as stream, pytest.raises(NotFinite):
                stream.all_reduce(np.array([1.0, np.nan], np.float32))
        with Stream.join(up.address, seat(0, 1, job="d")) as stream:
            assert stream.slots == 8 and stream.all_reduce(np.arange(3000, dtype=np.int32))[2999] == 2999


def test_more_failed_jobs_than_a_switch_has_places_for() -> None:
    with switch(slots=8) as up:
        for k in range(MAX_JOBS + 2):
            Stream.join(up.address, seat(0, 1, job=f"job {k}")).abandon("a test")
        with Stream.join(up.address, seat(0, 1, job="whole")) as stream:
            assert stream.slots == 8 and stream.all_reduce(np.arange(3000, dtype=np.int32))[2999] == 2999


def test_who_gave_up_waiting_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.run.aggregate.server.GONE_S", 1000.0)  # no busy machine's thread is taken for one that gave up
    with switch(slots=8) as up:

        def long_ago() -> None:
            for job in up.aggregator.known.values():
                job.asked_at.update({worker: asked_s - 2000.0 for worker, asked_s in job.asked_at.items()})

        with pytest.raises(RunTimeout, match="workers have joined"):
            Stream.join(up.address, seat(0, 2, timeout_s=0.2))
        long_ago()
        streams = together(2, lambda worker: Stream.join(up.address, seat(worker, 2)))
        assert together(2, lambda worker: streams[worker].all_reduce(np.ones(3, np.int32)).tolist()) == [[2, 2, 2]] * 2
        together(2, lambda worker: streams[worker].close())
        with pytest.raises(RunTimeout, match="workers have joined"):
            Stream.join(up.address, seat(0, 2, job="other", timeout_s=0.2))
        long_ago()
        with Stream.join(up.address, seat(0, 1, job="third")) as stream:  # has the slots of those who gave up
            assert stream.slots == 8


@pytest.mark.parametrize(
    ("more", "said"), [({"words": 32}, "slots of 64"), ({"mode": "median"}, "no mode"), ({"children": 3}, "other figures")],
)  # fmt: skip
def test_who_does_not_fit_is_refused(more: dict[str, Any], said: str) -> None:
    with switch() as up, ThreadPoolExecutor(1) as other:
        waiting = other.submit(lambda: Stream.join(up.address, seat(0, 2)).close())
        while not up.aggregator.known and not waiting.done():
            time.sleep(0.001)
        with pytest.raises(Unsupported, match=said):
            Stream.join(up.address, seat(1, **({"children": 2} | more)))
        Stream.join(up.address, seat(1, 2)).close()  # who fits is let in still
        waiting.result()


def test_a_fold_needs_aligned_switches() -> None:
    """Three workers below one of two switches: their sum is no node of the fold over all."""
    with switch() as up:
        for mode, number, refused in (("tree", 0, True), ("sum", 0, False), ("tree", 1, False)):
            above = (Hop("127.0.0.1:9", number, 2),)
            with pytest.raises(Unsupported if refused else RunTimeout, match="power of two" if refused else "workers have joined"):
                Stream.join(up.address, seat(0, 3, workers=6, mode=mode, above=above, job=f"{mode}{number}", timeout_s=20.0 if refused else 0.3))


def test_bad_seats_and_addresses() -> None:
    for wrong in ({"worker": 2, "children": 2}, {"worker": 0, "children": 63}, {"worker": 0, "children": 2, "workers": 1}):
        with pytest.raises(UsageError):
            seat(**wrong)
    with pytest.raises(UsageError):
        seat(0, 1, words=3)
    for text in ("here", ":1", "127.0.0.1:70000", "no.such.host.invalid:1"):
        with pytest.raises(UsageError):
            parse_address(text)
    with pytest.raises(UsageError, match="--slots"):
        Aggregator(HERE, slots=0)
    with pytest.raises(UsageError, match="no address of this machine"):
        Aggregator(Address("192.0.2.1", 0))
    with switch() as up, pytest.raises(PortInUse):
        Aggregator(up.address)


def test_nobody_at_the_address() -> None:
    with pytest.raises(LinkLost, match="no switch answers"):
        Stream.join(Address("127.0.0.1", 9), seat(0, 1, silence_s=0.2))
    with pytest.raises(LinkLost):
        ask_status(Address("127.0.0.1", 9), timeout_s=0.2)


def test_a_worker_that_never_comes() -> None:
    with switch() as up, pytest.raises(RunTimeout, match="1 of 2 workers"):
        Stream.join(up.address, seat(0, 2, timeout_s=0.5))


def test_a_frozen_worker_is_named_with_its_slot() -> None:
    with switch() as up:
        ready = threading.Barrier(3)

        def work(worker: int) -> Any:
            stream = Stream.join(up.address, seat(worker, 3, silence_s=3.0, timeout_s=12.0))
            stream.all_reduce(np.ones(10, np.int32))
            ready.wait()
            if worker == 1:
                # Its silence is a fault before the others' patience ends the job, which the first line would say.
                while not (found := status_lines(ask_status(up.address)))[1]:
                    time.sleep(0.1)
                return found
            return stream.all_reduce(np.ones(1000, np.int32))

        results = together(3, work)
    lines, wrong = results[1]
    assert wrong and re.match(r"job job: slot 1 waits for worker 1, silent for \d+\.\d s", lines[0])
    assert "  slot 1, chunk 1: waits for worker 1" in "\n".join(lines)
    errors = [results[0], results[2]]
    assert any(isinstance(x, RankFrozen) and x.data == {"worker": 1, "slot": 1} for x in errors)
    assert all(isinstance(x, RankFrozen) or (isinstance(x, GroupFailed) and x.data["worker"] == 1) for x in errors)


def test_a_switch_that_is_started_again_knows_nobody() -> None:
    up = Switch(slots=64, words=64)
    stream = Stream.join(up.address, seat(0, 1))
    up.stop(silently=True)
    again = Switch.__new__(Switch)
    again.aggregator = Aggregator(up.address, slots=64, words=64)
    again.ending = threading.Event()
    again.thread = threading.Thread(target=lambda: again.aggregator.serve(again.ending.is_set))
    again.thread.start()
    try:
        with pytest.raises(GroupFailed, match="does not know this job"):
            stream.all_reduce(np.ones(10, np.int32))
    finally:
        again.stop()


# ---- hosts -----------------------------------------------------------------------------------------------------------------
def reducers(up: Switch, workers: int, work: Any, **more: Any) -> list[Any]:
    """`work(reducer, worker)` on every worker, the hosts' own group over gloo."""
    import torch.distributed as dist

    store = dist.HashStore()

    def one(worker: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        group = dist.ProcessGroupGloo(store, worker, workers, options)
        reducer = Reducer.join(up.address, seat(worker, workers, silence_s=2.0, **more), GlooHosts(group), worker)
        return work(reducer, worker)

    return together(workers, one)


@pytest.mark.parametrize("silently", [False, True])
def test_hosts_finish_when_the_switch_dies(silently: bool) -> None:
    parts = numbers(3, 64 * 30)
    up = Switch(slots=64, words=64)

    def work(reducer: Reducer, worker: int) -> list[Any]:
        results = []
        for call in range(4):
            if call == 2 and worker == 0:
                up.stop(silently=silently)
            results.append(reducer.all_reduce(parts[worker] + call))
        reducer.close()
        return [results, reducer.why]

    found = reducers(up, 3, work)
    total = np.sum(parts, axis=0, dtype=np.int64)
    for results, why in found:
        assert all((x == total + 3 * call).all() for call, x in enumerate(results))
        assert isinstance(why, LinkLost if silently else (GroupFailed, LinkLost))


def test_who_is_ahead_gives_its_result_to_who_is_behind() -> None:
    """Worker 1's last result never comes, and then the switch dies: worker 0 is in its next call, or about to end."""
    for last in (False, True):
        up = Switch(slots=64, words=64)

        def work(reducer: Reducer, worker: int, last: bool = last, up: Switch = up) -> list[Any]:
            stream = reducer.stream
            assert stream is not None
            if worker == 1:  # its packets reach the switch, the answers go nowhere
                stream.box.heads[:, 2] = 0
                threading.Timer(0.5, up.stop, kwargs={"silently": True}).start()
            results = [reducer.all_reduce(np.full(100, worker + 1, np.int32))]
            if not last:
                results.append(reducer.all_reduce(np.full(100, 10 * worker + 10, np.int32)))
            reducer.close()
            return results

        for results in reducers(up, 2, work):
            assert [set(x.tolist()) for x in results] == ([{3}] if last else [{3}, {30}])


def test_hosts_sum_what_the_switch_refuses() -> None:
    parts = floats(2, 100)
    parts[1][5] = np.inf
    with switch() as up:
        found = reducers(up, 2, lambda reducer, worker: reducer.all_reduce(parts[worker].copy()))
        assert all(np.isinf(x[5]) and np.allclose(np.delete(x, 5), np.delete(parts[0] + parts[1], 5)) for x in found)
        large = [np.array([2**30, 5], np.int32), np.array([-(2**30), 6], np.int32)]
        assert all(x.tolist() == [0, 11] for x in reducers(up, 2, lambda reducer, worker: reducer.all_reduce(large[worker].copy()), job="large"))
        wraps = reducers(up, 2, lambda reducer, _: reducer.all_reduce(np.array([2**30], np.int32)), job="wraps")
        assert all(isinstance(x, Unsupported) and "leaves 32 bits" in str(x) for x in wraps)


def test_a_switch_that_refuses_is_done_without() -> None:
    with switch(slots=4) as up, Stream.join(up.address, seat(0, 1, job="other", slots=4)):
        found = reducers(up, 2, lambda reducer, worker: (reducer.all_reduce(np.full(3, worker, np.int32)), type(reducer.why)))
        parts = floats(5, 300)  # in a job of mode tree the hosts fold: the bits are those of the switch
        more = {"mode": "tree", "slots": 4, "job": "folds"}
        folded = reducers(up, 5, lambda reducer, worker: (reducer.all_reduce(parts[worker].copy()), type(reducer.why)), **more)
    assert all(x.tolist() == [1, 1, 1] and why is Unsupported for x, why in found)
    assert all(x.tobytes() == fold(parts).tobytes() and why is Unsupported for x, why in folded)
