"""Formatting of quantities for people: one function each, used by every screen, line, report and error.

Measured ones are written without an exponent, with three significant digits at most (a loss has four); what a person
has set, with all its digits. ``tests/house`` finds formats and units that are written by hand elsewhere.
"""

from __future__ import annotations

import math
import time

_DASH = "-"


def rate_text(mbit: float) -> str:
    """Data rate of a link: ``94 Mbit/s``, ``0.5 Mbit/s``, ``10.8 Gbit/s``."""
    if mbit < 0.0995:
        return f"{three_digits(mbit * 1000)} kbit/s"
    if mbit < 9999.5:
        return mbit_text(mbit)
    return f"{three_digits(mbit / 1000)} Gbit/s"


def mbit_text(mbit: float) -> str:
    """Data rate beside another one, both in one unit: ``22500 Mbit/s``."""
    return f"{rate_figure(mbit)} Mbit/s"


def rate_figure(mbit: float) -> str:
    """Data rate in Mbit/s without the unit, for a column or a map that names it once: ``94``, ``10800``."""
    return three_digits(mbit) if mbit < 999.5 else f"{mbit:.0f}"


def time_text(seconds: float) -> str:
    """Duration of a step or an exchange: ``3.72 ms``, ``351 ms``, ``2.51 s``, ``1:24`` from 100 s on."""
    if seconds >= 99.95:
        return duration_text(seconds)
    return f"{three_digits(seconds)} s" if seconds >= 0.9995 else f"{three_digits(seconds * 1000)} ms"


def duration_text(seconds: float | None) -> str:
    """Duration of a run: ``1:02:03`` or ``2:03``; ``-`` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return _DASH
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def age_text(seconds: float | None) -> str:
    """For how long something is so already: ``4 s``, ``3 min`` or ``2 h 6 min``; ``-`` if unknown."""
    if seconds is None:
        return _DASH
    return span_text(round(seconds) if seconds < 100 else 60 * round(seconds / 60))


def span_text(seconds: float) -> str:
    """Length of time in a sentence, as of a limit, an age or an absence: ``0.5 s``, ``30 s``, ``1 min 40 s``,
    ``12 min``, ``7 h 12 min``, ``2 days 3 h``."""
    if seconds < 99.5 and seconds != 60:
        return f"{three_digits(seconds)} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 5 and seconds_left:
        return f"{minutes} min {seconds_left} s"
    minutes = round(seconds / 60)
    (hours, minutes_left), days = divmod(minutes, 60), minutes // 1440
    if days:
        return f"{days} day{'s' * (days > 1)}" + (f" {hours % 24} h" if hours % 24 else "")
    return f"{hours} h" + (f" {minutes_left} min" if minutes_left else "") if hours else f"{minutes} min"


def position_text(seconds: float) -> str:
    """Place in a recording: ``3.21 s``."""
    return f"{seconds:.2f} s"


def latency_figure(milliseconds: float) -> str:
    """Round trip in milliseconds without the unit, for a column or a map that names it: ``0.35``, ``3.7``, ``120``."""
    digits = max(0, 1 - math.floor(math.log10(milliseconds))) if milliseconds >= 1e-3 else 0
    text = f"{milliseconds:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def offset_text(seconds: float) -> str:
    """Difference of a clock: ``+0.3 s`` ahead, ``-2 s`` behind."""
    return f"{'-' if seconds <= -0.05 else '+'}{span_text(round(abs(seconds), 1))}"


def left_text(seconds: float | None) -> str:
    """How much longer something takes, to be appended: ``, about 0:12 left``; empty where that is not known."""
    return "" if seconds is None else f", about {duration_text(math.ceil(seconds))} left"


def clock_text(moment: float, now: float | None = None) -> str:
    """Local time of day: ``14:03:21``; seen from ``now`` ``14:03``, on another day with the weekday or the date."""
    if not 0 <= moment < 1e11:
        return "--:--:--" if now is None else "--:--"
    at = time.localtime(moment)
    if now is None:
        return time.strftime("%H:%M:%S", at)
    day = "" if time.localtime(now)[:3] == at[:3] else "%a " if abs(now - moment) < 6 * 86_400 else "%d %b "
    return time.strftime(f"{day}%H:%M", at)


def throughput_text(samples_per_second: float) -> str:
    """Samples that are trained on in a second: ``12.3 samples/s``."""
    return f"{throughput_figure(samples_per_second)} samples/s"


def throughput_figure(samples_per_second: float) -> str:
    """Samples/s without the unit, for a column that names it: ``4.0``, ``12.3``, ``1,234``; keeps a decimal where it
    changes from moment to moment."""
    return f"{samples_per_second:.1f}" if 0.95 <= samples_per_second < 99.95 else figure_text(samples_per_second)


def flops_text(per_second: float) -> str:
    """Floating-point operations in a second: ``812 GFLOP/s``, ``12.3 TFLOP/s``."""
    giga = per_second / 1e9
    return f"{three_digits(giga)} GFLOP/s" if giga < 999.5 else f"{three_digits(giga / 1000)} TFLOP/s"


def temperature_text(celsius: float) -> str:
    """``71 °C``."""
    return f"{celsius:.0f} °C"


def bytes_text(count: float) -> str:
    """Bytes sent or stored, in decimal units: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:  # else it would round to 1000 of this unit
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def memory_text(count: float) -> str:
    """Memory of a machine, a GPU or a process in units of 2^30 bytes, which makers call GB: ``24 GB``, ``7.6 GB``,
    ``412 MB``."""
    size = count / 2**30
    if size < 0.95:
        return f"{count / 2**20:.0f} MB"
    return f"{size:.0f} GB" if size >= 9.95 else f"{size:.1f} GB"


def machine_text(name: str) -> str:
    """Return a machine's name to stand in a sentence, where one letter would read as a word."""
    return f"machine {name}" if len(name) == 1 else name


def share_text(share: float) -> str:
    """Share of a whole as a percentage: ``30 %``, ``5 %``, ``0.4 %``, ``0 %``."""
    percent = share * 100
    text = f"{percent:.0f}" if percent >= 9.95 or percent < 0.05 else f"{percent:.1f}".removesuffix(".0")
    return f"{text} %"


def error_rate_text(rate: float) -> str:
    """Share of words or letters that are wrong, as a percentage with one decimal: ``12.0 %``, ``0.4 %``."""
    return f"{rate * 100:.1f} %"


def power_text(watts: float) -> str:
    """``85 W``, ``1.2 kW``."""
    return f"{three_digits(watts)} W" if watts < 999.5 else f"{three_digits(watts / 1000)} kW"


def energy_text(joules: float | None) -> str:
    """``12.3 Wh``; ``-`` if unknown."""
    if joules is None or not math.isfinite(joules):
        return _DASH
    hours = joules / 3600
    return f"{three_digits(hours)} Wh" if hours < 999.5 else f"{three_digits(hours / 1000)} kWh"


def figure_text(value: float) -> str:
    """Number without a unit: ``0.0872``, ``9.55``, ``9,551,000``."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return three_digits(value) if abs(value) >= 0.001 or value == 0 else f"{value:.6f}".rstrip("0").rstrip(".")


def loss_text(value: float | None) -> str:
    """Loss, and other metrics without a unit: ``2.000``, ``0.08712``; four digits, so that it keeps its width; ``-`` if
    unknown. One that explodes or vanishes is ``over 10^9`` or ``under 10^-6``."""
    if value is None or not math.isfinite(value):
        return _DASH
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-6:
        return "over 10^9" if abs(value) > 1 else "under 10^-6"
    if abs(value) >= 9999.5:
        return f"{value:,.0f}"
    digits = 3 - math.floor(math.log10(abs(float(f"{value:.3e}")))) if value else 3
    return f"{value:.{digits}f}"


def setting_text(value: float) -> str:
    """Number that a person has set, as it is typed, with all its digits: ``0.5``, ``30``, ``1e-05``."""
    return f"{value:.10g}"


def three_digits(value: float) -> str:
    """Three significant digits, without an exponent and without trailing zeros of a fraction."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else _DASH
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
