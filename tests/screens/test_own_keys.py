"""Keys of a person's own: read, refused in one line where they are wrong, pressed, and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

import app.dashboard.screen
from app.screens.app import WizardApp
from app.screens.own_keys import own_keys
from app.shell.keymap import bindings_of, read_keymap, screens
from app.wizard.state import actions as do
from app.wizard.state.state import Step
from profiles.errors import BadInput
from tests.screens.pilot import fixed_clock, run, text
from tests.screens.states import at

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "screens.md"
assert app.dashboard.screen  # its keys are known once it is loaded


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("[keys]\nsnapshop = S", "there is no action 'snapshop'", "did you mean 'snapshot'?"),
        ("[keys]\nsnapshot = supper", "snapshot = supper: there is no such key", "ctrl+n"),
        ("[keys]\nsnapshot = t", "two actions of Dashboard have the key t", "'next_theme' and 'snapshot'"),
        ("[keys]\nsnapshot = l", "two actions of Dashboard have the key l", "another key"),
        ("snapshot = S", "no section headers", "write [keys]"),
        ("[Keys]\nsnapshot = S", "there is no section [Keys]", "write [keys]"),
        ("[DEFAULT]\nsnapshot = S", "there is no section [DEFAULT]", "write [keys]"),
        ("[keys]\nsnapshot = S\n  Z", "snapshot = S Z: there is no such key", "a sign"),
        ("[keys]\nsnapshot = SPACE", "snapshot = SPACE: there is no such key", "a sign"),
    ],
)
def test_a_wrong_key_is_refused_in_one_line(content: str, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.ini"
    path.write_text(content)
    with pytest.raises(BadInput) as caught:
        read_keymap(path)
    assert message in caught.value.message and hint in caught.value.hint
    assert "keys.ini" in caught.value.message and "\n" not in caught.value.message + caught.value.hint


def test_a_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.ini"
    path.write_bytes(b"\xef\xbb\xbf[keys]\r\nsnapshot = S\r\n")
    assert read_keymap(path) == {"snapshot": "S"}


@pytest.mark.slow
def test_keys_are_exchanged_and_pressed_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert own_keys() == {}
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster" / "keys.ini").write_text("[keys]\nskip = f\nfix = s, slash\nfilter = f5\n")
    steering, keymap = at(Step.CHECKS), own_keys()

    async def drive(pilot: Pilot[Any]) -> None:
        assert "f Skip" in text(pilot.app) and "s Install" in text(pilot.app)
        await pilot.press("f", "s")
        await pilot.pause()
        assert steering.done == [do.skip("SHA256:studio"), do.fix("SHA256:studio")]

    run(WizardApp(steering, clock=fixed_clock, keymap=keymap), drive)


def test_every_action_that_may_have_another_key_is_documented() -> None:
    said = DOCUMENT.read_text()
    ours = [kind for kind in screens() if kind.__module__.startswith("app.")]  # other tests have screens of their own
    actions = {one.id for kind in ours for one in bindings_of(kind) if one.id}
    assert actions and [action for action in sorted(actions) if f"`{action}`" not in said] == []
