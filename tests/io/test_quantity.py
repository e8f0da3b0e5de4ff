"""Quantities are exact and units mean one thing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.io.quantity import parse_flops, parse_rate_Bps, parse_size_bytes, parse_time_s, show_rate, show_size, show_time


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate_Bps, "1Gbit/s", 125_000_000),
        (parse_rate_Bps, "200 Mbit/s", 25_000_000),
        (parse_rate_Bps, "100 MB/s", 100_000_000),
        (parse_rate_Bps, "12.5GB/s", 12_500_000_000),
        (parse_rate_Bps, "8bit/s", 1),
        (parse_rate_Bps, "1GiB/s", 1 << 30),
        (parse_rate_Bps, "1e3 kB/s", 1_000_000),
        (parse_size_bytes, "80GB", 80 * 10**9),
        (parse_size_bytes, "80GiB", 80 << 30),
        (parse_size_bytes, "7 B", 7),
        (parse_size_bytes, "0.5KiB", 512),
        (parse_flops, "312 TFLOP/s", 312 * 10**12),
        (parse_flops, "50GFLOP/s", 50 * 10**9),
        (parse_time_s, "5us", 5e-6),
        (parse_time_s, "5µs", 5e-6),
        (parse_time_s, "0.35 us", 3.5e-7),
        (parse_time_s, "20ms", 0.02),
        (parse_time_s, "0s", 0.0),
    ],
)
def test_values(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_rate_Bps, "1Gbps"),
        (parse_rate_Bps, "1GBps"),
        (parse_rate_Bps, "1"),
        (parse_rate_Bps, "1bit/s"),  # an eighth of a byte
        (parse_rate_Bps, "-1GB/s"),
        (parse_rate_Bps, "nan GB/s"),
        (parse_rate_Bps, "inf GB/s"),
        (parse_rate_Bps, "1e999GB/s"),
        (parse_rate_Bps, "1 GGB/s"),
        (parse_rate_Bps, "9" * 100 + "B/s"),
        (parse_rate_Bps, "1GB/s\nx"),
        (parse_size_bytes, "1.3 B"),
        (parse_size_bytes, "1GB/s"),
        (parse_size_bytes, ""),
        (parse_flops, "1 GFLOPS"),
        (parse_time_s, "5 days"),
        (parse_time_s, "us"),
    ],
)
def test_refused(parse, text):
    with pytest.raises(ValueError, match=r"must be a number|unknown unit|no unit|in two ways|not a whole number"):
        parse(text)


def test_what_is_wrong_with_a_unit_is_said():
    for parse, text, said in (
        (parse_rate_Bps, "25", "has no unit; write it like '1Gbit/s'"),
        (parse_rate_Bps, "25Gbps", "'Gbps' is read in two ways; write 1Gbit/s for bits, 1GB/s for bytes"),
        (parse_size_bytes, "16", "has no unit; write it like '80GB'"),
        (parse_time_s, "5ps", "unknown unit 'ps'; write it like '5us'"),
        (parse_time_s, "5", "has no unit; write it like '5us'"),
    ):
        with pytest.raises(ValueError) as error:
            parse(text)
        assert str(error.value) == said


@given(st.integers(0, 10**15))
def test_any_whole_number_of_bytes_is_exact(n):
    assert parse_size_bytes(f"{n} B") == n == parse_rate_Bps(f"{8 * n} bit/s")


@given(st.text(max_size=70))
def test_nothing_but_ValueError(text):
    for parse in (parse_rate_Bps, parse_size_bytes, parse_flops, parse_time_s):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert value >= 0


def test_for_people():
    assert [show_rate(x) for x in (25_000_000, 125_000_000, 12_500_000_000, 999, 1000, 999_950_000)] == [
        "25 MB/s", "125 MB/s", "12.5 GB/s", "999 B/s", "1 kB/s", "1 GB/s",
    ]  # fmt: skip
    assert show_size(80 * 10**9) == "80 GB"
    assert [show_time(x) for x in (0, 3.5e-7, 1.3e-6, 0.02, 2.0)] == ["0 s", "350 ns", "1.3 us", "20 ms", "2 s"]
