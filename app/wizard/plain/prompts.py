"""Prompts of the plain set-up: questionary, or bare lines on terminals that only print."""

from __future__ import annotations

import getpass
import os
import sys
from typing import TYPE_CHECKING, Any

from app.console import can_only_print, visible

if TYPE_CHECKING:
    from questionary import Question


def prompter() -> BareLines:
    """Return questionary's prompts, or bare lines if the terminal only prints."""
    return BareLines() if can_only_print() else Questions()


class BareLines:
    """Prompts for terminals that only print: no escape code is ever written.

    Every method raises ``KeyboardInterrupt`` on ctrl+c, and ``EOFError`` at the end of the input.
    """

    def line(self, question: str, default: str = "") -> str:
        """Return the typed line without surrounding white space, or ``default`` if it is empty."""
        print(f"{visible(question)} {f'[{visible(default)}] ' if default else ''}", end="", flush=True)
        return input().strip() or default

    def secret(self, question: str) -> str:
        """Return typed text without echoing it."""
        return getpass.getpass(f"{visible(question)} ", stream=sys.stdout)

    def say(self, text: str = "") -> None:
        """Print a line; control characters in it are escaped."""
        print("\n".join(visible(line) for line in text.split("\n")), flush=True)


class Questions(BareLines):
    """Prompts by questionary, with history and editing keys; without colours if NO_COLOR is set."""

    def line(self, question: str, default: str = "") -> str:
        import questionary  # with prompt_toolkit 0.1 s, which --help does without

        shown = f"{visible(question)}{f' [{visible(default)}]' if default else ''}"
        return _asked(questionary.text(shown, **_look())).strip() or default

    def secret(self, question: str) -> str:
        import questionary

        return _asked(questionary.password(visible(question), **_look()))


def _asked(question: Question) -> str:
    """Return the answer; Python handles ctrl+c, as prompt_toolkit loses one that arrives while it starts."""
    return str(question.application.run(handle_sigint=False))


def _look() -> dict[str, Any]:
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.styles import Style

    plain = bool(os.environ.get("NO_COLOR"))
    style = Style([] if plain else [("question", "bold")])
    return {"qmark": "", "style": style, "color_depth": ColorDepth.DEPTH_1_BIT if plain else None}
