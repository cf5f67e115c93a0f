"""The evaluations of a run: a row a metric and split, and their texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from app.console import visible
from app.run_view.metrics import SplitResults, metric_label, metric_text, metrics_of, unfinished_text
from app.run_view.run_series import evaluation_series, of_run
from app.run_view.run_state import RunState

_CLEARLY = 1.05
"""Ratio of a metric to its first value from which on a model got worse."""
_SURE = 2
"""Evaluations after the best one that have to be worse: one alone may be chance."""


class MetricRow(NamedTuple):
    """One metric on one split."""

    split: str
    metric: str
    results: SplitResults
    later: bool = False
    """Whether another split was evaluated later."""

    @property
    def label(self) -> str:
        return metric_label(self.metric)

    @property
    def texts(self) -> tuple[str, ...]:
        """The first, best and last value."""
        evaluations = (self.results.first, self.results.best, self.results.last)
        return tuple(metric_text(self.metric, result.figures.get(self.metric)) for result in evaluations)

    @property
    def change(self) -> str:
        """``98.1 % -> 12.3 %``: the first and the last value; one value after a single evaluation."""
        texts = self.texts
        return texts[-1] if self.results.first is self.results.last else f"{texts[0]} -> {texts[-1]}"


def metric_rows(state: RunState) -> list[MetricRow]:
    """Return a row for every metric of the newest evaluation of every split."""
    newest = max((results.last.step for results in state.evaluations.values()), default=0)
    return [
        MetricRow(split, metric, results, results.last.step < newest)
        for split, results in state.evaluations.items()
        for metric in metrics_of(results.last)
    ]


def evaluation_lines(state: RunState) -> list[str]:
    """Return one line a metric and split in columns: ``WER test 97.9 % -> 3.1 %``; with the step where another split
    was evaluated later. Texts that the trained model did not end, and a model that got worse, are sentences."""
    rows, cut = [], dict[str, float]()
    for row in metric_rows(state):
        if row.metric != "cut":
            rows.append((row.label, visible(row.split), row.change + (f" (step {row.results.last.step})" * row.later)))
        elif row.results.last.step:
            cut[visible(row.split)] = row.results.last.figures[row.metric]
    widths = [max((len(cells[column]) for cells in rows), default=0) for column in (0, 1)]
    lines = [f"{label:{max(7, widths[0])}} {split:{widths[1]}}  {change}" for label, split, change in rows]
    return [*lines, *([unfinished_text(cut)] if cut else ()), *_worsened(state), *learnt_by_heart(state)]


def _worsened(state: RunState) -> Iterator[str]:
    """Yield a sentence for each split on which the model is clearly worse than before the first step."""
    for split, results in state.evaluations.items():
        before, after = metrics_of(results.first), metrics_of(results.last)
        judged = {next(iter(after), ""), "loss"}
        if results.first.step or not judged <= before.keys() & after.keys() & {"wer", "cer", "loss"}:
            continue
        if all(after[name] > _CLEARLY * before[name] for name in judged):
            yield f"{visible(split)}: worse than before training; a lower learning_rate or fewer epochs may help"


def learnt_by_heart(state: RunState) -> Iterator[str]:
    """Yield a sentence for a held-out split whose loss is higher in the last two evaluations, by more than it went up
    and down before, while that of training goes on falling."""
    trained = of_run(state.curves, "loss").points()
    for split in [name for name in ("validation", "test") if name in state.evaluations][:1]:
        points = [point for point in of_run(state.curves, evaluation_series(split, "loss")).points() if point.step > 0]
        best = min(points, key=lambda point: point.mean, default=None)
        if best is None:
            continue
        before = [point.mean for point in points if point.step <= best.step]
        since = [point.mean for point in points if point.step > best.step]
        noise = max((later - earlier for earlier, later in pairwise(before)), default=0.0)
        if len(since) < _SURE or min(since[-_SURE:]) <= _CLEARLY * best.mean + max(0.0, noise):
            continue
        then = [point.mean for point in trained if point.step <= best.step]
        if then and trained[-1].mean < then[-1] / _CLEARLY:
            risen = " -> ".join(metric_text("loss", point.mean) for point in (best, points[-1]))
            words = f"{split}: the loss rises ({risen}) while that of training falls"
            yield f"{words}: it learns by heart; try fewer epochs"


def old_step(state: RunState, series: str) -> int | None:
    """Return the step of a series' newest evaluation where another split was evaluated later."""
    rows = (row for row in metric_rows(state) if row.later and evaluation_series(row.split, row.metric) == series)
    return next((row.results.last.step for row in rows), None)


def evaluation_headline(results: SplitResults, split: str) -> str:
    """Return ``WER on validation: 98.1 % -> 12.3 % (step 400)``: the main metric of a split, first and last.

    The share of texts that reached ``eval_max_new_tokens`` is added, except before the first step: with many of them
    the WER says little.
    """
    text = evaluation_text(results, split)
    return f"{text} (step {results.last.step})" if results.last.figures else text


def evaluation_text(results: SplitResults, split: str = "") -> str:
    """Return the same without the step, and without the split where none is given: ``WER 98.1 % -> 12.3 %``."""
    last_metrics = metrics_of(results.last)
    if not last_metrics:
        return f"{f'{split}: ' if split else ''}evaluated at step {results.last.step}"
    row = MetricRow(split, next(iter(last_metrics)), results)
    label = f"{row.label} on {split}:" if split else row.label
    cut = (
        f", {metric_text('cut', last_metrics['cut'])} of the texts unfinished"
        if "cut" in last_metrics and results.last.step
        else ""
    )
    return f"{label} {row.change}{cut}"


def evaluated_series(state: RunState) -> dict[str, str]:
    """Return the metrics of all series of evaluations, by the names of the series."""
    return {
        evaluation_series(split, metric): metric
        for split, results in state.evaluations.items()
        for metric in {**results.first.figures, **results.last.figures}
    }


def evaluations_document(state: RunState) -> dict[str, dict[str, Mapping[str, object]]]:
    """Return first, best and last evaluation of every split as a JSON document."""
    return {
        split: {
            which: {"step": result.step, "samples": result.samples, **metrics_of(result)}
            for which, result in (("first", results.first), ("best", results.best), ("last", results.last))
        }
        for split, results in state.evaluations.items()
    }
