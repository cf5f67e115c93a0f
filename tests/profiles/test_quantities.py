"""What each quantity must look like, by hand; and no exponent, whatever the value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import quantities
from profiles.quantities import (
    bytes_text,
    duration_text,
    energy_text,
    figure_text,
    latency_figure,
    loss_text,
    memory_text,
    offset_text,
    rate_figure,
    rate_text,
    setting_text,
    share_text,
    span_text,
    throughput_text,
    time_text,
)


@pytest.mark.parametrize(
    ("mbit", "text"),
    [(10830, "10.8 Gbit/s"), (941.2, "941 Mbit/s"), (57.44, "57.4 Mbit/s"), (0.5, "0.5 Mbit/s"), (0.02, "20 kbit/s")],
)
def test_rates(mbit: float, text: str) -> None:
    assert rate_text(mbit) == text


def test_a_rate_in_a_column_has_all_its_digits() -> None:
    assert [rate_figure(mbit) for mbit in (10830, 941.2, 57.44)] == ["10830", "941", "57.4"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00372, "3.72 ms"), (0.3509, "351 ms"), (2.512, "2.51 s"), (1.0, "1 s"), (84, "84 s"), (144.2, "2:24")],
)
def test_times_of_a_step(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (30, "30 s"), (60, "1 min"), (100, "1 min 40 s"), (120, "2 min"), (720, "12 min"),
     (25_920, "7 h 12 min"),     (7200, "2 h"), (90_000, "1 day 1 h"), (172_800, "2 days")],
)  # fmt: skip
def test_lengths_of_time_in_a_sentence(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_offsets_of_a_clock_have_a_sign() -> None:
    assert [offset_text(seconds) for seconds in (0.31, -2.04, -0.01)] == ["+0.3 s", "-2 s", "+0 s"]


def test_round_trips_have_two_digits() -> None:
    assert [latency_figure(ms) for ms in (0.351, 0.4, 3.66, 121.4, 0)] == ["0.35", "0.4", "3.7", "121", "0"]


def test_what_rounds_to_a_thousand_takes_the_next_unit() -> None:
    assert [bytes_text(size) for size in (999_499, 999_999, 999_999_999)] == ["999 kB", "1.0 MB", "1.0 GB"]


def test_a_loss_has_four_digits() -> None:
    losses = [loss_text(loss) for loss in (2, 0.087123, 9.9996, 12345.6, 0, float("nan"), 1e30, 1e-9)]
    assert losses == ["2.000", "0.08712", "10.00", "12,346", "0.000", "-", "over 10^9", "under 10^-6"]


def test_samples_of_a_second_keep_a_decimal() -> None:
    assert [throughput_text(rate) for rate in (4, 12.34, 152.3, 0.0312)] == [
        "4.0 samples/s",
        "12.3 samples/s",
        "152 samples/s",
        "0.0312 samples/s",
    ]


def test_what_a_person_has_set_keeps_its_digits() -> None:
    assert [setting_text(value) for value in (0.5, 30.0, 1e-5, 1234.5678)] == ["0.5", "30", "1e-05", "1234.5678"]


@pytest.mark.parametrize(("seconds", "text"), [(84, "1:24"), (3723, "1:02:03"), (None, "-"), (float("inf"), "-")])
def test_times_of_a_run(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_memory_is_what_a_maker_writes_and_bytes_are_decimal() -> None:
    assert [memory_text(size) for size in (25_236_000_000, 8 * 2**30, 412 * 2**20)] == [
        "24 GB",
        "8.0 GB",
        "412 MB",
    ]
    assert [bytes_text(size) for size in (999, 85_400_000, 1_900_000_000)] == ["999 B", "85.4 MB", "1.9 GB"]


@pytest.mark.parametrize(
    ("share", "text"), [(0.3, "30 %"), (0.004, "0.4 %"), (0.0, "0 %"), (0.05, "5 %"), (1.383, "138 %")]
)
def test_shares(share: float, text: str) -> None:
    assert share_text(share) == text


@pytest.mark.parametrize(("value", "text"), [(9551000, "9,551,000"), (9.551, "9.55"), (0.08712, "0.0871"), (0, "0")])
def test_figures_without_a_unit(value: float, text: str) -> None:
    assert figure_text(value) == text


def test_energy() -> None:
    assert [energy_text(joules) for joules in (44_280, 7_200_000, None)] == ["12.3 Wh", "2 kWh", "-"]


@given(st.sampled_from(["rate_text", "rate_figure", "time_text", "bytes_text", "figure_text", "energy_text",
                        "loss_text", "span_text", "throughput_text", "latency_figure"]),
       st.floats(0, 1e15))  # fmt: skip
def test_no_quantity_has_an_exponent(name: str, value: float) -> None:
    assert "e+" not in getattr(quantities, name)(value)
    assert "e-" not in getattr(quantities, name)(value)
