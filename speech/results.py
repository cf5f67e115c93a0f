"""Results of speech recognition: word errors by group, confusions, and recordings to listen to."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.console import command_about, command_line
from app.task_results import EvaluationRequest, TaskResults
from profiles.errors import ExitCode
from profiles.installation import relative_path
from profiles.locations import is_location
from speech.report.figures import breakdown_document, breakdown_lines, changed_lines, predictions_in
from training.records.plan import RunPlan

if TYPE_CHECKING:
    from textual.screen import Screen

    from training.tasks.outputs.showcase import Sample


class SpeechResults(TaskResults):
    """Transcripts beside what was said."""

    usage = ("transcribe", "FILE.wav")

    def commands(self, run_dir: Path, plan: RunPlan | None) -> list[str]:
        """Return how to transcribe, compare and export; with a plan, how to evaluate on its data and, after a starter
        profile's data set, how to train on recordings of one's own."""
        transcribe, *others = [
            f"{command_about(run_dir, 'model', 'transcribe')} FILE.wav",
            command_about(run_dir, "model", "compare"),
            f"{command_about(run_dir, 'model', 'export')} --to ctranslate2",
        ]
        if plan is None:
            return [transcribe, *others]
        profile, data = plan.profile, plan.profile.data.dataset_path
        dataset = relative_path(data) if os.path.isabs(data) else data
        commands = [transcribe, f"{command_about(run_dir, 'model', 'evaluate')} {shlex.quote(dataset)}", *others]
        is_starter = profile.dataset_name and not is_location(profile.dataset_name, Path.cwd())
        if is_starter and not profile.model.from_scratch:
            local_option = ["--local", str(len(plan.processes))] if all(map(plan.is_local, plan.processes)) else []
            train = command_line("distributed-train", profile.name, *local_option)
            commands.append(f"{train} --dataset YOUR_RECORDINGS")
        return commands

    def dialog(
        self,
        commands: Sequence[str],
        model: Path | None,
        base: str,
        samples: Sequence[Sample],
        report: Callable[[], None],
    ) -> Screen[Any]:
        from speech.report.hearing import HearingDialog  # loads textual

        return HearingDialog(commands, model, base, samples, report)

    def lines(self, run_dir: Path) -> list[str]:
        before, after = predictions_in(run_dir)
        changes = changed_lines(before, after)
        # its two figures tell which split it is about
        return [*(line.replace("WER   ", "change  ", 1) for line in changes), *breakdown_lines(after, before)]

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
