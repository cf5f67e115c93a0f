"""The dialog after a run: the old and the new model transcribe a held-out clip, or what the microphone hears."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from textual.binding import Binding, BindingType

from app.dashboard.dialogs.next_steps import Asking, AskingDialog, ModelDialog, answer_of
from app.dashboard.tabs.samples import sample_texts
from app.run_view.showcase import UNTRAINED
from app.shell.dialogs import Dialog
from app.shell.keys import Key
from speech.microphone import recorded
from training.tasks.outputs.showcase import Sample

SECONDS = 5.0
"""Seconds of a recording from the microphone."""

Transcribe = Callable[[str, Path, bool], str]
"""Transcribes a sound file with a model, given by its folder or name; normalised as references are, or as it is."""
Record = Callable[[float], AbstractContextManager[Path]]


def transcribe(model: str, file: Path, is_normalised: bool) -> str:
    """Return a model's transcript of a file.

    Args:
        is_normalised: in the form in which references are compared: without case, punctuation and spelling variants.

    Raises:
        BadInput: the model cannot be used, or the file cannot be read.
    """
    transcript = answer_of("transcribe", model, str(file))["transcripts"][0]
    return str(transcript["normalised" if is_normalised else "text"])


def record(seconds: float) -> AbstractContextManager[Path]:
    """Record from the microphone, as ``transcribe --microphone`` does."""
    return recorded(seconds)


@contextlib.contextmanager
def clip_of(sample: Sample) -> Iterator[Path]:
    """Write the sound of a held-out clip into a temporary file."""
    with TemporaryDirectory(prefix="muster-") as folder:
        path = Path(folder) / "clip.mp3"
        path.write_bytes(base64.b64decode(sample.sound))
        yield path


def transcribe_with_both(
    sound: AbstractContextManager[Path], models: tuple[str, str], ask: Transcribe, reference: str
) -> Iterator[str | Sample]:
    """Transcribe one recording with two models.

    Args:
        models: before training (empty: there was none), and after.
        reference: what was said; empty: unknown.
    """
    yield "recording"
    with sound as file:
        before, after = models
        yield "the model before training listens"
        transcript_before = ask(before, file, bool(reference)) if before else UNTRAINED
        yield "the new model listens"
        transcript_after = ask(after, file, bool(reference))
        yield Sample(id="", reference=reference, before=transcript_before, after=transcript_after)


class HearingDialog(ModelDialog):
    """The dialog after a run for a speech model.

    Args:
        base: what it was trained from: a folder or a name; empty: it was trained from nothing.
        samples: held-out ones of the run.
        ask, record: the models and the microphone.
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
        ask: Transcribe = transcribe,
        record: Record = record,
    ) -> None:
        clips = any(sample.reference for sample in samples)
        actions = {"clip": "Transcribe a held-out clip: said, before and after training"} if clips else {}
        if model is not None:
            actions["microphone"] = f"m  Record {SECONDS:.0f} seconds here: the old and the new model side by side"
        super().__init__(commands, actions, model, report, "Let the model listen:  muster transcribe {} recording.wav")
        self._base, self._samples = base, samples
        self._ask, self._record = ask, record
        self._shown = 0

    def action_clip(self) -> None:
        """Transcribe the next held-out clip with both models; without model or sound, show the recorded outputs."""
        sample = self._samples[self._shown % len(self._samples)]
        self._shown += 1
        if self._model is not None and sample.sound:
            self._hear("A held-out clip", clip_of(sample), sample.reference)
        else:
            self.app.push_screen(Dialog("A held-out clip", *sample_texts("speech", sample)))

    def action_microphone(self) -> None:
        """Record a few seconds, and transcribe them with both models."""
        if self._model is not None:
            self._hear(f"Speak now, for {SECONDS:.0f} seconds", self._record(SECONDS), "")

    def _hear(self, heading: str, sound: AbstractContextManager[Path], reference: str) -> None:
        models = (self._base, str(self._model))
        asking = Asking("speech", lambda: transcribe_with_both(sound, models, self._ask, reference))
        self.app.push_screen(AskingDialog(heading, asking))
