"""The page of a comparison of strategies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from app.comparison import SeedRun, StrategyComparison, StrategyResult, StrategyTimes
from app.html_report.comparison import (
    NAME,
    comparison_charts,
    comparison_page,
    last_exchanged,
    remarks,
    result_tables,
    write_comparison,
)
from profiles.errors import BadInput


def row(name: str, *losses: float, hours: float = 1.0) -> StrategyResult:
    runs = tuple(
        SeedRun(seed, "validation", ((0.0, 4.0), (100.0, loss)), 10, 100, 1e6, 0.5, 7)
        for seed, loss in enumerate(losses)
    )
    mean = sum(losses) / len(losses)
    times = (StrategyTimes(20, 1, hours * 3600, hours * 1800), StrategyTimes(100, 1, hours * 360))
    curve = ((0.0, 4.0), (100.0, mean))
    return StrategyResult(name, runs=runs, losses=losses, curve=curve, sent=1e6, memory=28, times=times)


def result(*rows: StrategyResult) -> StrategyComparison:
    return StrategyComparison(rows, "validation", 100, 1.5, rows[0].strategy, 0.5)


def test_curves_over_samples_have_a_band_and_those_over_time_are_as_long_as_predicted() -> None:
    samples, slow, fast = comparison_charts(result(row("allreduce", 1.0, 2.0, hours=3), row("diloco", 1.6)))
    high, low, mean, other = samples.figure["data"]
    assert (list(low["y"]), list(high["y"]), list(mean["y"])) == ([4, 1], [4, 2], [4, 1.5])
    assert other["name"] == "diloco" and list(other["x"]) == [0, 100]
    assert [list(one["x"])[-1] for one in slow.figure["data"]] == pytest.approx([3, 1])  # hours
    assert [list(one["x"])[-1] for one in fast.figure["data"]] == pytest.approx([18, 6])  # minutes
    assert "20 Mbit/s" in slow.title and "100 Mbit/s" in fast.title


def test_what_synchronisations_told_is_a_curve_and_its_last_point_a_cell() -> None:
    told = {"compression": ((50.0, 1.0), (100.0, 4.0)), "delta norm": ((100.0, 0.123456),)}
    one, silent = row("allreduce", 1.0, 2.0), row("diloco", 1.6)
    found = result(replace(one, runs=tuple(replace(run, exchanges=told) for run in one.runs)), silent)
    compression, norm = comparison_charts(found)[3:]
    (curve,) = compression.figure["data"]
    assert (compression.title, norm.title, list(curve["y"])) == ("Compression", "Delta norm", [1, 4])
    assert "<td>allreduce</td><td>-</td><td>4</td><td>0.123</td><td>-</td><td>-</td>" in last_exchanged(found).replace(
        ' class="number"', ""
    )
    assert last_exchanged(result(silent)) == ""


def test_a_loss_that_is_not_a_number_has_no_point() -> None:
    (chart, *_) = comparison_charts(result(row("allreduce", math.inf)))
    assert [list(one["x"]) for one in chart.figure["data"]] == [[0]]


def test_tables_say_what_was_not_reached_and_what_is_missing() -> None:
    found = result(row("allreduce", 1.0, 2.0), StrategyResult("demo", refused="no room"))
    losses, to_end, to_loss = result_tables(found, 2)
    assert losses.rows == (("allreduce", "1.500 ± 0.707", "1.0 MB", "28 B"), ("demo", "refused", "-", "-"))
    assert to_end.rows == (("allreduce", "1:00:00", "6:00"),) and to_loss.rows == (("allreduce", "30:00", "-"),)
    assert remarks(found) == ["demo: refused: no room"]


def test_the_page_loads_nothing_and_no_name_becomes_markup(tmp_path: Path) -> None:
    page = comparison_page(result(row("allreduce", 1.0), StrategyResult("<b>", refused="<i>why</i>")), "<u>mine", 2)
    assert "default-src 'none'" in page and "&lt;u&gt;mine" in page and "<i>why" not in page and "<b>:" not in page
    path = write_comparison(result(row("allreduce", 1.0)), "mine", 2, tmp_path)
    assert path == tmp_path / NAME and path.read_text().endswith("</html>\n")
    with pytest.raises(BadInput):
        write_comparison(result(row("allreduce", 1.0)), "mine", 2, tmp_path / "gone")
