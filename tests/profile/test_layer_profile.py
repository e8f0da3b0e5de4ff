"""Look-ups, what lacks, interpolation, what looks wrong; rates by message size."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import LAYERS, profile

from meshwright.errors import UnknownName, UsageError
from meshwright.profile.layer_profile import Entry, LayerProfile, LayerTime, ProfileEntryMissing
from meshwright.profile.network import MeasuredRun, NetworkProfile, ProfiledLayout, ProfiledStage, RateCurve, Replica, TrainingRuntime


def test_look_ups():
    p = profile()
    assert p.time_s("A100", 2, 4, 3, "forward") == pytest.approx(0.0005) and p.time_s("A100", 2, 4, 3, "backward") == pytest.approx(0.001)
    assert p.time_s("A100", 1, 1, 0, "update") == 0.0005 and p.span(Entry("A100", 1, 1), 1, 3).forward_s == pytest.approx(0.003)
    assert (p.devices, p.microbatches, p.tensors, p.gaps()) == (("A100",), (1, 2, 4), (1, 2, 4), ())


def test_missing_entries_are_named():
    p = profile()
    with pytest.raises(ProfileEntryMissing, match=r"lacks A100, micro-batch 3, tensor degree 1 and 1 more") as caught:
        p.require([Entry("A100", 1, 1), Entry("A100", 3, 1), Entry("A100", 8, 2)])
    assert caught.value.data["missing"] == [["A100", 3, 1], ["A100", 8, 2]] and caught.value.exit_code == 3
    with pytest.raises(UnknownName, match="'V100'"):
        p.require([Entry("V100", 1, 1)])


@pytest.mark.parametrize(("layer", "count"), [(0, 7), (6, 1), (-1, 1), (0, 0)])
def test_layers_that_do_not_exist(layer, count):
    with pytest.raises(UsageError, match="do not exist"):
        profile().span(Entry("A100", 1, 1), layer, count)
    if count == 1:
        with pytest.raises(UsageError, match="there is no layer"):
            profile().time_s("A100", 1, 1, layer, "forward")


def test_rows_of_another_length_are_refused():
    with pytest.raises(UsageError, match="5 layers where the profile has 6"):
        LayerProfile(model="m", layers=6, times={Entry("a", 1, 1): (LayerTime(1, 1, 1),) * 5})


@given(offset=st.floats(0, 1), slope=st.floats(0.01, 1), at=st.integers(1, 64))
def test_interpolation_is_exact_on_lines_and_marked(offset, slope, at):
    row = lambda m: tuple(LayerTime(offset + slope * m, 2 * (offset + slope * m), 0.1) for _ in range(2))  # noqa: E731
    p = LayerProfile(model="m", layers=2, times={Entry("a", m, 1): row(m) for m in (2, 8, 32)})
    done = p.completed([Entry("a", at, 1)])
    assert done.times[Entry("a", at, 1)][0].forward_s == pytest.approx(offset + slope * at)
    assert (Entry("a", at, 1) in done.interpolated) == (at not in (2, 8, 32)) and not p.interpolated


def test_one_measured_size_gives_proportion_and_other_degrees_nothing():
    p = LayerProfile(model="m", layers=1, times={Entry("a", 2, 1): (LayerTime(1.0, 2.0, 0.5),)})
    assert p.completed([Entry("a", 4, 1)]).times[Entry("a", 4, 1)] == ((2.0, 4.0, 0.5, 0.0),)
    with pytest.raises(ProfileEntryMissing):
        p.completed([Entry("a", 2, 4)])


def test_a_falling_line_stays_positive():
    p = LayerProfile(model="m", layers=1, times={Entry("a", m, 1): (LayerTime(t, t, t),) for m, t in ((1, 4.0), (2, 1.0))})
    assert all(0 < x <= 1 for x in p.completed([Entry("a", 64, 1)]).times[Entry("a", 64, 1)][0][:3])


def test_findings():
    p = profile(microbatches=(1, 2), tensors=(1,))
    assert p.findings() == ()
    copied = LayerProfile(model="m", layers=LAYERS, times={**p.times, Entry("B", 2, 4): p.times[Entry("A100", 1, 1)]}, sizes=p.sizes)
    kinds = {f.kind: f for f in copied.findings()}
    assert kinds["duplicate"].entries == (Entry("A100", 1, 1), Entry("B", 2, 4)) and "falling" not in kinds
    falling = LayerProfile(model="m", layers=LAYERS, times={**p.times, Entry("A100", 2, 1): tuple(LayerTime(1e-4, 1e-4, 0) for _ in range(LAYERS))})
    assert [f.kind for f in falling.findings()] == ["falling"]
    empty = LayerProfile(model="m", layers=2, times={Entry("a", 1, 1): (LayerTime(0, 0, 1), LayerTime(1, 1, 1))})
    assert [(f.kind, f.detail) for f in empty.findings()] == [("no-time", "layers 0 take no time")]
    bound_s = 2 * 1e7 * 1000 / 1e15  # forward takes 1 ms: bound at 2e13 FLOP/s
    assert bound_s == 2e-5
    assert [f.kind for f in p.findings(peak_flops={"A100": 1.9e13}, values_per_sample=1000)] == ["below-bound"] * 2
    assert p.findings(peak_flops={"A100": 2.1e13}, values_per_sample=1000) == ()
    assert [f.kind for f in p.completed([Entry("A100", 3, 1)]).findings()] == ["interpolated"]
    assert p.completed([Entry("A100", 3, 1)]).findings()[0].to_json()["entries"] == [["A100", 3, 1]]


def test_sizes_of_a_degree_that_was_not_measured():
    p = profile(tensors=(1, 2))
    assert p.size(8, 0)[:3] == (1e7 / 8, 4e6 / 8, 1e6)
    with pytest.raises(ProfileEntryMissing, match="no layer sizes"):
        LayerProfile(model="m", layers=1, times={Entry("a", 1, 1): (LayerTime(1, 1, 1),)}).size(1, 0)


# ---- rates -------------------------------------------------------------------------------------------------------------
def test_rate_polynomial_in_decimal_gigabytes():
    curve = RateCurve(c2=0.5, c1=1.0, c0=2.0, peak_Bps=1e12)
    assert curve.rate_Bps(8e6) == pytest.approx((0.5 * 9 + 3 + 2) * 1e9)
    assert curve.rate_Bps(1.0) == curve.rate_Bps(1e6) == 2e9  # below 10^6 bytes the polynomial means nothing
    assert RateCurve(c2=0.5, c1=1.0, c0=2.0, peak_Bps=3e9).rate_Bps(8e6) == 3e9


@given(st.floats(1, 1e13), st.floats(1, 1e13))
def test_a_falling_parabola_stays_at_its_top(a, b):
    curve = RateCurve(c2=-0.1, c1=1.0, c0=2.0, peak_Bps=1e12)
    assert curve.rate_Bps(min(a, b)) <= curve.rate_Bps(max(a, b)) <= 4.5e9 * (1 + 1e-9)


def test_rates_that_are_not_there():
    with pytest.raises(UsageError, match="gives -1e"):
        RateCurve(c2=0, c1=0, c0=-1, peak_Bps=1).rate_Bps(1)
    net = NetworkProfile(between={("a", "G", 4, "b", "G", 4): RateCurve(c2=0, c1=0, c0=1, peak_Bps=1e9)})
    assert net.between_curve(("b", "G", 4), ("a", "G", 4)).c0 == 1  # the other direction
    with pytest.raises(UnknownName, match="between servers for a, G, 4, c, G, 4") as caught:
        net.between_curve(("a", "G", 4), ("c", "G", 4))
    assert "a, G, 4, b, G, 4" in caught.value.hint
    with pytest.raises(UnknownName, match="inside a server"):
        net.inside_curve("G", 4)


# ---- layouts and runtimes ----------------------------------------------------------------------------------------------
def test_layouts():
    layout = ProfiledLayout.uniform((3, 2, 1), device="A100", data=2, tensor=4, microbatch=2, microbatches=8)
    assert (layout.gpus, layout.global_batch, layout.data, layout.layers_of(2)[0]) == (24, 32, 2, 5) and layout.entries() == (Entry("A100", 2, 4),)
    assert MeasuredRun(layout=layout, time_s=1.0).memory_peak_bytes == ()


@pytest.mark.parametrize(
    "change", [{"stages": ()}, {"microbatches": (10**9,)}, {"microbatches": (1,) * 65537},
               {"microbatches": ()}, {"microbatch": 0}, {"microbatches": (0,)}, {"microbatches": (1, 1)},
               {"stages": (ProfiledStage(layers=0, replicas=(Replica(device="a"),)),)},
               {"stages": (ProfiledStage(layers=1, replicas=(Replica(device="a", tensor=0),)),)}],
)  # fmt: skip
def test_senseless_layouts(change):
    good = {"stages": (ProfiledStage(layers=1, replicas=(Replica(device="a"),)),), "microbatch": 1, "microbatches": (1,)}
    ProfiledLayout(**good)
    with pytest.raises(UsageError):
        ProfiledLayout(**{**good, **change})


@pytest.mark.parametrize(
    "change", [{"per_action_s": -1.0}, {"per_message_s": math.nan}, {"bucket_bytes": math.inf}, {"compute_error": 1.0}, {"gpus_per_server": {"a": 0}},
               {"constant_memory_bytes": {"a": -1}}],
)  # fmt: skip
def test_senseless_runtimes(change):
    with pytest.raises(UsageError, match="runtime"):
        TrainingRuntime(**change)
