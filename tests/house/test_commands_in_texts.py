"""What a text tells a person to type is there in a checkout and in an installed Muster."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.commands import COMMANDS, GROUPS
from muster.__main__ import _typed_program
from profiles import installation
from profiles.installation import GROUPED_NAMES, TYPED_PROGRAM, command_line, demo_line, program, wizard_line

ROOT = Path(__file__).parents[2]
AWARE = {"profiles/installation.py", "profiles/bootstrap.py"}
"""The one file that knows both forms, and the one that speaks before anything of ours can be imported."""
NAMES = "|".join(("train", "wizard", "tour", *COMMANDS, *GROUPS))
TYPED = re.compile(
    r"cli_typer\.py \w|wizard\.py -|make (setup|demo)|: distributed-(train|check)"
    rf"|\b(with|see|type|try):? ({NAMES})( [A-Z-]|$)"
)


@functools.cache
def nodes_of(package: str) -> tuple[tuple[str, ast.Constant | ast.Call], ...]:
    """Return the literal texts outside docstrings, and the calls, of a package's files, each with its file's name."""
    files = (path for path in (ROOT / package).rglob("*.py") if str(path.relative_to(ROOT)) not in AWARE)
    return tuple((path.name, node) for path in files for node in texts_and_calls(ast.parse(path.read_text())))


def texts_and_calls(tree: ast.Module) -> Iterator[ast.Constant | ast.Call]:
    documents = set[int]()
    for node in ast.walk(tree):  # each node comes after those around it
        if isinstance(node, ast.Expr):
            documents.add(id(node.value))
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
        if is_text or isinstance(node, ast.Call):
            yield node


def texts(package: str) -> Iterator[tuple[str, str]]:
    return ((file, str(node.value)) for file, node in nodes_of(package) if isinstance(node, ast.Constant))


@pytest.mark.parametrize("package", ["app", "distributed", "profiles", "speech", "training"])
def test_no_text_names_a_program_that_an_installation_lacks(package: str) -> None:
    assert [(file, text) for file, text in texts(package) if TYPED.search(text)] == []


COMPOSERS = {"program", "command_line", "command_words", "command_about", "command"}
"""Functions that make a command line of a command's words; those of ``command_about`` come after a run's folder."""
VISIBLE = {
    *((command.group, command.name or key) for key, command in COMMANDS.items() if command.group),
    *((command.name or key,) for key, command in COMMANDS.items() if not command.group and key not in GROUPS),
    *(("runs", name) for name in ("list", "show", "compare", "clean")),
    ("profiles", "list"),
    ("--help",),
    ("tour",),
}
"""Commands by their words in the help."""
GROUPED = "|".join(key for key, command in COMMANDS.items() if command.group and not command.name)
ALONE = re.compile(rf"(?<!folder )'({GROUPED})( [^']*)?'")
"""A command of a group that is quoted in a text without its group."""


def composed(package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the first two words of the command lines, each with its file's name; empty where they are not literal."""
    for file, node in nodes_of(package):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in COMPOSERS:
            words = node.args[node.func.id == "command_about" :][:2]
            literal = [str(word.value) if isinstance(word, ast.Constant) else "" for word in words]
            if literal and literal[0]:
                yield file, tuple(literal)


@pytest.mark.parametrize("package", ["app", "distributed", "profiles", "speech", "training"])
def test_every_command_in_a_hint_is_named_as_the_help_shows_it(package: str) -> None:
    lines = [(file, words) for file, words in composed(package) if words[0] not in GROUPED_NAMES]
    known = {*VISIBLE, *((group, "") for group in GROUPS)}
    assert [line for line in lines if line[1][:1] not in known and line[1] not in known] == []
    assert [(file, text) for file, text in texts(package) if ALONE.search(text)] == []


def test_an_installation_says_what_its_help_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "IS_CHECKOUT", False)
    assert program("distributed-train", "demo") == "muster train demo"
    assert program("distributed-check", "--fix") == "muster machines check --fix"
    assert program("report") == "muster report"


def test_a_checkout_started_as_muster_says_muster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TYPED_PROGRAM, ".venv/bin/muster")
    assert command_line("distributed-train", "demo") == ".venv/bin/muster train demo"
    assert wizard_line("--plain") == ".venv/bin/muster wizard --plain"


def test_what_a_shell_does_not_find_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bin" / "muster"
    file.parent.mkdir()
    file.touch(mode=0o755)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert _typed_program(str(file)) == str(file)
    monkeypatch.setenv("PATH", str(file.parent))
    assert _typed_program(str(file)) == "muster"
    assert _typed_program("/x/muster/__main__.py") == "muster"


def test_from_another_folder_every_command_names_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert program("report") == f"python3 {ROOT}/cli_typer.py report"
    assert wizard_line() == f"python3 {ROOT}/wizard.py"
    assert demo_line() == f"make -C {ROOT} demo"


def test_the_script_of_a_checkout_says_what_its_help_lists() -> None:
    assert program("distributed-train", "demo") == "python3 cli_typer.py train demo"
