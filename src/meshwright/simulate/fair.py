"""Max-min fair links: messages in flight share every link, and rates are those of progressive filling.

Each message is a flow. The rates of all flows are raised together until a link is full; the flows on it keep that rate, the
others go on (Bertsekas and Gallager, "Data Networks", section 6.5). Links whose shares differ by less than 1e-12 relative are
one bottleneck, so symmetric flows get equal bits. Rates are worked out once per instant, after everything that happens at it, and
only for the flows that are connected through links with a flow that began or ended. A channel carries one flow at a time (its
sender waits for the end); a flow that ends where the channel's next one begins changes no rate and costs nothing. Links that only one
channel can use are no lists of flows but a cap on that channel's rate. Channels that share the same links under the same cap are a
bundle, whose flows have one rate: links list bundles, and flows are looked at where that rate changes.
The sender is released when the flow ends; the message arrives after the latencies of its route.
Cost per instant: O(bottlenecks · links + bundles' hops) of the connected part, O(log) per flow whose rate changed.
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
    """Channel `c`'s flow joins its bundle, and with its first flow the bundle its links."""
    b = np.int64(k.bundle[c])
    bundle = s.bundle[b]
    s.active[bundle.first + bundle.flows] = c
    s.channel[c].place = bundle.first + bundle.flows
    bundle.flows += 1
    for at in range(k.shared_ptr[b], k.shared_ptr[b + 1]):
        link = s.link[k.shared_link[at]]
        link.flows += 1
        if bundle.flows == 1:
            place = link.first + link.bundles
            s.member[place] = at
            s.member_bundle[place] = b
            s.member_place[at] = place
            link.bundles += 1


@inlined
def _detach(k, s, c):  # type: ignore[no-untyped-def]
    """The last of a list takes the place of the one that goes."""
    b = np.int64(k.bundle[c])
    bundle = s.bundle[b]
    bundle.flows -= 1
    other = s.active[bundle.first + bundle.flows]
    s.active[s.channel[c].place] = other
    s.channel[other].place = s.channel[c].place
    for at in range(k.shared_ptr[b], k.shared_ptr[b + 1]):
        link = s.link[k.shared_link[at]]
        link.flows -= 1
        if bundle.flows == 0:
            link.bundles -= 1
            last, place = link.first + link.bundles, s.member_place[at]
            s.member[place] = s.member[last]
            s.member_bundle[place] = s.member_bundle[last]
            s.member_place[s.member[last]] = place


@inlined
def _collect(k, s, links):  # type: ignore[no-untyped-def]
    """All links and bundles connected to the first `links` entries of the link stack: (links, bundles, flows)."""
    epoch = s.work[1]
    bundles, flows, done = 0, 0, 0
    while done < links:
        link = s.link[s.stack_links[done]]
        done += 1
        for place in range(link.first, link.first + link.bundles):
            b = s.member_bundle[place]
            bundle = s.bundle[b]
            if bundle.mark == epoch:
                continue
            bundle.mark = epoch
            bundle.fresh_rate = -1.0
            s.stack_bundles[bundles] = b
            bundles += 1
            flows += bundle.flows
            for at in range(k.shared_ptr[b], k.shared_ptr[b + 1]):
                other = k.shared_link[at]
                if s.link[other].mark != epoch:
                    s.link[other].mark = epoch
                    s.stack_links[links] = other
                    links += 1
    return links, bundles, flows


@inlined
def _fix(k, s, b, level):  # type: ignore[no-untyped-def]
    """All flows of a bundle go at `level`. Returns how many."""
    flows = s.bundle[b].flows
    s.bundle[b].fresh_rate = level
    for at in range(k.shared_ptr[b], k.shared_ptr[b + 1]):
        link = s.link[k.shared_link[at]]
        left = link.left
        for _ in range(flows):  # one by one: the bits do not depend on who is bundled with whom
            left -= level
        link.left = left
        link.open_flows -= flows
    return flows


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
def _capped_first(k, s, bundles):  # type: ignore[no-untyped-def]
    """Bundles with a cap to the front of the stack, all without a rate yet. Returns how many."""
    capped = 0
    for n in range(bundles):
        b = s.stack_bundles[n]
        if k.cap[b] < np.inf:
            s.stack_bundles[n] = s.stack_bundles[capped]
            s.stack_bundles[capped] = b
            capped += 1
    return capped


@inlined
def _fill(k, s, links, bundles, flows):  # type: ignore[no-untyped-def]
    """Progressive filling of the links and bundles on the stacks; writes `fresh_rate`. Both stacks are reordered. A level looks at the links that are
    left, at the capped bundles that are left, and at the bundles of full links: all others would be looked at in vain, once for every level."""
    links = _open(k, s, links)
    capped = _capped_first(k, s, bundles)
    level = 0.0
    while flows > 0:
        s.work[2] += links + flows
        least = np.inf
        for n in range(links):
            link = s.link[s.stack_links[n]]
            least = min(least, link.left / link.open_flows)
        for n in range(capped):
            least = min(least, k.cap[s.stack_bundles[n]])
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
        for n in range(capped):
            if k.cap[s.stack_bundles[n]] <= limit:  # they cannot use more, and leave the rest of their links to the others
                flows -= _fix(k, s, np.int64(s.stack_bundles[n]), level)
        for n in range(full):
            link = s.link[s.stack_links[n]]
            for place in range(link.first, link.first + link.bundles):
                if s.bundle[s.member_bundle[place]].fresh_rate < 0.0:
                    flows -= _fix(k, s, np.int64(s.member_bundle[place]), level)
        kept = 0
        for n in range(full, links):
            if s.link[s.stack_links[n]].open_flows > 0:
                s.stack_links[kept] = s.stack_links[n]
                kept += 1
        links = kept
        n = 0
        while n < capped:  # those without a rate to the front
            b = s.stack_bundles[n]
            if s.bundle[b].fresh_rate >= 0.0:
                capped -= 1
                s.stack_bundles[n] = s.stack_bundles[capped]
                s.stack_bundles[capped] = b
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
    """New rates for the bundles of one connected part, whose links are the first on the stack, and for their flows that had one."""
    links, bundles, flows = _collect(k, s, links)
    for n in range(links):
        if k.burst[s.stack_links[n]] > 0.0:
            _refill(k, s, s.stack_links[n], now)
    _fill(k, s, links, bundles, flows)
    lanes, heap = len(t.lane_start), s.heap
    at_once = 4 * flows > heap.queued[0]  # much of the queue changes, hardly its order
    for n in range(bundles):
        bundle = s.bundle[s.stack_bundles[n]]
        if bundle.fresh_rate == bundle.rate:
            continue
        bundle.rate = bundle.fresh_rate
        for place in range(bundle.first, bundle.first + bundle.flows):
            c = np.int64(s.active[place])
            if s.channel[c].rate == 0.0:  # it has just begun
                continue
            ends = _change_rate(s, c, bundle.rate, now)
            if at_once:
                heap.time[lanes + c] = ends
            else:
                heap_put(heap, lanes + c, ends, (lanes + c) << 32)
    if at_once:
        heap_repair(heap)


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
        b = np.int64(k.bundle[c])
        if k.shared_ptr[b] == k.shared_ptr[b + 1]:  # it has all its links for itself
            s.bundle[b].rate = k.cap[b]
        for at in range(k.shared_ptr[b], k.shared_ptr[b + 1]):
            link = k.shared_link[at]
            if s.link[link].mark != s.work[1]:
                s.link[link].mark = s.work[1]
                s.stack_links[0] = link
                _apply(t, k, s, 1, now)
    for n in range(s.work[0]):
        c = np.int64(s.touched[n])
        if c >= 0 and s.channel[c].flow == 1:  # it has begun
            slot = len(t.lane_start) + c
            heap_put(s.heap, slot, _change_rate(s, c, s.bundle[k.bundle[c]].rate, now), slot << 32)
    s.work[0] = 0
