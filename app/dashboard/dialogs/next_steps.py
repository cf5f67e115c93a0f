"""The dialog after a run: its model on a sample, before and after training; the report; how others open the model; and
further commands. Language models have :mod:`app.dashboard.dialogs.writing`."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from app.console import TOUR_PROFILE, command_line, program_words, visible
from app.dashboard.tabs.samples import sample_texts
from app.report import EndedRun, next_commands
from app.shell.dialogs import CommandDialog, CommandsDialog, Dialog
from app.shell.keys import Key
from app.shell.text import StatusMark
from profiles.errors import BadInput, MusterError
from training.records.plan import RunMetadata
from training.tasks.outputs.showcase import Kind, Sample

_PROGRAMS = ("cli_typer.py", "muster")
"""Program names of commands that start a run."""
_EVERY = 0.25
_LONGEST = 600.0
"""Timeout of a model's answer, seconds."""


def answer_of(*arguments: str) -> dict[str, Any]:
    """Return the JSON document of a command of this program, which runs in a process of its own.

    Raises:
        BadInput: it failed.
    """
    command = [*program_words(), *arguments, "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, stdin=subprocess.DEVNULL)
    try:
        document: dict[str, Any] = json.loads(answer.stdout)
    except ValueError as error:
        lines = answer.stderr.strip().splitlines() or ["no answer"]
        raise BadInput(f"the model cannot be asked: {visible(lines[-1])}") from error
    if "error" in document:
        raise BadInput(document["error"]["message"], document["error"]["hint"])
    return document


def words_of(message: object, hint: str = "") -> str:
    """Return an error and its hint in one line."""
    return f"{message}" + (f" ({hint})" if hint else "")


class Asking:
    """Runs models on one sample, in a thread.

    Args:
        kind: of the sample.
        ask: runs the models; yields its stages, then the sample with their outputs.
    """

    def __init__(self, kind: Kind, ask: Callable[[], Iterator[str | Sample]]) -> None:
        self.kind, self._ask = kind, ask
        self.stage = ""
        self.sample: Sample | None = None
        self.problem = ""
        threading.Thread(target=self._run, name="asking", daemon=True).start()

    def _run(self) -> None:
        try:
            for news in self._ask():
                if isinstance(news, Sample):
                    self.sample = news
                else:
                    self.stage = news
        except (MusterError, OSError, subprocess.SubprocessError, LookupError) as error:
            self.problem = words_of(error.message, error.hint) if isinstance(error, MusterError) else str(error)


class AskingDialog(Dialog):
    """Shows a sample with the models' outputs before and after training, as soon as they are there."""

    def __init__(self, heading: str, asking: Asking) -> None:
        super().__init__(heading)
        self._asking = asking

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_EVERY, lambda: self.query_one("#content Static", Static).update(self.content()))

    def content(self) -> Content:
        asking = self._asking
        if asking.problem:
            return StatusMark.PROBLEM.show(visible(asking.problem))
        if asking.sample is None:
            return StatusMark.WORKING.show(asking.stage)
        return Content("\n").join(sample_texts(asking.kind, asking.sample))


class FriendDialog(CommandDialog):
    """How others open the model, as a text to copy; ``use``: how they use it."""

    def __init__(self, model: Path, use: str) -> None:
        lines = (
            f"1. Copy the folder {model} to your computer.",
            "2. Install Muster there:  uv tool install 'muster-train[train]'",
            f"3. {use}",
        )
        super().__init__("\n".join(lines), "Any program that reads the Hugging Face format opens the folder, too.")
        self._heading = "How a friend opens this model"


class ModelDialog(CommandsDialog):
    """Actions with a model, above further commands.

    Args:
        actions: of a subclass: labels by the suffixes of their methods' names.
        model: of the run; ``None``: it has none.
        report: writes and opens the report.
        use: how a friend uses the model; ``{}`` is its folder.
    """

    ACTION_KEYS: ClassVar[tuple[Key, ...]] = ()
    """Keys of a subclass, offered where their actions exist."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "report", show=False),
        Binding("t", "friend", show=False),
    ]

    def __init__(
        self,
        commands: Sequence[str],
        actions: Mapping[str, str],
        model: Path | None,
        report: Callable[[], None],
        use: str,
    ) -> None:
        friend = {"friend": "t  How a friend opens this model"} if model is not None else {}
        actions = {**actions, "report": "r  Open the report in the browser", **friend}
        super().__init__("What next?", commands, actions)
        self._model, self._report, self._use = model, report, use

    def keys(self) -> tuple[Key, ...]:
        keys = (*self.ACTION_KEYS, Key("t", "friend", "Tell a friend"), Key("r", "report", "Report"))
        offered = [key for key in keys if key.action in self._actions]
        return (Key("enter", "copy", "Do or copy", main=True), self.CLOSE, *offered)

    def action_copy(self) -> None:
        """Run the action under the cursor, or copy the command."""
        if self.selected in self._actions:
            getattr(self, f"action_{self.selected}")()
        else:
            super().action_copy()

    def action_report(self) -> None:
        self._report()
        self.dismiss()

    def action_friend(self) -> None:
        if self._model is not None:
            self.app.push_screen(FriendDialog(self._model, self._use.format(self._model.name)))


def commands_after(ended: EndedRun, metadata: RunMetadata | None) -> list[str]:
    """Return the commands to type after a run: to use the model, and to start the run again; after the tour, to train
    its job on this computer."""
    following = next_commands(ended)
    if ended.plan.profile.name == TOUR_PROFILE:
        return [command_line("distributed-train", "demo"), *following]
    program, *words = metadata.command if metadata is not None and metadata.command else [""]
    return [*following, *([command_line(*words)] if Path(program).name in _PROGRAMS else [])]
