"""The dialog after a run: the old and the new model transcribe a held-out clip, or what the microphone hears."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from app.dashboard.dialogs.model_process import ModelProcess
from app.dashboard.dialogs.next_steps import Asking, ModelDialog
from app.dashboard.tabs.samples import sample_texts
from app.run_view.tables.showcase import UNTRAINED
from app.shell.dialogs import Dialog
from app.shell.keys import Key
from profiles.errors import BadInput
from training.records.plan import read_plan
from training.tasks.outputs.showcase import Sample

SECONDS = 5.0
"""Seconds of a recording from the microphone."""


class HearingDialog(ModelDialog):
    """The dialog after a run for a speech model.

    Args:
        base: what it was trained from: a folder or a name; empty: it was trained from nothing.
        samples: held-out ones of the run.
        process: see :class:`ModelDialog`.
    """

    ACTION_KEYS = (Key("m", "microphone", "Microphone"),)
    BINDINGS: ClassVar[list[BindingType]] = [Binding("m", "microphone", show=False)]

    def __init__(
        self,
        commands: Sequence[str],
        model: Path | None,
        base: str,
        samples: Sequence[Sample],
        report: Callable[[], None],
        process: Callable[[], ModelProcess] = ModelProcess,
    ) -> None:
        clips = any(sample.reference for sample in samples)
        actions = {"clip": "Transcribe a held-out clip: said, before and after training"} if clips else {}
        if model is not None:
            actions["microphone"] = f"m  Record {SECONDS:.0f} seconds here: the old and the new model side by side"
        use = "Let the model listen:  muster model transcribe {} recording.wav"
        super().__init__(commands, actions, model, report, use, process)
        self._base, self._samples = base, samples
        self._shown = 0

    def action_clip(self) -> None:
        """Transcribe the next held-out clip with both models; without model or sound, show the recorded outputs."""
        sample = self._samples[self._shown % len(self._samples)]
        self._shown += 1
        if self._model is not None and sample.sound:
            self._hear("A held-out clip", sample)
        else:
            self.app.push_screen(Dialog("A held-out clip", *sample_texts("speech", sample)))

    def action_microphone(self) -> None:
        """Record a few seconds, and transcribe them with both models."""
        if self._model is not None:
            self._hear("Your voice", Sample(id=""))

    def _hear(self, heading: str, sample: Sample) -> None:
        """Transcribe the recording of a sample with both models; if it has none, what the microphone records."""
        models, model = self.models, str(self._model)

        def ask() -> Sample:
            reference, recording = _recording_of(Path(model).parent, sample)
            sound = ["--microphone", str(SECONDS)]
            if sample.sound:
                sound = [str(recording or models.file("clip.mp3", base64.b64decode(sample.sound)))]
            compare = ["--compare"] if self._base else []
            document = models.ask("transcribe", model, *sound, *compare)
            before = document["base"]["transcripts"][0]["text"] if self._base else UNTRAINED
            after = document["transcripts"][0]["text"]
            return sample.model_copy(update={"reference": reference, "before": before, "after": after})

        self.show_answer(heading, Asking("speech", models, ask))


def _recording_of(run_dir: Path, sample: Sample) -> tuple[str, Path | None]:
    """Return the transcript of a sample as it was written, and its file; ``None``: it is not on this computer."""
    from speech.report.figures import predictions_in  # only after a clip was chosen
    from speech.report.recordings import local_files

    chosen, dataset = [clip for clip in predictions_in(run_dir)[1] if clip.id == sample.id], ""
    with contextlib.suppress(BadInput):  # of an older version
        dataset = read_plan(run_dir / "plan.json").profile.data.dataset_path
    reference = chosen[0].reference if chosen else sample.reference
    return reference, local_files(chosen, dataset).get(sample.id)
