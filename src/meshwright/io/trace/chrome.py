"""Chrome's trace format (JSON): opens in Perfetto and in chrome://tracing.

Events used: `M` (names and order of processes and threads), `X` (complete slices), `s`/`f` (flows), `C` (counters). Times in µs.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .slices import Trace, batched

__all__ = ["chrome_bytes"]

# A flow event belongs to the slice that encloses it, so it lies a little inside: the arrow leaves near the start of the send and
# arrives near the end of the receive, which is never earlier.
_INSIDE_SHARE = 0.01


def chrome_bytes(trace: Trace) -> bytes:
    """The trace as one JSON document, an event per line."""
    head = b'{"displayTimeUnit":"ms","otherData":{"title":%s},"traceEvents":[\n' % msgspec.json.encode(trace.title)
    out, first = bytearray(head), True
    for batch in batched(_events(trace)):  # millions of events are never there as objects at once
        out += (b"" if first else b",\n") + ",\n".join(batch).encode()
        first = False
    out += b"\n]}\n"
    return bytes(out)


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _events(trace: Trace) -> Iterator[str]:
    for pid, name in enumerate(trace.processes, 1):
        yield f'{{"ph":"M","pid":{pid},"name":"process_name","args":{{"name":{_json(name)}}}}}'
        yield f'{{"ph":"M","pid":{pid},"name":"process_sort_index","args":{{"sort_index":{pid}}}}}'
    for tid, track in enumerate(trace.tracks, 1):
        where = f'"pid":{track.process + 1},"tid":{tid}'
        yield f'{{"ph":"M",{where},"name":"thread_name","args":{{"name":{_json(track.name)}}}}}'
        yield f'{{"ph":"M",{where},"name":"thread_sort_index","args":{{"sort_index":{tid}}}}}'
    yield from _slices(trace)
    yield from _flows(trace)
    for counter in trace.counters:
        head = f'{{"ph":"C","pid":{counter.process + 1},"name":{_json(counter.name)},"ts":'
        key = _json(counter.unit or "value")
        for time_s, value in zip(counter.time_s.tolist(), counter.value.tolist(), strict=True):
            yield f'{head}{time_s * 1e6:.3f},"args":{{{key}:{value:.15g}}}}}'


def _slices(trace: Trace) -> Iterator[str]:
    names, categories = [_json(x) for x in trace.names], [_json(x) for x in trace.categories]
    places = [f'"pid":{track.process + 1},"tid":{tid}' for tid, track in enumerate(trace.tracks, 1)]
    s = trace.slices
    columns = (s.track, s.start_s * 1e6, (s.end_s - s.start_s) * 1e6, s.name, s.category, s.step, s.iteration)
    for track, start, duration, name, category, step, iteration in zip(*(c.tolist() for c in columns), strict=True):
        args = f',"args":{{"step":{step},"iteration":{iteration}}}' if step >= 0 else ""
        yield f'{{"ph":"X",{places[track]},"ts":{start:.3f},"dur":{duration:.3f},"name":{names[name]},"cat":{categories[category]}{args}}}'


def _flows(trace: Trace) -> Iterator[str]:
    s = trace.slices
    start, length = s.start_s * 1e6, (s.end_s - s.start_s) * 1e6
    tracks = s.track.tolist()
    places = [f'"pid":{track.process + 1},"tid":{tid}' for tid, track in enumerate(trace.tracks, 1)]
    for number, (source, target) in enumerate(trace.flows.tolist(), 1):
        common = f'"id":{number},"name":"message","cat":"message"'
        yield f'{{"ph":"s",{places[tracks[source]]},"ts":{start[source] + _INSIDE_SHARE * length[source]:.3f},{common}}}'
        yield f'{{"ph":"f","bp":"e",{places[tracks[target]]},"ts":{start[target] + (1 - _INSIDE_SHARE) * length[target]:.3f},{common}}}'
