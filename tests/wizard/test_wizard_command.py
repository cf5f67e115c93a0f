"""``wizard.py`` as a person starts it: on a terminal of its own, and where there is none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.wizard import main
from app.demo.services import DemoServices
from app.wizard.engine import Wizard
from app.wizard.state import actions as do
from app.wizard.state.dependencies import blockers
from app.wizard.state.records import Access, AccessNeed, ItemStatus
from app.wizard.state.state import Step, WizardState
from tests.waiting import until_state
from tests.wizard.own_terminal import OwnTerminal

ROOT = Path(__file__).parents[2]
WIZARD = str(ROOT / "wizard.py")
_ASKS = re.compile(r"(leave:|leave \[1\]) *\Z")


def test_without_a_terminal_it_says_what_to_type() -> None:
    done = subprocess.run(
        [sys.executable, WIZARD], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert b"cli_typer.py train PROFILE" in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\ntry:\n"
        "    from app.cli.wizard import main\n    main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'textual', 'pydantic', 'questionary')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--plain" in done.stdout


@pytest.mark.slow
def test_on_a_terminal_it_reaches_the_same_plan_as_the_state_machine(tmp_path: Path) -> None:
    with OwnTerminal([WIZARD, "--plain", "--demo", "2"], tmp_path) as terminal:
        terminal.wait_for("leave [1]")
        terminal.type("")
        terminal.wait_for("Machines, 2 of")
        terminal.wait_for("leave:")
        while "  2  demo-studio" not in terminal.screen:
            terminal.type("l")
            terminal.wait_for("leave:")
        while "Plan, " not in terminal.screen:
            last = terminal.screen.splitlines()[-1]
            terminal.type("y" if "accept it" in last else "")
            terminal.wait_for("leave:")
        (planned,) = re.findall(r"  time: (.*)", terminal.screen)
        assert "\x1b" not in terminal.screen
        terminal.interrupt()
        assert terminal.exit_code() == 130
    wizard = Wizard(DemoServices(2, speed=20.0, output=tmp_path))
    try:
        wizard.do(do.new_setup())
        until_state(wizard, lambda state: len(state.machines.rows) == 2)
        wizard.do(do.pick(wizard.state.machines.rows[1].key, True))
        while wizard.state.step is not Step.PLAN:
            until_state(wizard, lambda state: not blockers(state) or _stranger(state) is not None)
            row = _stranger(wizard.state)
            wizard.do(do.go_on() if row is None else do.trust_key(row.key, row.fingerprint))
        until_state(wizard, lambda state: state.plan.status in (ItemStatus.OK, ItemStatus.WARNING))
        assert " ".join(wizard.state.plan.value.time).startswith(planned.rstrip())
    finally:
        wizard.close()


def _stranger(state: WizardState) -> Access | None:
    return next((row for row in state.access if row.need is AccessNeed.TRUST), None)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["Home, 1", "Plan, 4"])
def test_ctrl_c_leaves_everything_as_it_was(tmp_path: Path, project_copy: Path, at: str) -> None:
    before = (project_copy / "config.ini").read_bytes()
    with OwnTerminal([str(project_copy / "wizard.py"), "--plain"], tmp_path) as terminal:
        while at not in terminal.screen:
            terminal.wait_until(_ASKS)
            terminal.type("")
        terminal.interrupt()
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.screen
    assert (project_copy / "config.ini").read_bytes() == before
    assert not (project_copy / "profiles" / "saved").exists()
    assert list(tmp_path.iterdir()) == [project_copy]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--demo", "0"], "error: --demo 0: the tour has 1 to 8 machines"),
        (["--demo", "-1"], "error: --demo -1: the tour has 1 to 8 machines"),
        (["--demo", "9" * 30, "--plain"], f"error: --demo {'9' * 30}: the tour has 1 to 8 machines"),
        (["--demo", "2", "--profile", "mine"], "error: --profile mine: the recorded machines have only one profile"),
        (["--profile", "nobody"], "error: there is no profile 'nobody'"),
        (["--profile", "", "--plain"], "error: there is no profile ''"),
        (["--profile", "dem", "--plain"], "hint: did you mean 'demo'?"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_shown(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err.splitlines() and len(shown.err.splitlines()) == 2
    assert shown.out == ""
