"""What can be done with a language model once its run has ended."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from textual.pilot import Pilot

from app.dashboard.dialogs.model_process import ModelProcess
from app.dashboard.dialogs.writing import ChatDialog, ChatProcess, WritingDialog, next_dialog
from app.run_view.run_state import RunState
from app.run_view.view import EndedRun
from app.screens.app import WizardApp
from app.wizard.state.state import Step
from profiles.errors import BadInput, ExitCode
from profiles.files.resolve import load_profile
from speech.report.hearing import HearingDialog
from tests.screens.pilot import fixed_clock, run, text, until, until_text
from tests.screens.states import at
from training.run.local_plan import plan_local_run
from training.run.outcome import RunOutcome
from training.tasks.outputs.showcase import Kind, Sample, Showcase

PROMPT = Sample(
    id="sample 0", prompt="Who?", exact_prompt="<user>Who?", reference="Muster.", before="Me.", after="Muster!"
)
MODEL = Path("/runs/one/model")
CHAT = """
import json, sys
def tell(**document): print(json.dumps(document), flush=True)
tell(ready="model")
for line in sys.stdin:
    if line == "/reset\\n":
        tell(end=True, note="begun anew")
    elif line == "long\\n":
        tell(end=True, note="the prompt is too long")
    else:
        for piece in ("you said ", line.strip(), "\\n", "twice"):
            tell(text=piece)
        tell(end=True, note="")
"""


class Models(ModelProcess):
    """A process whose models answer at once; ``problem`` is what it answers instead."""

    problem = ""

    def ask(self, *words: str) -> dict[str, Any]:
        assert words[:3] == ("generate", str(MODEL), "--file")
        if self.problem:
            raise BadInput(self.problem, "check model_path")
        base = {"base": {"text": "the base"}} if "--compare" in words else {}
        return {"text": f"{'exactly' if '--exact' in words else 'answered'} {Path(words[3]).read_text()}", **base}

    def file(self, name: str, content: bytes) -> Path:
        path = Path(tempfile.mkdtemp(), name)
        path.write_bytes(content)
        return path


class Broken(Models):
    problem = "model base: no such folder"


def ended(folder: Path, profile: str, **options: str) -> EndedRun:
    """A completed run whose model is a language model, with a chat template."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (folder / "model/chat_template.jinja").touch()
    plan = plan_local_run(load_profile(profile, options).profile, 1)
    return EndedRun.of(RunOutcome("completed", folder, {}, ExitCode.DONE), plan, RunState())


@pytest.mark.parametrize(
    ("profile", "options", "offered"),
    [
        ("instruct-lora", {"dataset": "/"}, {"held_out", "chat", "prompt", "report", "friend"}),
        ("demo", {"model_path": "m.py:build", "task": "custom"}, {"chat", "prompt", "report", "friend"}),
    ],
)
def test_a_language_model_is_offered_what_it_can(
    tmp_path: Path, profile: str, options: dict[str, str], offered: set[str]
) -> None:
    """Whoever has trained it: a job of a person's own code, too."""
    kind: Kind = "text" if "held_out" in offered else "items"
    shown = Showcase(kind=kind, split="validation", step=9, of=1, samples=(PROMPT,))
    assert set(next_dialog(ended(tmp_path, profile, **options), [], shown, lambda: None)._actions) == offered


def test_a_model_of_speech_hears(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    run = replace(ended(tmp_path / "model", "demo"), path=tmp_path)
    assert isinstance(next_dialog(run, [], None, lambda: None), HearingDialog)


def dialog(model: Path | None = MODEL, base: str = "base", chats: bool = True, **more: Any) -> WritingDialog:
    settings = {"process": Models, "chat": [sys.executable, "-c", CHAT], **more}
    return WritingDialog(["muster runs show one"], model, base, [PROMPT], lambda: None, chats, **settings)


def show(shown: WritingDialog, *keys: str, until: str, more: Any = None) -> str:
    """Press keys in a dialog, and return the screen on which the words stand."""
    screens: list[str] = []

    async def drive(pilot: Pilot[Any]) -> None:
        pilot.app.push_screen(shown)
        await until_text(pilot, "What next?")
        await pilot.press(*keys)
        await until_text(pilot, until)
        screens.append(text(pilot.app))
        if more:
            await more(pilot)

    run(WizardApp(cast(Any, at(Step.LINKS)), clock=fixed_clock), drive, (120, 32))
    return screens[0]


def in_order(screen: str, *words: str) -> bool:
    places = [screen.index(word) for word in words]
    return places == sorted(places)


@pytest.mark.slow
def test_enter_lets_both_models_answer_a_held_out_prompt() -> None:
    screen = show(dialog(), "enter", until="exactly <user>Who?")
    assert in_order(screen, "prompt", "before", "the base", "after", "in fact", "Muster.")


@pytest.mark.slow
def test_a_model_from_nothing_has_no_text_before() -> None:
    assert "(untrained)" in show(dialog(base=""), "enter", until="exactly <user>Who?")


@pytest.mark.slow
def test_a_typed_prompt_is_answered_by_both() -> None:
    screen = show(dialog(), "p", *"Why", "enter", until="answered Why")
    assert in_order(screen, "Your prompt", "the base", "answered Why")


@pytest.mark.slow
def test_a_model_that_cannot_be_asked_says_why() -> None:
    show(dialog(process=Broken), "enter", until="model base: no such folder (check model_path)")


@pytest.mark.slow
def test_a_chat_goes_on_and_begins_anew() -> None:
    async def say(pilot: Pilot[Any], message: str, answer: str) -> None:
        chat = pilot.app.screen
        assert isinstance(chat, ChatDialog)
        await until(pilot, lambda: not chat._chat.busy)  # what is typed before the end of an answer waits for it
        await pilot.press(*message, "enter")
        await until_text(pilot, answer)

    async def more(pilot: Pilot[Any]) -> None:
        await say(pilot, "hi", "you said hi")
        await say(pilot, "long", "the prompt is too long")
        assert "you said hi" in text(pilot.app) and "twice" in text(pilot.app)
        await say(pilot, "/reset", "your message")
        await until(pilot, lambda: "you said hi" not in text(pilot.app))
        await pilot.press("ctrl+c")
        await until_text(pilot, "What next?")
        assert not isinstance(pilot.app.screen, ChatDialog)

    show(dialog(), "c", until="your message", more=more)


@pytest.mark.slow
def test_a_chat_that_cannot_begin_says_why() -> None:
    program = """print('{"error": {"message": "no such model", "hint": "name another"},\\n "exit_code": 2}')"""
    show(dialog(chat=[sys.executable, "-c", program]), "c", until="no such model (name another)")


@pytest.mark.slow
def test_a_closed_chat_leaves_no_process() -> None:
    chat = ChatProcess([sys.executable, "-c", CHAT])
    chat.close()
    assert chat._process.returncode is not None


@pytest.mark.slow
def test_a_model_of_plain_text_is_offered_no_chat() -> None:
    screen = show(dialog(chats=False), "t", until="muster model generate model 'A text'")
    assert "Chat" not in screen


@pytest.mark.slow
def test_a_run_without_a_model_shows_what_was_kept() -> None:
    screen = show(dialog(model=None), "enter", until="Muster!")
    assert in_order(screen, "Me.", "Muster!")
