"""Results of speech recognition: word errors by group, confusions, and recordings to listen to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.task_results import EvaluationRequest, TaskResults
from profiles.errors import ExitCode
from speech.report.figures import breakdown_document, breakdown_lines, changed_lines, predictions_in
from training.records.plan import RunPlan


class SpeechResults(TaskResults):
    """Transcripts beside what was said."""

    def lines(self, run_dir: Path) -> list[str]:
        before, after = predictions_in(run_dir)
        return [*changed_lines(before, after), *breakdown_lines(after, before)]

    def document(self, run_dir: Path) -> dict[str, Any]:
        return breakdown_document(predictions_in(run_dir)[1])

    def report_sections(self, run_dir: Path, plan: RunPlan | None) -> Iterator[tuple[str, str]]:
        from speech.report.recordings import recordings  # only a report needs HTML

        ranked = recordings(run_dir, plan)
        yield "Recordings", f'<div class="ranked">{ranked}</div>' if ranked else ""

    def evaluate(self, request: EvaluationRequest) -> ExitCode:
        from speech.commands.evaluate import evaluate

        return evaluate(request)

    def compare(self, references: Sequence[str], seed: int, output: Path, as_json: bool) -> ExitCode:
        from speech.commands.evaluate import compare

        return compare(references, seed, output, as_json)
