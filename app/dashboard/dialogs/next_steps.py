"""The dialog after a run: its model on a sample, before and after training; the report; how others open the model; and
further commands. Language models have :mod:`app.dashboard.dialogs.writing`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from app.console import is_of_tour, visible
from app.dashboard.dialogs.model_process import ModelProcess
from app.dashboard.tabs.samples import marked_texts
from app.report import next_commands, rerun_line
from app.run_view.view import EndedRun
from app.shell.dialogs import CommandDialog, CommandsDialog, Dialog
from app.shell.keys import Key
from app.shell.text import StatusMark
from profiles.errors import MusterError
from training.records.plan import RunMetadata
from training.tasks.outputs.showcase import Kind, Sample

_EVERY = 0.25


def words_of(message: object, hint: str = "") -> str:
    """Return an error and its hint in one line."""
    return f"{message}" + (f" ({hint})" if hint else "")


class Asking:
    """Runs models on one sample, in a thread.

    Args:
        kind: of the sample.
        models: the process that runs them.
        ask: returns the sample with their outputs.
    """

    def __init__(self, kind: Kind, models: ModelProcess, ask: Callable[[], Sample]) -> None:
        self.kind, self.models, self._ask = kind, models, ask
        self.sample: Sample | None = None
        self.problem = ""
        threading.Thread(target=self._run, name="asking", daemon=True).start()

    def _run(self) -> None:
        try:
            self.sample = self._ask()
        except (MusterError, OSError, LookupError) as error:
            self.problem = words_of(error.message, error.hint) if isinstance(error, MusterError) else str(error)

    def end(self) -> None:
        """End the process, unless it has answered: then its models stay loaded for the next sample."""
        if self.sample is None and not self.problem:
            self.models.close()


class AskingDialog(Dialog):
    """Shows a sample with the models' outputs before and after training, as soon as they are there.

    Args:
        following: what further keys do; each closes this dialog first.
    """

    def __init__(self, heading: str, asking: Asking, following: Mapping[Key, Callable[[], None]]) -> None:
        super().__init__(heading)
        self._asking, self._following = asking, following

    def keys(self) -> tuple[Key, ...]:
        return (self.CLOSE, *self._following)

    def on_key(self, event: events.Key) -> None:
        act = next((act for key, act in self._following.items() if key.key == event.key), None)
        if act is not None and self.app.screen is self:
            event.stop()
            self._asking.end()  # before another question takes a process
            self.dismiss()
            act()

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_EVERY, lambda: self.query_one("#content Static", Static).update(self.content()))

    def on_unmount(self) -> None:
        self._asking.end()

    def content(self) -> Content:
        asking = self._asking
        if asking.problem:
            return StatusMark.PROBLEM.show(visible(asking.problem))
        if asking.sample is None:
            return StatusMark.WORKING.show(visible(asking.models.stage))
        return Content("\n").join(marked_texts(asking.kind, asking.sample))


class FriendDialog(CommandDialog):
    """How others open the model, as a text to copy; ``use``: how they use it."""

    def __init__(self, model: Path, use: str) -> None:
        lines = (
            f"1. Copy the folder {model} to their computer.",
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
        process: makes the process that runs the models; it ends with this dialog.
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
        process: Callable[[], ModelProcess] = ModelProcess,
    ) -> None:
        friend = {"friend": "t  How a friend opens this model"} if model is not None else {}
        actions = {**actions, "report": "r  Open the report in the browser", **friend}
        super().__init__("What next?", commands, actions)
        self._model, self._report, self._use, self._process = model, report, use, process
        self._models = process()

    def on_unmount(self) -> None:
        self._models.close()

    @property
    def models(self) -> ModelProcess:
        """The process that runs the models; another one after the last was ended by leaving its answer."""
        if self._models.closed:
            self._models = self._process()
        return self._models

    def keys(self) -> tuple[Key, ...]:
        return (Key("enter", "copy", "Do or copy", main=True), self.CLOSE, *self._action_keys())

    def _action_keys(self) -> list[Key]:
        keys = (*self.ACTION_KEYS, Key("t", "friend", "Tell a friend"), Key("r", "report", "Report"))
        return [key for key in keys if key.action in self._actions]

    def show_answer(self, heading: str, asking: Asking) -> None:
        """Show a sample and what the models make of it; the keys of this dialog work there, too."""
        following = {key: getattr(self, f"action_{key.action}") for key in self._action_keys()}
        self.app.push_screen(AskingDialog(heading, asking, following))

    def action_copy(self) -> None:
        """Run the action under the cursor, or copy the command."""
        if self.selected in self._actions:
            getattr(self, f"action_{self.selected}")()
        else:
            super().action_copy()

    def action_report(self) -> None:
        """Write the report; this dialog stays for what comes next."""
        self._report()

    def action_friend(self) -> None:
        if self._model is not None:
            self.app.push_screen(FriendDialog(self._model, self._use.format(self._model.name)))


def commands_after(ended: EndedRun, metadata: RunMetadata | None) -> list[str]:
    """Return the commands to type after a run: to use the model, and to start the run again."""
    following = next_commands(ended)
    if (
        metadata is None or is_of_tour(ended.plan.profile.name) or "--resume" in metadata.command
    ):  # the run of a resumed attempt has ended
        return following
    again = rerun_line(metadata, Path.cwd())
    return [*following, *([again] if again else [])]
