"""``generate`` and ``chat``: text and conversations with a trained language model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from app.cli.arguments import OUTPUT, Device, Json, Output, Together
from app.cli.model.serve import loaded
from app.cli.terminal import answer, only_data_on_stdout
from app.console import command_line, ctrl_c_heard, say, show_line, show_piece, visible
from profiles.errors import BadInput, ExitCode
from training.records.model_folders import base_model, find_usable_model, holds_tokenizer, is_language_model, model_kind

if TYPE_CHECKING:
    from training.inference.generation import Sampling, TextGenerator
    from training.tasks.text.message_rows import Message

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Model folder, run id, profile (its newest run) or hub name; default: the newest run's."
    ),
]
System = Annotated[str, typer.Option("--system", metavar="TEXT", help="System text before the conversation.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, max=10, help="0: the likeliest token each time; higher: more varied.")
]
TopP = Annotated[
    float, typer.Option("--top-p", min=0.001, max=1, help="Draw among the likeliest tokens of this share together.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, max=1_000_000, help="Longest text, in tokens.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed; the same one draws the same text.")]
Tokenizer = Annotated[
    str, typer.Option("--tokenizer", metavar="NAME", help="Folder or hub name, where the model's folder has none.")
]


def generate(
    model: Model = "",
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to answer, or to go on from; default: what stdin gives.")
    ] = "",
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a file.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Go on from the prompt as it is, without the model's chat template.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also show what the base model writes.")] = False,
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    tokenizer: Tokenizer = "",
    device: Device = "auto",
    local: Together = 1,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Write a language model's answer to a prompt, or its continuation of a text if it has no chat template.

    Raises:
        BadInput: the model cannot be found or used, there is no prompt, or none that the model can read.
    """
    if model and not prompt and file is None and any(map(str.isspace, model)):  # MODEL was left out
        model, prompt = "", model
    path = _find_writer(output, model)
    models = [*([base_model(path)] if compare else []), str(path)]
    text = prompt or _read_prompt(file)
    if not (exact or text.strip()):
        raise BadInput("the prompt is empty", "write a text; with --exact the model begins one of its own")
    texts = []
    for number, name in enumerate(models):
        writer = _load(name, device, tokenizer or (str(path) if holds_tokenizer(path) else ""), local)
        if compare and not as_json:
            show_line(f"{('before', 'after')[number]}: {visible(name)}")
        sampling = _sampling(max_tokens, temperature, top_p, seed)
        pieces = writer.generate(_prompt_of(writer, text, exact, system), sampling)
        texts.append({"model": name, "text": _show(pieces, as_json), "tokens": writer.tokens})
    base = {"base": texts[0]} if compare else {}
    return answer(as_json, {"prompt": text, **texts[-1], **base, "seed": seed}, ())


def chat(
    model: Model = "",
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    tokenizer: Tokenizer = "",
    device: Device = "auto",
    local: Together = 1,
    output: Output = OUTPUT,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON document a line: the pieces of an answer, then its end.")
    ] = False,
) -> ExitCode:
    """Talk with a language model; a line is a message, /reset begins anew, Ctrl-C or Ctrl-D ends.

    Raises:
        BadInput: the model cannot be found or used, or knows no conversations.
    """
    path = _find_writer(output, model)
    writer = _load(str(path), device, tokenizer, local)
    if not writer.has_chat_template:
        hint = f"it goes on from a text: {command_line('model', 'generate', str(path), 'TEXT')}"
        raise BadInput(f"model {path} has learnt plain text and has no chat template, so it cannot converse", hint)
    talk = Conversing(writer, system, _sampling(max_tokens, temperature, top_p, seed))
    answers = _Answers(as_json)
    answers.begin(path)
    try:
        for line in _lines(as_json):
            _respond(talk, line, answers)
    except KeyboardInterrupt:
        say("")
    return ExitCode.DONE


class Conversing:
    """A conversation of several turns.

    Args:
        system: system text before it; empty: none.
    """

    def __init__(self, writer: TextGenerator, system: str, sampling: Sampling) -> None:
        self._writer, self._sampling = writer, sampling
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = []

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = []

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces; even a partial answer is kept in the conversation."""
        asked: list[Message] = [*self._system, *self.messages, {"role": "user", "content": text}]
        fitting = self._writer.truncate(asked, self._sampling.max_tokens)
        written = ""
        with closing(cast(Any, self._writer.generate(self._writer.prompt(fitting), self._sampling))) as pieces:
            for piece in pieces:
                written += piece
                yield piece
        self.messages = [*fitting[len(self._system) :], {"role": "assistant", "content": written}]


@dataclass(frozen=True)
class _Answers:
    """Output of answers: text for people, or JSON lines for programs."""

    as_json: bool

    def begin(self, model: Path) -> None:
        if self.as_json:
            show_line(json.dumps({"ready": str(model)}))
        elif sys.stdin.isatty():
            say("/reset begins anew, Ctrl-C ends")

    def add(self, piece: str) -> None:
        if self.as_json:
            show_line(json.dumps({"text": piece}))
        else:
            show_piece(piece)

    def end(self, note: str = "") -> None:
        """End an answer; ``note`` says why there is none."""
        if self.as_json:
            show_line(json.dumps({"end": True, "note": note}))
        elif note:
            say(visible(note))
        else:
            show_piece("\n")


def _respond(talk: Conversing, line: str, answers: _Answers) -> None:
    """Answer a line, or execute it if it is a command."""
    note = ""
    if line == "/reset":
        talk.reset()
        note = "begun anew"
    elif line.startswith("/") and " " not in line:
        note = f"{line} is unknown: /reset begins anew, Ctrl-C ends"
    else:
        try:
            for piece in talk.ask(line):
                answers.add(piece)
        except BadInput as error:  # this message alone cannot be answered
            note = f"{error.message}: {error.hint}"
    answers.end(note)


def _lines(as_json: bool) -> Iterator[str]:
    """Yield the typed lines, without empty ones."""
    typed = sys.stdin.isatty() and not as_json
    if typed:
        import readline  # noqa: F401 - arrows and history in input()
    while True:
        if typed:
            try:
                with ctrl_c_heard():
                    line = input("> ")
            except EOFError:
                say("")
                return
        elif not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def _show(pieces: Iterator[str], as_json: bool) -> str:
    """Print a text as its pieces arrive, unless ``as_json``; return it."""
    text = ""
    for piece in pieces:
        text += piece
        if not as_json:
            show_piece(piece)
    if not as_json:
        show_piece("\n")
    return text


def _find_writer(output: Path, reference: str) -> Path:
    """Return the path or name of a language model.

    Raises:
        BadInput: there is none, or it is of another kind.
    """
    try:
        path = find_usable_model(output, reference, is_language_model)
    except BadInput as error:
        if any(map(str.isspace, reference)) or not reference:
            raise
        raise BadInput(error.message, f"{error.hint}; a prompt of one word stands after the model's name") from error
    if not path.is_dir() or (kind := model_kind(path)) == "text":
        return path
    if kind == "speech":
        raise BadInput(
            f"model {path} hears, and writes no texts of its own",
            f"use: {command_line('model', 'transcribe', str(path), 'FILE.wav')}",
        )
    hint = "models that transformers' save_pretrained has saved can; open this one in a script"
    raise BadInput(f"model {path} is no language model in the format of transformers", hint)


def _load(model: str, device: str, tokenizer: str, workers: int) -> TextGenerator:
    say(f"writing with {visible(model)}")
    with only_data_on_stdout():
        from training.inference.generation import TextGenerator  # imports torch

        return loaded(TextGenerator, model, device, tokenizer, workers)


def _sampling(max_tokens: int, temperature: float, top_p: float, seed: int) -> Sampling:
    from training.inference.generation import Sampling  # imports torch

    return Sampling(max_tokens, temperature, top_p, seed)


def _prompt_of(writer: TextGenerator, text: str, exact: bool, system: str) -> list[int]:
    if exact or not (writer.has_chat_template or system):
        return writer.exact_prompt(text)
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return writer.prompt([*before, {"role": "user", "content": text}])


def _read_prompt(file: Path | None) -> str:
    """Return the prompt from a file, or from stdin.

    Raises:
        BadInput: it cannot be read, or there is none.
    """
    if file is None:
        if sys.stdin.isatty():
            raise BadInput("no prompt was given", "write it after the model, in quotes; pipe it in; or add --file FILE")
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise BadInput(f"--file {file}: {reason}", "name a text file") from error
