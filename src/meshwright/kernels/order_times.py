"""When the actions of a pipeline's orders run, compiled: each after the one before it on its device and after what it needs.

Whatever the order in which devices are visited: an action's time rests only on actions that have one already, so no later visit changes it.
Devices are visited once up and once down, so that a chain of forwards and one of backwards are both followed in one visit.
Cost: O(actions + visits · devices).
"""

from __future__ import annotations

from .compile import kernel

__all__ = ["run_orders"]

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2  # what is done of a stage and micro-batch; the input's gradient counts as the backward


@kernel
def run_orders(row, stage, microbatch, copy, count, beside, first, seconds, up, down, done, at, start, end):  # type: ignore[no-untyped-def]
    """Fills start, end of actions and at[device], the action where it stands: short of the device's last one, it waits for ever.

    row: FORWARD, BACKWARD or WEIGHTS by action; first[device]: its first action; up, down [copy, stage]: seconds of a message to the next
    stage and back; done [3, stages, micro-batches]: -1 everywhere; at: the first actions. `count`, `beside`: as in `decide.pipeline.problem.Action`.
    """
    devices, top = len(at), done.shape[1] - 1
    moved = True
    while moved:
        moved = False
        for turn in range(2 * devices - 2 if devices > 1 else 1):
            d = turn if turn < devices else 2 * devices - 2 - turn
            while at[d] < first[d + 1]:
                i = at[d]
                s, what = stage[i], row[i]
                begin = end[i - 1] if i > first[d] else 0.0
                if beside[i] >= 0 and what == FORWARD and beside[i] < top:  # both halves of a pair begin when both can
                    needed = done[BACKWARD, beside[i] + 1, microbatch[i + 1]]
                    if needed < 0:
                        break
                    begin = max(begin, needed + down[copy[i + 1], beside[i]])
                known = True
                for m in range(microbatch[i], microbatch[i] + count[i]):
                    if what == FORWARD:
                        if s:
                            needed = done[FORWARD, s - 1, m]
                            known = known and needed >= 0
                            begin = max(begin, needed + up[copy[i], s - 1])
                        continue
                    needed = done[BACKWARD if what == WEIGHTS else FORWARD, s, m]
                    known = known and needed >= 0
                    begin = max(begin, needed)
                    if what == BACKWARD and s < top:
                        needed = done[BACKWARD, s + 1, m]
                        known = known and needed >= 0
                        begin = max(begin, needed + down[copy[i], s])
                if not known:
                    break
                start[i] = begin
                end[i] = begin + seconds[i]
                # the stage before waits for the gradient of its output, which I gives as B does; nobody waits for W
                for m in range(microbatch[i], microbatch[i] + count[i]):
                    done[what, s, m] = end[i]
                at[d] += 1
                moved = True
