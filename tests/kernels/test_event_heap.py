"""The compiled event queue against a plain list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels.event_heap import heap_pop, heap_put, heap_repair, make_heap

SLOTS = 12
ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, SLOTS - 1), st.integers(0, 4), st.integers(0, 3)),
    st.tuples(st.just("pop")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=120))
def test_against_a_sorted_list(actions: list[tuple]) -> None:
    heap = make_heap(SLOTS)
    queued: dict[int, tuple[float, int]] = {}
    for action in actions:
        if action[0] == "put":
            _, slot, time, key = action
            heap_put(heap, slot, float(time), key)
            queued[slot] = (float(time), key)
        elif queued:
            expected = min((time, key, slot) for slot, (time, key) in queued.items())
            assert heap_pop(heap) == expected[2]
            del queued[expected[2]]
        assert heap.queued[0] == len(queued)
        assert {slot for slot in range(SLOTS) if heap.place[slot] >= 0} == set(queued)
    drained = [int(heap_pop(heap)) for _ in range(len(queued))]
    assert drained == sorted(queued, key=lambda slot: (*queued[slot], slot))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40))
def test_repair_after_writing_times(times: list[tuple[int, int]]) -> None:
    heap = make_heap(len(times))
    for slot, (before, _) in enumerate(times):
        heap_put(heap, slot, float(before), 0)
    heap.time[:] = [float(after) for _, after in times]
    heap_repair(heap)
    assert [int(heap_pop(heap)) for _ in times] == sorted(range(len(times)), key=lambda slot: (times[slot][1], slot))


def test_full_heap_keeps_its_size() -> None:
    heap = make_heap(SLOTS)
    for round_ in range(3):
        for slot in range(SLOTS):
            heap_put(heap, slot, float((slot * 5 + round_) % SLOTS), 0)
    assert heap.queued[0] == SLOTS
    times = [heap.time[heap_pop(heap)] for _ in range(SLOTS)]
    assert times == sorted(times)
