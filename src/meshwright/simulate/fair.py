"""Max-min fair links: messages in flight share every link, and rates are those of progressive filling.

Each message is a flow. The rates of all flows are raised together until a link is full; the flows on it keep that rate, the
others go on (Bertsekas and Gallager, "Data Networks", section 6.5). Links whose shares differ by less than 1e-12 relative are
one bottleneck, so symmetric flows get equal bits. Rates are worked out once per instant, after everything that happens at it, and
only for the flows that are connected through links with a flow that began or ended. A channel carries one flow at a time (its
sender waits for the end); a flow that ends where the channel's next one begins changes no rate and costs nothing. Links that only one
channel can use are no lists of flows but a cap on that channel's rate.
The sender is released when the flow ends; the message arrives after the latencies of its route.
Cost per instant: O(bottlenecks · links + hops) of the connected part, O(log) per flow whose rate changed.
"""

from __future__ import annotations

import numpy as np

from ..kernels.compile import inlined
from ..kernels.event_heap import heap_put, heap_repair

__all__ = ["fair_begin", "fair_end", "fair_settle"]

# Links and flows within this factor of the level fill up together: sums of the same rates in another order differ by less.
SAME_RATE_FACTOR = 1.0 + 1e-12


@inlined
def _refill(k, s, link, now):  # type: ignore[no-untyped-def]
    s.link[link].tokens = min(k.burst[link], s.link[link].tokens + max(0.0, s.link[link].left) * (now - s.link[link].tokens_at))
    s.link[link].tokens_at = now


@inlined
def _unmetered(k, s, c, size, now):  # type: ignore[no-untyped-def]
    """Bytes that pass at once through the token buckets of the route (0 unless every link has one)."""
    free = size
    for at in range(k.route_ptr[c], k.route_ptr[c + 1]):
        link = k.route_link[at]
        if k.burst[link] <= 0.0:
            return 0.0
        _refill(k, s, link, now)
        free = min(free, s.link[link].tokens)
    for at in range(k.route_ptr[c], k.route_ptr[c + 1]):
        s.link[k.route_link[at]].tokens -= free
    return free


@inlined
def _list(s, c):  # type: ignore[no-untyped-def]
    if s.channel[c].listed == 0:
        s.channel[c].listed = 1
        s.touched[s.work[0]] = c
        s.work[0] += 1


@inlined
def fair_begin(t, k, s, c, size, now):  # type: ignore[no-untyped-def]
    """Channel `c` begins to send `size` bytes."""
    lanes = len(t.lane_start)
    key = (lanes + c) << 32
    rest = size
    if size > 0.0 and k.route_ptr[c] < k.route_ptr[c + 1]:
        rest = size - _unmetered(k, s, c, size, now)
    else:
        rest = 0.0
    if rest <= 0.0:
        if s.channel[c].flow != 2:
            s.channel[c].flow = 3
        heap_put(s.heap, lanes + c, now, key)
        return
    for at in range(k.route_ptr[c], k.route_ptr[c + 1]):
        s.link[k.route_link[at]].busy += rest / k.rate[k.route_link[at]]
    s.channel[c].left = rest
    s.channel[c].since = now
    if s.channel[c].flow == 2:  # ended at this instant: the same flows as before, so the same rates
        heap_put(s.heap, lanes + c, now + rest / s.channel[c].rate, key)
    else:
        _list(s, c)
        s.channel[c].rate = 0.0
    s.channel[c].flow = 1


@inlined
def fair_end(s, c):  # type: ignore[no-untyped-def]
    """The message that channel `c` sends has gone."""
    if s.channel[c].flow == 1:
        s.channel[c].flow = 2
        _list(s, c)
    elif s.channel[c].flow == 3:
        s.channel[c].flow = 0


@inlined
def _attach(k, s, c):  # type: ignore[no-untyped-def]
    for at in range(k.shared_ptr[c], k.shared_ptr[c + 1]):
        link = s.link[k.shared_link[at]]
        place = link.first + link.flows
        s.member[place] = at
        s.member_channel[place] = c
        s.member_place[at] = place
        link.flows += 1


@inlined
def _detach(k, s, c):  # type: ignore[no-untyped-def]
    """The last flow of each link takes the place of the one that goes."""
    for at in range(k.shared_ptr[c], k.shared_ptr[c + 1]):
        link = s.link[k.shared_link[at]]
        link.flows -= 1
        last, place = link.first + link.flows, s.member_place[at]
        s.member[place] = s.member[last]
        s.member_channel[place] = s.member_channel[last]
        s.member_place[s.member[last]] = place


@inlined
def _collect(k, s, links):  # type: ignore[no-untyped-def]
    """All links and flows connected to the first `links` entries of the link stack: (links, flows)."""
    epoch = s.work[1]
    flows = 0
    done = 0
    while done < links:
        link = s.link[s.stack_links[done]]
        done += 1
        for place in range(link.first, link.first + link.flows):
            c = s.member_channel[place]
            flow = s.channel[c]
            if flow.mark == epoch:
                continue
            flow.mark = epoch
            flow.fresh_rate = -1.0
            s.stack_flows[flows] = c
            flows += 1
            for at in range(k.shared_ptr[c], k.shared_ptr[c + 1]):
                other = k.shared_link[at]
                if s.link[other].mark != epoch:
                    s.link[other].mark = epoch
                    s.stack_links[links] = other
                    links += 1
    return links, flows


@inlined
def _fix(k, s, c, level):  # type: ignore[no-untyped-def]
    s.channel[c].fresh_rate = level
    for at in range(k.shared_ptr[c], k.shared_ptr[c + 1]):
        link = s.link[k.shared_link[at]]
        link.left -= level
        link.open_flows -= 1


@inlined
def _open(k, s, links):  # type: ignore[no-untyped-def]
    """Begin filling: every link empty, those without flows off the stack. Returns how many remain."""
    kept = 0
    for n in range(links):
        link = s.link[s.stack_links[n]]
        link.left = k.rate[s.stack_links[n]]
        link.open_flows = link.flows
        if link.flows > 0:
            s.stack_links[kept] = s.stack_links[n]
            kept += 1
    return kept


@inlined
def _fill(k, s, links, flows):  # type: ignore[no-untyped-def]
    """Progressive filling of the links and flows on the stacks; writes `fresh_rate`. Both stacks are reordered."""
    links = _open(k, s, links)
    level = 0.0
    while flows > 0:
        s.work[2] += links + flows
        least = np.inf
        for n in range(links):
            link = s.link[s.stack_links[n]]
            least = min(least, link.left / link.open_flows)
        for n in range(flows):
            least = min(least, k.cap[s.stack_flows[n]])
        # the level at which the next link is full or a flow at its cap; rounding of `left` must not make it fall
        level = max(level, least)
        limit = level * SAME_RATE_FACTOR
        full = 0  # full links to the front
        for n in range(links):
            number = s.stack_links[n]
            if s.link[number].left / s.link[number].open_flows <= limit:
                s.stack_links[n] = s.stack_links[full]
                s.stack_links[full] = number
                full += 1
        for n in range(flows):
            if k.cap[s.stack_flows[n]] <= limit:  # it cannot use more, and leaves the rest of its links to the others
                _fix(k, s, np.int64(s.stack_flows[n]), level)
        for n in range(full):
            link = s.link[s.stack_links[n]]
            for place in range(link.first, link.first + link.flows):
                if s.channel[s.member_channel[place]].fresh_rate < 0.0:
                    _fix(k, s, np.int64(s.member_channel[place]), level)
        kept = 0
        for n in range(full, links):
            if s.link[s.stack_links[n]].open_flows > 0:
                s.stack_links[kept] = s.stack_links[n]
                kept += 1
        links = kept
        n = 0
        while n < flows:  # flows without a rate to the front
            c = s.stack_flows[n]
            if s.channel[c].fresh_rate >= 0.0:
                flows -= 1
                s.stack_flows[n] = s.stack_flows[flows]
                s.stack_flows[flows] = c
            else:
                n += 1


@inlined
def _change_rate(s, c, rate, now):  # type: ignore[no-untyped-def]
    """When channel `c`'s flow ends at its new rate."""
    flow = s.channel[c]
    # what the old rate has moved since it was set; from now on the new one
    flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
    flow.since = now
    flow.rate = rate
    return now + flow.left / rate


@inlined
def _apply(t, k, s, links, now):  # type: ignore[no-untyped-def]
    """New rates for the flows of one connected part, whose links are the first on the stack."""
    links, flows = _collect(k, s, links)
    for n in range(links):
        if k.burst[s.stack_links[n]] > 0.0:
            _refill(k, s, s.stack_links[n], now)
    _fill(k, s, links, flows)
    lanes, heap = len(t.lane_start), s.heap
    at_once = 4 * flows > heap.queued[0]  # much of the queue changes, hardly its order
    fresh = 0
    for n in range(flows):
        c = np.int64(s.stack_flows[n])
        if s.channel[c].fresh_rate != s.channel[c].rate:
            ends = _change_rate(s, c, s.channel[c].fresh_rate, now)
            if not at_once:
                heap_put(heap, lanes + c, ends, (lanes + c) << 32)
            elif heap.place[lanes + c] >= 0:
                heap.time[lanes + c] = ends
            else:
                s.channel[c].fresh_rate = ends
                s.stack_flows[fresh] = c
                fresh += 1
    if at_once:
        heap_repair(heap)
        for n in range(fresh):
            c = np.int64(s.stack_flows[n])
            heap_put(heap, lanes + c, s.channel[c].fresh_rate, (lanes + c) << 32)


@inlined
def fair_settle(t, k, s, now):  # type: ignore[no-untyped-def]
    """Nothing more happens at this instant: new rates for every flow connected to one that began or ended."""
    s.work[1] += 1
    for n in range(s.work[0]):
        c = np.int64(s.touched[n])
        s.channel[c].listed = 0
        if s.channel[c].flow == 2:
            s.channel[c].flow = 0
            _detach(k, s, c)
        elif s.channel[c].rate == 0.0:
            _attach(k, s, c)
        else:  # one flow ended and the next began
            s.touched[n] = -1
    for n in range(s.work[0]):
        c = np.int64(s.touched[n])
        if c < 0:
            continue
        alone = k.shared_ptr[c] == k.shared_ptr[c + 1]  # it has all its links for itself
        if alone and s.channel[c].flow == 1 and s.channel[c].rate != k.cap[c]:
            heap_put(s.heap, len(t.lane_start) + c, _change_rate(s, c, k.cap[c], now), (len(t.lane_start) + c) << 32)
        for at in range(k.shared_ptr[c], k.shared_ptr[c + 1]):
            link = k.shared_link[at]
            if s.link[link].mark != s.work[1]:
                s.link[link].mark = s.work[1]
                s.stack_links[0] = link
                _apply(t, k, s, 1, now)
    s.work[0] = 0
