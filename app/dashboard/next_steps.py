"""What next, once a run has ended: hear what its model makes of a clip or of a voice, beside what it was before; its
report; what to tell somebody else; and the commands for the rest."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from app.console import TOUR_PROFILE, command_line, program_words, visible
from app.dashboard.samples import sample_texts
from app.microphone import recorded
from app.report import Ended, next_commands
from app.shell.dialogs import CommandDialog, CommandsDialog, Dialog
from app.shell.keys import Key
from app.shell.text import StatusMark
from profiles.errors import BadInput, MusterError
from training.plan import RunMetadata
from training.tasks.showcase import Sample

SECONDS = 5.0
"""That are recorded from the microphone."""
_PROGRAMS = ("cli_typer.py", "muster")
"""What a command begins with that starts a run."""
_EVERY = 0.25
_LONGEST = 600.0
"""Seconds after which a model that was asked has not answered."""


@dataclass(frozen=True)
class Heard:
    """What two models made of one recording."""

    before: str
    after: str
    said: str = ""
    """Empty: nobody knows."""

    def sample(self) -> Sample:
        return Sample(id="", reference=self.said, before=self.before, after=self.after)


Transcribe = Callable[[str, Path], str]
"""What a model, by its folder or name, makes of a sound file."""
Record = Callable[[float], AbstractContextManager[Path]]


def transcribe(model: str, file: Path) -> str:
    """Return what a model hears, asked in a process of its own: the screen stays small.

    Raises:
        BadInput: it cannot be used, or the file not be read.
    """
    command = [*program_words(), "transcribe", "--json", model, str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, stdin=subprocess.DEVNULL)
    try:
        return str(json.loads(answer.stdout)["transcripts"][0]["text"])
    except (ValueError, KeyError, IndexError) as error:
        lines = answer.stderr.strip().splitlines() or ["no answer"]
        raise BadInput(f"{visible(model)} cannot be asked: {visible(lines[-1])}") from error


def record(seconds: float) -> AbstractContextManager[Path]:
    """Record from the microphone, as ``transcribe --microphone`` does."""
    return recorded(seconds)


@contextlib.contextmanager
def clip_of(sample: Sample) -> Iterator[Path]:
    """Write the sound of a held-out clip into a file that is gone afterwards."""
    with TemporaryDirectory(prefix="muster-") as folder:
        path = Path(folder) / "clip.mp3"
        path.write_bytes(base64.b64decode(sample.sound))
        yield path


class Listening:
    """Two models that are asked about one recording, in a thread.

    Args:
        sound: gives the recording.
        models: before training (empty: there was none) and after.
    """

    def __init__(
        self, sound: AbstractContextManager[Path], models: tuple[str, str], ask: Transcribe, said: str
    ) -> None:
        self._sound, self._models, self._ask, self._said = sound, models, ask, said
        self.stage = "recording"
        self.heard: Heard | None = None
        self.problem = ""
        threading.Thread(target=self._listen, name="listening", daemon=True).start()

    def _listen(self) -> None:
        try:
            with self._sound as file:
                before, after = self._models
                self.stage = "the model before training listens"
                first = self._ask(before, file) if before else "(untrained)"
                self.stage = "the new model listens"
                self.heard = Heard(first, self._ask(after, file), self._said)
        except (MusterError, OSError, subprocess.SubprocessError) as error:
            hint = error.hint if isinstance(error, MusterError) else ""
            self.problem = f"{error.message if isinstance(error, MusterError) else error}{hint and f' ({hint})'}"


class ListeningDialog(Dialog):
    """Said, before and after of one recording, as soon as they are there."""

    def __init__(self, heading: str, listening: Listening) -> None:
        super().__init__(heading)
        self._listening = listening

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_EVERY, lambda: self.query_one("#content Static", Static).update(self.content()))

    def content(self) -> Content:
        listening = self._listening
        if listening.problem:
            return StatusMark.PROBLEM.show(visible(listening.problem))
        if listening.heard is None:
            return StatusMark.WORKING.show(listening.stage)
        return Content("\n").join(sample_texts("speech", listening.heard.sample()))


class FriendDialog(CommandDialog):
    """How somebody else opens the model, as a text to copy."""

    def __init__(self, model: Path) -> None:
        lines = (
            f"1. Copy the folder {model} to your computer.",
            "2. Install Muster there:  uv tool install 'muster-train[train]'",
            f"3. Let the model listen:  muster transcribe {model.name} recording.wav",
        )
        super().__init__("\n".join(lines), "Any program that reads the Hugging Face format opens the folder, too.")
        self._heading = "How a friend opens this model"


class NextDialog(CommandsDialog):
    """What a person can do with the model right here, above the commands for the rest.

    Args:
        model: of the run; ``None``: it has none.
        base: what it was trained from: a folder or a name; empty: it was trained from nothing.
        samples: held-out ones of the run.
        report: writes the report and opens it.
        ask, record: the models and the microphone.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "microphone", show=False),
        Binding("r", "report", show=False),
        Binding("t", "friend", show=False),
    ]

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
        super().__init__("What next?", commands, _actions(model, samples))
        self._model, self._base, self._samples, self._report = model, base, samples, report
        self._ask, self._record = ask, record
        self._shown = 0

    def keys(self) -> tuple[Key, ...]:
        hearing = (Key("m", "microphone", "Microphone"), Key("t", "friend", "Tell a friend")) if self._model else ()
        return (Key("enter", "copy", "Do it", main=True), *hearing, Key("r", "report", "Report"), self.CLOSE)

    def action_copy(self) -> None:
        """Do what the row under the cursor says; a command is copied."""
        action = {"clip": self.action_clip, "microphone": self.action_microphone, "friend": self.action_friend,
                  "report": self.action_report}.get(self.selected)  # fmt: skip
        if action is None:
            super().action_copy()
        else:
            action()

    def action_clip(self) -> None:
        """Let both models hear the next held-out clip; without a model or its sound show what the run kept of it."""
        sample = self._samples[self._shown % len(self._samples)]
        self._shown += 1
        if self._model is not None and sample.sound:
            listening = Listening(clip_of(sample), (self._base, str(self._model)), self._ask, sample.reference)
            self.app.push_screen(ListeningDialog("A held-out clip", listening))
        else:
            self.app.push_screen(Dialog("A held-out clip", *sample_texts("speech", sample)))

    def action_microphone(self) -> None:
        """Record a few seconds, and let both models hear them."""
        if self._model is None:
            return
        listening = Listening(self._record(SECONDS), (self._base, str(self._model)), self._ask, "")
        self.app.push_screen(ListeningDialog(f"Speak now, for {SECONDS:.0f} seconds", listening))

    def action_report(self) -> None:
        self._report()
        self.dismiss()

    def action_friend(self) -> None:
        if self._model is not None:
            self.app.push_screen(FriendDialog(self._model))


def _actions(model: Path | None, samples: Sequence[Sample]) -> dict[str, str]:
    """Return what each action does, by its name."""
    clips = [sample for sample in samples if sample.reference]
    actions = {"clip": "Transcribe a held-out clip: said, before and after training"} if clips else {}
    if model is not None:
        actions["microphone"] = f"m  Record {SECONDS:.0f} seconds here: the old and the new model side by side"
    actions["report"] = "r  Open the report in the browser"
    if model is not None:
        actions["friend"] = "t  How a friend opens this model"
    return actions


def models_of(ended: Ended) -> tuple[Path | None, str]:
    """Return the model of a run, where it hears, and what it was trained from; empty: from nothing."""
    model = ended.plan.profile.model
    return ended.model if model.trait == "speech" else None, "" if model.from_scratch else model.model_path


def commands_after(ended: Ended, metadata: RunMetadata | None) -> list[str]:
    """Return what to type after a run: of the tour, what trains its job on this computer; of others to go on with the
    model, and what starts them once more."""
    following = next_commands(ended)
    if ended.plan.profile.name == TOUR_PROFILE:
        return [command_line("distributed-train", "demo"), *following]
    program, *words = metadata.command if metadata is not None and metadata.command else [""]
    return [*following, *([command_line(*words)] if Path(program).name in _PROGRAMS else [])]
