"""A person who answers from a list, for the prompts."""

from __future__ import annotations

from collections.abc import Callable


class ScriptedPerson:
    """Answers each question with the first line whose beginning of the question fits; Enter to all others.

    Args:
        answers: pairs of a part of the question and what is typed, each used once, in order.
    """

    def __init__(self, *answers: tuple[str, str]) -> None:
        self._answers = list(answers)
        self.heard: list[str] = []
        self.on_question: Callable[[str], None] = lambda question: None

    def line(self, question: str, default: str = "") -> str:
        return self._answer(question) or default

    def secret(self, question: str) -> str:
        return self._answer(question)

    def say(self, text: str = "") -> None:
        self.heard.append(text)

    def _answer(self, question: str) -> str:
        self.heard.append(question)
        self.on_question(question)
        for place, (part, answer) in enumerate(self._answers):
            if part in question:
                del self._answers[place]
                return answer
        return ""

    def said(self, *parts: str) -> bool:
        """Whether one line held all these parts."""
        return any(all(part in line for part in parts) for line in self.heard)
