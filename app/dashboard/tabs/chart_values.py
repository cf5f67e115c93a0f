"""Values of charts with their units, as they stand at an axis or in the list of series."""

from __future__ import annotations

LABEL_CELLS = 8
"""Fewest cells of the labels at the left, and the most of a value."""


def value_text(value: float, unit: str = "") -> str:
    """Return a value with its unit, at most as wide as the axis labels."""
    usual = _usual_text(value, unit)
    if len(usual) <= LABEL_CELLS:
        return usual
    value, unit = (
        value * 100 if unit == "%" else value / 1e12 if unit == "B" else value,
        "TB" if unit == "B" else unit,
    )
    plain = [f"{value:.0f}"] if abs(value) >= 1000 else []
    powers = [f"{value:.{digits}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e") for digits in (2, 1, 0)]
    texts = [f"{number} {unit}".rstrip() for number in (*plain, *powers)]
    return next((text for text in texts if len(text) <= LABEL_CELLS), texts[-1])


def _digits(value: float, count: int) -> str:
    """Return so many significant digits, or all before the point."""
    return f"{value:.{count}g}" if abs(value) < 10**count - 0.5 else f"{value:.0f}"


def _usual_text(value: float, unit: str) -> str:
    if unit == "%":
        return f"{_digits(value * 100, 3)} %"
    if unit == "B":
        for name in ("B", "kB", "MB", "GB", "TB"):
            if abs(value) < 999.5 or name == "TB":
                return f"{_digits(value, 3)} {name}"
            value /= 1000
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 0.9995 else f"{_digits(value, 3)} s"
    if unit in ("°C", "W"):
        return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value / 1000:.3g} k{unit}"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return _digits(value, 4)
