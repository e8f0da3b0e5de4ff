"""Predictions against closed forms where they exist, against bounds where they do not; fitting; each of the runtime's fields has an effect."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_cases import network, profile

from meshwright.decide.layout.profiled.fit import fit_runtime, suspicious_runs
from meshwright.decide.layout.profiled.predict import compute_bound_s, in_flight_bytes, predict
from meshwright.errors import Infeasible, UnknownName, UsageError
from meshwright.profile.layer_profile import Entry, LayerProfile, LayerSize, ProfileEntryMissing
from meshwright.profile.network import MeasuredRun, NetworkProfile, ProfiledLayout, ProfiledStage, Replica, TrainingRuntime

SERVERS = {"A100": 4, "V100": 4}
FREE = network(1e15, 1e15)
RUNTIME = TrainingRuntime(gpus_per_server=SERVERS, activation_bytes_per_value=2.0, gradient_bytes_per_value=2.0)


def changed(runtime=RUNTIME, **fields):
    return msgspec.structs.replace(runtime, **fields)


@given(stages=st.integers(1, 4), microbatches=st.integers(1, 8), tensor=st.sampled_from([1, 2, 4]), per_action_s=st.sampled_from([0.0, 1e-3]))
@settings(max_examples=30, deadline=None)
def test_free_communication_is_the_closed_form(stages, microbatches, tensor, per_action_s):
    """Equal stages: (micro-batches + stages - 1)(f + b) and the update of one stage's layers."""
    p = profile(layers=2 * stages)
    layout = ProfiledLayout.uniform((2,) * stages, device="A100", tensor=tensor, microbatches=microbatches)
    found = predict(p, layout, FREE, changed(per_action_s=per_action_s))
    pass_s = 2 * 0.003 / tensor + 2 * per_action_s
    assert found.time_s == pytest.approx((microbatches + stages - 1) * pass_s + 2 * 0.0005, rel=1e-4)
    assert found.closed_form_s == pytest.approx((microbatches + stages - 1) * pass_s)


@given(
    layers=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.integers(1, 3), counts=st.integers(1, 6),
    p2p=st.sampled_from(["blocking", "overlapped"]), nics=st.sampled_from([0, 1, 2]), overlap=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_never_below_the_bound_and_memory_is_the_formula(layers, data, counts, p2p, nics, overlap):
    p = profile(layers=sum(layers))
    layout = ProfiledLayout.uniform(tuple(layers), device="A100", data=data, tensor=2, microbatches=counts)
    runtime = changed(p2p=p2p, nics_per_server=nics, overlap_gradients=overlap)
    found = predict(p, layout, network(), runtime)
    assert found.time_s >= found.bound_s * (1 - 1e-9) and found.bound_s == compute_bound_s(p, layout, runtime)
    assert found.interval_s[0] <= found.time_s <= found.interval_s[1]
    assert found.memory_peak_bytes == tuple(in_flight_bytes(p, layout, runtime, s, 0) for s in range(len(layers)))


def test_ring_all_reduce_closed_form():
    """One layer on d servers: 2 (d - 1) / d of the gradient over one NIC per GPU, after the backward."""
    p = profile(layers=1)
    for d in (2, 3, 4):
        layout = ProfiledLayout.uniform((1,), device="A100", data=d, tensor=4)
        bytes_per_rank = 1e7 / 4 * 2
        expected = 0.003 / 4 + 2 * (d - 1) / d * bytes_per_rank / 1e10 + 0.0005
        assert predict(p, layout, network(), RUNTIME).time_s == pytest.approx(expected, rel=1e-3)
        shared = predict(p, layout, network(), changed(nics_per_server=1)).time_s  # all four ranks use one NIC
        assert shared - 0.003 / 4 - 0.0005 == pytest.approx(4 * (expected - 0.003 / 4 - 0.0005), rel=1e-3)


def test_large_rings_are_simulated_in_fewer_messages(monkeypatch):
    """Bytes and rates stay; only overheads per message are counted once for several."""
    from meshwright.decide.layout.profiled import iteration

    p, layout = profile(layers=2), ProfiledLayout.uniform((2,), device="A100", data=6, tensor=4)
    for overlap in (False, True):
        runtime = changed(bucket_bytes=1e6, overlap_gradients=overlap)
        whole = predict(p, layout, network(), runtime).time_s
        for most in (500, 40, 1):
            monkeypatch.setattr(iteration, "MAX_RING_STEPS", most)
            assert predict(p, layout, network(), runtime).time_s == pytest.approx(whole, rel=0.01), most
        monkeypatch.undo()


def test_groups_of_one_server_share_its_nic():
    """Two groups of two ranks in a server, ring over two servers each: four copies leave through one NIC, two through one of two."""
    p = profile(layers=2)
    replicas = tuple(Replica(device="A100", tensor=2, server=s) for s in ("x", "y"))
    layout = ProfiledLayout(stages=(ProfiledStage(layers=1, replicas=replicas),) * 2, microbatch=1, microbatches=(1, 1))
    sync = lambda nics: 2 * 1 / 2 * 1e7 / 2 * 2 / 1e10 * (4 if nics == 1 else 2 if nics == 2 else 1)  # noqa: E731
    times = {nics: predict(p, layout, network(1e15), changed(nics_per_server=nics)).time_s for nics in (0, 1, 2)}
    compute = times[0] - sync(0)
    assert times[2] - compute == pytest.approx(sync(2), rel=1e-3)
    assert sync(2) < times[1] - compute <= sync(1) * (1 + 1e-3)  # the later stage's backward ends first, so its ring is partly alone


def test_blocking_sends_cost_and_overlapped_ones_hide():
    p = profile()
    layout = ProfiledLayout.uniform((2, 2, 2), device="A100", tensor=4, microbatches=16)
    slow = network(between_Bps=5e9)  # 2 MB: 0.4 ms against 1.5 ms of computation
    overlapped, blocking = (predict(p, layout, slow, changed(p2p=p2p)).time_s for p2p in ("overlapped", "blocking"))
    compute = predict(p, layout, FREE, RUNTIME).time_s
    # a micro-batch and its gradient cross twice per period of two in flight: one crossing per micro-batch stays visible, blocking shows two
    assert compute + 16 * 0.0004 <= overlapped <= compute + 24 * 0.0004 * (1 + 1e-6) and blocking >= compute + 2 * 16 * 0.0004
    part = predict(p, layout, slow, changed(p2p="blocking", activation_copies="part")).time_s
    assert compute < part < blocking and predict(p, layout, slow, changed(p2p="blocking", activation_bytes_per_value=4.0)).time_s > blocking


def test_rates_depend_on_the_message():
    from meshwright.profile.network import RateCurve

    p = profile(layers=1)
    layout = ProfiledLayout.uniform((1,), device="A100", data=2, tensor=4)
    rising = NetworkProfile(between={("", "A100", 4, "", "A100", 4): RateCurve(c2=0, c1=1, c0=2, peak_Bps=1e11)})
    bare = 0.003 / 4 + 0.0005
    whole = predict(p, layout, rising, RUNTIME).time_s - bare
    assert whole == pytest.approx(2 * 2.5e6 / ((1.3219280948873624 + 2) * 1e9), rel=1e-4)  # two exchanges of 2.5 MB
    buckets = predict(p, layout, rising, changed(bucket_bytes=1e6)).time_s - bare
    assert buckets == pytest.approx(5e6 / 2e9, rel=1e-4)  # pieces below 10^6 bytes travel at the curve's start


def test_overheads():
    p, layout = profile(), ProfiledLayout.uniform((3, 3), device="A100", tensor=4, microbatches=4)
    base = predict(p, layout, FREE, RUNTIME).time_s
    assert predict(p, layout, FREE, changed(per_iteration_s=0.5)).time_s == pytest.approx(base + 0.5)
    assert predict(p, layout, FREE, changed(per_message_s=0.01)).time_s > base + 0.03
    assert predict(p, layout, FREE, changed(update="stage")).time_s == pytest.approx(base - 2 * 0.0005)
    constant = predict(p, layout, FREE, changed(constant_memory_bytes={"A100": 3 << 30}))
    assert constant.memory_peak_bytes[0] == in_flight_bytes(p, layout, RUNTIME, 0, 0) + (3 << 30)


def test_overlapping_gradients_helps():
    p, layout = profile(), ProfiledLayout.uniform((6,), device="A100", data=2, tensor=4, microbatches=2)
    after, during = (predict(p, layout, network(between_Bps=2e9), changed(overlap_gradients=o)).time_s for o in (False, True))
    assert during < after - 0.002


def test_stragglers_decide():
    """One pipeline of slow devices among fast ones: the sync waits for it, unless it has fewer micro-batches."""
    p = profile(devices=("A100", "V100"))
    net = network(1e15, 1e15)
    net = NetworkProfile(inside=net.inside, between={("", a, 4, "", b, 4): next(iter(net.between.values())) for a in SERVERS for b in SERVERS})
    stages = tuple(ProfiledStage(layers=3, replicas=(Replica(device="A100", tensor=4), Replica(device="V100", tensor=4))) for _ in range(2))
    even = predict(p, ProfiledLayout(stages=stages, microbatch=1, microbatches=(6, 6)), net, RUNTIME)
    uneven = predict(p, ProfiledLayout(stages=stages, microbatch=1, microbatches=(8, 4)), net, RUNTIME)
    alone = predict(p, ProfiledLayout.uniform((3, 3), device="V100", tensor=4, microbatches=6), net, RUNTIME)
    assert even.time_s == pytest.approx(alone.time_s, rel=1e-3) and uneven.time_s < even.time_s


def test_whole_layer_memory_where_there_are_no_sizes():
    p = profile(layers=2)
    entry = Entry("A100", 1, 1)
    whole = LayerProfile(model="m", layers=2, times={entry: p.times[entry]}, memory_bytes={entry: (100, 250)})
    layout = ProfiledLayout.uniform((1, 1), device="A100", microbatches=3)
    found = predict(whole, layout, network(), RUNTIME)
    assert found.memory_peak_bytes == (201, 251) and any("no layer sizes" in x for x in found.assumptions)  # two in flight, then one; state 1 byte
    sized = LayerProfile(model="m", layers=2, times={entry: p.times[entry]}, memory_bytes={entry: (100, 250)}, sizes={1: (LayerSize(2, 0, 1),) * 2})
    assert predict(sized, layout, network(), RUNTIME).memory_peak_bytes == (32 + 2 * 68, 32 + 218)


# ---- refusals ----------------------------------------------------------------------------------------------------------
def test_refusals():
    p = profile()
    with pytest.raises(UsageError, match="hold 5 layers"):
        predict(p, ProfiledLayout.uniform((5,), device="A100"), FREE, RUNTIME)
    with pytest.raises(ProfileEntryMissing, match="micro-batch 3"):
        predict(p, ProfiledLayout.uniform((6,), device="A100", microbatch=3), FREE, RUNTIME)
    filled = predict(p, ProfiledLayout.uniform((6,), device="A100", microbatch=3), FREE, RUNTIME, interpolate=True)
    assert filled.interpolated == (Entry("A100", 3, 1),) and filled.to_json()["interpolated"] == [["A100", 3, 1]]
    with pytest.raises(UsageError, match="the number of A100 per server is missing"):
        predict(p, ProfiledLayout.uniform((6,), device="A100"), FREE, TrainingRuntime())
    with pytest.raises(UsageError, match="tensor degree 4 is above the 2"):
        predict(p, ProfiledLayout.uniform((6,), device="A100", tensor=4), FREE, TrainingRuntime(gpus_per_server={"A100": 2}))
    with pytest.raises(UnknownName, match="between servers"):
        predict(p, ProfiledLayout.uniform((3, 3), device="A100", tensor=4), NetworkProfile(), RUNTIME)
    crowded = (ProfiledStage(layers=6, replicas=(Replica(device="A100", tensor=4, server="x"), Replica(device="A100", server="x"))),)
    with pytest.raises(UsageError, match="server 'x' holds 4 A100"):
        predict(p, ProfiledLayout(stages=crowded, microbatch=1, microbatches=(1, 1)), FREE, RUNTIME)


# ---- fitting -----------------------------------------------------------------------------------------------------------
TRUTH = changed(per_action_s=2e-4, per_message_s=5e-5, per_iteration_s=0.01, constant_memory_bytes={"A100": 2 << 30})


def measured_runs(count=6):
    p, net = profile(), network()
    shapes = [((6,), 1, 4), ((3, 3), 1, 8), ((2, 2, 2), 1, 4), ((3, 3), 2, 4), ((2, 2, 2), 2, 12), ((2, 1, 1, 2), 1, 16)][:count]
    layouts = [ProfiledLayout.uniform(s, device="A100", data=d, tensor=4, microbatches=m) for s, d, m in shapes]
    found = [predict(p, x, net, TRUTH, bars=False) for x in layouts]
    return p, net, [MeasuredRun(layout=x, time_s=f.time_s, memory_peak_bytes=f.memory_peak_bytes) for x, f in zip(layouts, found, strict=True)]


def test_fit_finds_what_made_the_runs():
    p, net, runs = measured_runs()
    fitted = fit_runtime(p, net, runs, RUNTIME)
    assert max(fitted.errors) < 1e-3 and fitted.used == tuple(range(6)) and not fitted.findings
    for name in ("per_action_s", "per_message_s", "per_iteration_s"):
        assert getattr(fitted.runtime, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    assert fitted.runtime.constant_memory_bytes == TRUTH.constant_memory_bytes and max(fitted.memory_errors) < 1e-9
    assert fitted.runtime.compute_error == 0.01 and fitted.runtime.source == "fitted to 6 runs"


def test_suspicious_runs_are_named_and_left_out():
    p, net, runs = measured_runs()
    fast = MeasuredRun(layout=runs[1].layout, time_s=runs[1].time_s / 5)
    copied = MeasuredRun(layout=runs[4].layout, time_s=runs[0].time_s + 1.0)
    other = MeasuredRun(layout=runs[5].layout, time_s=runs[0].time_s + 1.0)
    found = suspicious_runs(p, [*runs, fast, copied, other], RUNTIME)
    assert {(f.kind, f.runs) for f in found} == {("below-bound", (6,)), ("duplicate", (7, 8))}
    fitted = fit_runtime(p, net, [*runs, fast, copied, other], RUNTIME)
    assert fitted.used == tuple(range(6)) and max(fitted.errors) < 1e-3
    twice = fit_runtime(p, net, [*runs, runs[0]], RUNTIME)  # the same run written twice: one copy stays
    assert twice.used == tuple(range(6)) and twice.findings[0].kind == "duplicate"
    with pytest.raises(Infeasible, match="none of 1"):
        fit_runtime(p, net, [fast], RUNTIME)


def test_fit_never_gives_negative_overheads():
    p, net, runs = measured_runs()
    quick = [MeasuredRun(layout=r.layout, time_s=r.time_s * 0.9) for r in runs]
    fitted = fit_runtime(p, net, quick, changed(compute_error=0.2)).runtime
    assert min(fitted.per_action_s, fitted.per_message_s, fitted.per_iteration_s) >= 0


def test_one_run_determines_constant_memory_only():
    p, net, runs = measured_runs()
    fitted = fit_runtime(p, net, runs[:1], RUNTIME)
    assert fitted.determined == ("constant memory of A100",) and fitted.runtime.per_iteration_s == RUNTIME.per_iteration_s
    assert fitted.runtime.compute_error >= max(RUNTIME.compute_error, fitted.unfitted_error)


def test_a_fit_that_predicts_no_better_changes_nothing():
    """Times that are right on the average and off at random: overheads fitted to them would be noise."""
    p, net, runs = measured_runs()
    base = fit_runtime(p, net, runs, RUNTIME).runtime
    off = (1.04, 0.96, 0.97, 1.03, 0.95, 1.05)
    noisy = [MeasuredRun(layout=r.layout, time_s=r.time_s * x) for r, x in zip(runs, off, strict=True)]
    fitted = fit_runtime(p, net, noisy, base)
    names = ("per_action_s", "per_message_s", "per_iteration_s")
    assert fitted.validated_error <= fitted.unfitted_error
    if not fitted.determined:
        assert [getattr(fitted.runtime, n) for n in names] == [getattr(base, n) for n in names]
    few = fit_runtime(p, net, noisy[:2], base)
    assert few.runtime.compute_error > fitted.runtime.compute_error > 0.04  # wider with fewer runs


def test_the_bar_of_a_fit_contains_what_it_did_not_see():
    p, net, runs = measured_runs()
    off = (1.02, 0.99, 0.97, 1.03, 1.01, 0.98)
    noisy = [MeasuredRun(layout=r.layout, time_s=r.time_s * x) for r, x in zip(runs, off, strict=True)]
    inside = 0
    for i, run in enumerate(noisy):
        fitted = fit_runtime(p, net, noisy[:i] + noisy[i + 1 :], RUNTIME).runtime
        inside += abs(predict(p, run.layout, net, fitted, bars=False).time_s / run.time_s - 1) <= fitted.compute_error
    assert inside >= 5
