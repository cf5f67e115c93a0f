"""What the documents name is there: files, headings, commands with their options, targets of make."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from app.cli.commands import command_tree
from app.cli.wizard import options
from profiles.files.library import CONFIG
from profiles.files.resolve import list_profiles

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def _heading_names(page: Path) -> set[str]:
    """What a link to a heading is called: GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not heading or heading in _heading_names(target), link


@functools.cache
def _file_names() -> frozenset[str]:
    rooms = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "output"]
    return frozenset(path.name for path in (*ROOT.iterdir(), *(file for room in rooms for file in room.rglob("*"))))


@every_page
def test_program_files_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(r"`([\w./-]+\.py)\b", _prose(page)):
        known = (ROOT / name).exists() or (page.parent / name).exists() or Path(name).name in _file_names()
        assert known, name


@functools.cache
def _commands() -> TyperGroup:
    return typer.main.get_group(command_tree())


def _find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the rest."""
    command: Any = _commands()
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def _flags(command: Any) -> set[str]:
    return {"--help", "-h"}.union(*((*parameter.opts, *parameter.secondary_opts) for parameter in command.params))


def _all_flags() -> set[str]:
    wizard = re.findall(r"(?<!\w)--?[a-z]+", options().format_usage())
    return {"--help"}.union(wizard, *(_flags(command) for command in _commands().commands.values()))


def _lines(page: Path) -> Iterator[list[str]]:
    """The lines of a page that may be typed, fenced or in backticks, as words."""
    fenced = [body for language, body in FENCE.findall(page.read_text()) if language in ("", "sh", "bash")]
    for line in (*"".join(fenced).splitlines(), *re.findall(r"`([^`\n]+)`", _prose(page))):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe: no command
            continue
        if words:
            yield words


def _is_python(word: str) -> bool:
    return word in ("python", "python3", ".venv/bin/python")


@every_page
def test_commands_are_there_with_these_options(page: Path) -> None:
    for words in _lines(page):
        words = ["python3", "cli_typer.py", *words[1:]] if words[0] == "muster" and words[1:] else words
        whole = _is_python(words[0]) and words[1:2] == ["cli_typer.py"]
        if whole and words[2:3] in (
            ["wizard"],
            ["tour"],
            ["GROUP"],
            ["--help"],
            ["--help-all"],
            ["--install-completion"],
        ):
            continue
        command, rest = _find(words[2:] if whole else words)
        assert not whole or command is not _commands(), words
        ours = rest[: rest.index("--")] if "--" in rest else rest  # what follows is another program's
        given = {word for word in ours if re.match("--?[a-z]", word)}
        if command is not _commands():
            assert given <= _flags(command), words
        elif words[:2] == ["python3", "wizard.py"] or (words[0] in given and "performance" not in page.name):
            assert given <= _all_flags(), words


@every_page
def test_trainings_that_are_typed_have_their_profile(page: Path) -> None:
    """A shipped profile, a name to fill in, a run to resume, or a custom job, which needs none."""
    shipped = {entry.name for entry in list_profiles() if entry.source == CONFIG}
    for words in _lines(page):
        words = ["python3", "cli_typer.py", *words[1:]] if words[0] == "muster" else words
        if words[1:2] == ["cli_typer.py"] and words[2:3] in (["train"], ["distributed-train"]) and words[3:]:
            name, given = words[3], set(words[3:])
            known = name in shipped or name.isupper() or "--resume" in given or {"--task", "--model-path"} <= given
            assert known, words


@every_page
def test_targets_modules_and_scripts_that_are_typed_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in _lines(page):
        if _is_python(words[0]):
            words = words[1:] or [""]
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        elif words[0] == "-m" and words[1] != "MODULE":
            assert importlib.util.find_spec(words[1]), words
        elif re.fullmatch(r"(benchmarks|docs|examples)/.*\.py", words[0]):
            script = (ROOT / words[0]).read_text()
            assert all(f'"{word}"' in script for word in words[1:] if word.startswith("--")), words


def test_commands_in_hints_are_there() -> None:
    """What messages and screens tell a person to type."""
    for path in (ROOT / room for room in ("app", "distributed", "training", "profiles", "speech")):
        for file in path.rglob("*.py"):
            for name in re.findall(r"(?<!``)cli_typer\.py ([a-z][a-z-]+)", file.read_text()):
                assert name in _commands().commands, (str(file), name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_readmes_training_from_python_runs_as_it_stands(tmp_path: Path) -> None:
    snippets = [body for language, body in FENCE.findall((ROOT / "README.md").read_text()) if "LocalTrainer" in body]
    script = tmp_path / "script" / "snippet.py"
    script.parent.mkdir()
    script.write_text(snippets[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert "'validation': {'loss': " in done.stdout, done.stderr


@every_page
def test_python_that_starts_workers_is_guarded(page: Path) -> None:
    for language, body in FENCE.findall(page.read_text()):
        if language == "python" and ".fit(" in body:
            assert '\nif __name__ == "__main__":' in f"\n{body}", body


def test_the_readme_has_at_most_100_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_readme_promises_what_was_measured() -> None:
    readme, measured = (ROOT / "README.md").read_text(), (ROOT / "docs" / "inside" / "performance.md").read_text()
    promised = re.search(r"fell from ([\d.]+ %) to ([\d.]+) % or less", readme.replace("\n", " "))
    assert promised
    runs = re.search(r"^\| before \| ([\d.]+ %) .*\n((?:\| \d \| \*\*.*\n)+)", measured, re.MULTILINE)
    assert runs and runs[1] == promised[1]
    after = [float(error) for error in re.findall(r"^\| \d \| \*\*([\d.]+) %", runs[2], re.MULTILINE)]
    assert len(after) == 3 and max(after) == float(promised[2])
