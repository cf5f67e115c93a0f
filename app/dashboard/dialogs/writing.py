"""The dialog after a run for a language model: answers of model and base to prompts, and a chat."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, Static

from app.console import visible
from app.dashboard.dialogs.model_process import ModelProcess, kill_group, start_group
from app.dashboard.dialogs.next_steps import Asking, ModelDialog, words_of
from app.dashboard.tabs.samples import sample_texts
from app.run_view.tables.showcase import UNTRAINED
from app.run_view.view import EndedRun
from app.shell.dialogs import Box, Dialog, TextDialog
from app.shell.keys import Key
from app.shell.text import StatusMark, literal
from app.task_results import results_of
from profiles.errors import exit_text
from profiles.installation import program_words
from training.records.model_folders import has_chat_template, is_language_model, starting_model
from training.tasks.outputs.showcase import Sample, Showcase

_TOKENS = "128"
"""Most tokens of an answer to a prompt."""
_EVERY = 0.1


class WritingDialog(ModelDialog):
    """The dialog after a run for a language model.

    Args:
        base: what it was trained from: a folder or a name; empty: it was trained from nothing.
        samples: held-out ones of the run.
        chats: whether the model converses.
        process: see :class:`ModelDialog`.
        chat: command of a chat process.
    """

    ACTION_KEYS = (Key("c", "chat", "Chat"), Key("p", "prompt", "Prompt"))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "chat", show=False),
        Binding("p", "prompt", show=False),
    ]

    def __init__(
        self,
        commands: Sequence[str],
        model: Path | None,
        base: str,
        samples: Sequence[Sample],
        report: Callable[[], None],
        chats: bool,
        process: Callable[[], ModelProcess] = ModelProcess,
        chat: Sequence[str] = (),
    ) -> None:
        actions = {"held_out": "Answer a held-out prompt: before and after training"} if samples else {}
        if model is not None and chats:
            actions["chat"] = "c  Chat with the model"
        if model is not None:
            actions["prompt"] = "p  Type a prompt: the old and the new model side by side"
        talk, write = (
            "Talk with the model:  muster model chat {}",
            "Let the model write:  muster model generate {} 'A text'",
        )
        super().__init__(commands, actions, model, report, talk if chats else write, process)
        self._base, self._samples = base, samples
        self._chat = chat or [*program_words(), "chat", str(model), "--json"]
        self._shown = 0

    def action_held_out(self) -> None:
        """Run both models on the next held-out prompt; without a model, show the recorded outputs."""
        sample = self._samples[self._shown % len(self._samples)]
        self._shown += 1
        if self._model is None:
            self.app.push_screen(Dialog("A held-out prompt", *sample_texts("text", sample)))
        else:
            self._write("A held-out prompt", sample, sample.exact_prompt or sample.prompt, exact=True)

    def action_prompt(self) -> None:
        """Ask for a prompt, and run both models on it."""
        if self._model is None:
            return

        def typed(prompt: str | None) -> None:
            if prompt:
                self._write("Your prompt", Sample(id="", prompt=prompt), prompt, exact=False)

        self.app.push_screen(
            TextDialog("Your prompt", accept="Answer it", needed="Type what the model answers."), typed
        )

    def action_chat(self) -> None:
        if "chat" in self._actions:
            self.app.push_screen(ChatDialog(ChatProcess(self._chat)))

    def _write(self, heading: str, sample: Sample, prompt: str, exact: bool) -> None:
        models = self.models

        def ask() -> Sample:
            file = models.file("prompt.txt", prompt.encode())
            options = [*(["--exact"] if exact else []), *(["--compare"] if self._base else [])]
            document = models.ask("generate", str(self._model), "--file", str(file), "--max-tokens", _TOKENS, *options)
            before = document["base"]["text"] if self._base else UNTRAINED
            return sample.model_copy(update={"before": before, "after": document["text"]})

        self.show_answer(heading, Asking("text", models, ask))


@dataclass
class ChatTurn:
    """A message, and the model's answer so far."""

    message: str
    answer: str = ""
    note: str = ""
    """Reason why the answer ended or is missing."""


class ChatProcess:
    """A chat with a model, in a process of its own (``chat --json``).

    Args:
        command: of the process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.turns: list[ChatTurn] = []
        self.ready = False
        self.busy = False
        """Whether an answer is being written."""
        self.problem = ""
        self._process = start_group(command, subprocess.DEVNULL)
        self._reader = threading.Thread(target=self._read, name="chat", daemon=True)
        self._reader.start()

    def say(self, text: str) -> None:
        """Send a message; ``/reset`` starts a new conversation."""
        self.turns.append(ChatTurn(text))
        self.busy = True
        try:
            stdin = cast(IO[str], self._process.stdin)
            stdin.write(f"{text}\n")
            stdin.flush()
        except OSError:
            self.busy = False  # the process has ended; the reader thread finds out why

    def close(self) -> None:
        """End the process with all its children."""
        kill_group(self._process)
        self._reader.join()

    def _read(self) -> None:
        error_text = ""
        with self._process as process:
            for line in cast(IO[str], process.stdout):
                try:
                    self._take(json.loads(line))
                except ValueError:  # lines of the JSON document of its error
                    error_text += line
        try:
            self.problem = words_of(**json.loads(error_text)["error"])
        except (ValueError, LookupError, TypeError):
            self.problem = f"the model's process {exit_text(process.returncode)}"

    def _take(self, document: dict[str, Any]) -> None:
        self.ready = self.ready or "ready" in document
        turn = self.turns[-1] if self.turns else ChatTurn("")
        turn.answer += document.get("text", "")
        if "end" in document:
            turn.note, self.busy = document["note"], False
            if turn.message == "/reset":
                self.turns = []


class ChatDialog(Box[None]):
    """A conversation with a model, whose answers are streamed."""

    HOLDS_CTRL_C = True
    DEFAULT_CSS = """
    ChatDialog > #box { width: 96; height: 90%; }
    ChatDialog #talk { height: 1fr; margin-top: 1; }
    ChatDialog #field { margin-top: 1; height: 1; border: none; padding: 0 1; background: $panel; }
    """

    def __init__(self, chat: ChatProcess) -> None:
        super().__init__("Chat")
        self._chat = chat

    def body(self) -> ComposeResult:
        with VerticalScroll(id="talk", can_focus=False):
            yield Static(markup=False)
        yield Input(id="field", placeholder="your message; /reset begins anew")

    def keys(self) -> tuple[Key, ...]:
        return (Key("enter", "send", "Send", main=True), Key("escape", "close", "End the chat"))

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#talk").anchor()
        self.query_one("#field", Input).focus()
        self.set_interval(_EVERY, self._paint)

    def on_unmount(self) -> None:
        self._chat.close()
        super().on_unmount()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if event.value.strip() and not self._chat.busy and not self._chat.problem:
            self._chat.say(event.value.strip())
            event.input.value = ""

    async def action_send(self) -> None:
        await self.query_one("#field", Input).action_submit()

    def _paint(self) -> None:
        chat = self._chat
        lines = [line for turn in tuple(chat.turns) for line in _turn_lines(turn)]
        if chat.problem:
            lines.append(StatusMark.PROBLEM.show(visible(chat.problem)))
        elif not chat.ready:
            lines.append(StatusMark.WORKING.show("the model is loaded"))
        elif chat.busy and not chat.turns[-1].answer:
            lines.append(StatusMark.WORKING.show("it reads"))
        self.query_one("#talk Static", Static).update(Content("\n").join(lines))


def _turn_lines(turn: ChatTurn) -> list[Content]:
    lines = [literal(turn.message, "bold $text-primary")]
    lines += [literal(visible(line)) for line in turn.answer.split("\n")] if turn.answer else []
    lines += [literal(turn.note, "$text-warning")] if turn.note else []
    return [*lines, Content("")]


def next_dialog(
    ended: EndedRun, commands: Sequence[str], showcase: Showcase | None, report: Callable[[], None]
) -> Screen[Any]:
    """Return the dialog after a run, by the kind of its model."""
    base, samples = starting_model(ended.plan.profile), showcase.samples if showcase else ()
    kind = showcase.kind if showcase else ""
    if kind == "text" or (ended.model is not None and is_language_model(ended.model)):
        texts = samples if kind == "text" else ()
        chats = ended.model is not None and has_chat_template(ended.model)
        return WritingDialog(commands, ended.model, base, texts, report, chats)
    clips = samples if kind == "speech" else ()
    dialog = results_of(ended.plan.profile.model.task).dialog(commands, ended.model, base, clips, report)
    return dialog or ModelDialog(commands, {}, None, report, "")
