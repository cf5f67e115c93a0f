"""Words of a command arrive unchanged through every login shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.ssh.process import LIMIT, command_line
from profiles.errors import BadInput

NASTY = [
    "a b",
    "$HOME `id` $(id)",
    "'\"\\",
    "\\\\n\\0101",
    "!! !$ !",
    "*?[a-z]~{x,y}",
    "é\u2028",
    "-n",
    "",
    "a\nb\n",
    "#;&|<>",
    "%s",
]
words = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20)


def through(shell: str, argv: list[str]) -> list[bytes]:
    """Send words through a shell as sshd does, and return what a program gets."""
    line, first_input = command_line(["printf", "%s\\0", *argv], "marker7")
    done = subprocess.run([shell, "-c", line], input=first_input, capture_output=True, check=True)
    marker, _, output = done.stdout.partition(b"\n")
    assert marker == b"marker7"
    return output.split(b"\0")[:-1]


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "tcsh", "csh", "ksh"])
def test_every_login_shell_hands_words_on_unchanged(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for argv in (NASTY, [*NASTY, "x" * 8_000]):
        assert through(shell, argv) == [word.encode() for word in argv]


def test_no_string_is_longer_than_small_servers_take() -> None:
    """dropbear ends the connection at 9,000 bytes; the command's own input follows its long words."""
    script = f"printf {'x' * 20_000}; cat"
    line, first_input = command_line(["sh", "-c", script], "m")
    assert len(line) < 9_000
    done = subprocess.run(["sh", "-c", line], input=first_input + b"its input", capture_output=True)
    assert done.stdout == b"m\n" + b"x" * 20_000 + b"its input"


@settings(max_examples=40)
@given(st.lists(words, min_size=1, max_size=4))
def test_any_words_arrive_unchanged(argv: list[str]) -> None:
    assert through("sh", argv) == [word.encode() for word in argv]


def test_a_signal_shows_in_the_exit_code() -> None:
    line, _ = command_line(["sh", "-c", "kill -9 $$"], "m")
    assert subprocess.run(["bash", "-c", line], capture_output=True).returncode == 128 + 9


@pytest.mark.parametrize(
    ("argv", "said"), [([], "empty"), ([""], "empty"), (["a", "b\0"], "NUL"), (["x" * LIMIT], "too long")]
)
def test_commands_that_cannot_travel_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        command_line([*argv, "!"] if said == "too long" else argv, "m")
