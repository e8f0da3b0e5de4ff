"""Profiles fitted to steps: on steps that the model itself made, they find the model again."""

from __future__ import annotations

import random

import msgspec
import pytest

from meshwright.check.traffic import replayed_ns
from meshwright.decide.traffic import TrafficProblem, groups_of, timeline
from meshwright.probe.traffic.steps import ProbeStep, fit_profile, probe_groups
from meshwright.testing.traffic import traffic_profile
from meshwright.traffic import TrafficProfile


def steps_of(truth: TrafficProfile, codec: str, late: float) -> list[list[ProbeStep]]:
    """What `measure_traffic` would see of a machine that is as the profile says, one step in three `late` times as long."""
    problem = TrafficProblem.of(truth)
    found = []
    for groups in probe_groups(truth.tensors, codec):
        end, rows = timeline(problem, groups)
        step = ProbeStep(
            groups=groups, ready_ns=tuple(t.ready_ns for t in truth.tensors), encode_ns=tuple(problem.times_of(g)[0] for g in groups),
            encoded_ns=tuple(r.encode_end_ns for r in rows), arrived_ns=tuple(r.exchange_end_ns for r in rows),
            decoded_ns=tuple(r.decode_end_ns for r in rows), backward_ns=truth.compute_ns, end_ns=end + truth.finish_ns,
        )  # fmt: skip
        slow = {f: getattr(step, f) for f in step.__dataclass_fields__ if f != "groups"}
        slow = {f: tuple(int(late * x) for x in v) if isinstance(v, tuple) else int(late * v) for f, v in slow.items()}
        found.append([step, step, ProbeStep(groups=groups, **slow)])
    return found


@pytest.mark.parametrize(("permille", "late", "near"), [(0, 1.0, 0.05), (400, 1.0, 0.05), (1200, 3.0, 0.12)])
def test_a_machine_that_follows_the_model_is_found_again(permille, late, near):
    rng = random.Random(permille)
    truth = traffic_profile(rng, 40, 3, permille)
    truth = msgspec.structs.replace(truth, finish_ns=700_000, codecs=tuple(
        msgspec.structs.replace(c, payload_bytes=_payloads(truth, c.codec)) for c in truth.codecs))  # fmt: skip
    found, probes = fit_profile(
        truth.tensors, [c.codec for c in truth.codecs], [s for c in truth.codecs for s in steps_of(truth, c.codec, late)], truth.ranks
    )
    assert found.finish_ns == truth.finish_ns and found.tensors == truth.tensors
    assert abs(found.interference_permille - permille) <= 60 + permille / 4
    assert len(probes) == 12 and all(abs(p.measured_ns / p.predicted_ns - 1) < near for p in probes)
    for codec in ("none", "topk", "fp16"):
        for _ in range(5):
            ends = sorted(rng.sample(range(1, 40), rng.randint(0, 12))) + [40]
            groups = [(g.first, g.last, codec) for g in groups_of(ends, codec)]
            assert replayed_ns(found, groups) == pytest.approx(replayed_ns(truth, groups), rel=near)


def _payloads(truth: TrafficProfile, codec: str) -> tuple[int, ...]:
    from meshwright.codec.codec import parse_codec

    return tuple(sum(r.expected for r in parse_codec(codec).rounds([t.shape])) for t in truth.tensors)
