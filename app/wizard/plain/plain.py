"""``wizard.py --plain``: the set-up as line-by-line questions and answers, for screen readers and dumb terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from app.console import command_line, ctrl_c_heard
from app.wizard.engine import Wizard
from app.wizard.plain import plain_words as words
from app.wizard.plain.prompts import BareLines, prompter
from app.wizard.services.services import Services
from app.wizard.state import actions as do
from app.wizard.state.assessment import of_finding
from app.wizard.state.data_actions import leave_out
from app.wizard.state.dependencies import blockers, measures, same_password_question
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.neighbours import ask_neighbours, network_question, unasked_networks
from app.wizard.state.records import UNSETTLED, Access, AccessNeed, AssessedRow, ItemStatus
from app.wizard.state.state import Action, StatePart, Step, TaskKind, WizardState, visited
from distributed.ssh.keys.host_keys import COMPARED
from profiles.errors import ExitCode

Watch = Callable[[Path], int]
Answered = Callable[[str], Action | None]
"""Handles an answer; returns the action to apply, ``None`` if it was handled already."""
R = TypeVar("R")
PATIENCE = 600.0
"""Seconds without output after which the user is asked again."""
LOOK_FOR = 3.0
"""Seconds to wait for discovery before machines are listed."""
_EVERYWHERE = "b: back, q: leave"
_USER = "NAME: log in there as that user"


class Leave(Exception):
    """The user leaves the set-up."""


def run_plain(
    services: Services,
    profile: str = "",
    ask: BareLines | None = None,
    watch: Watch | None = None,
    look_for: float = LOOK_FOR,
) -> int:
    """Run the set-up from Home to Launch, and return the exit code.

    Args:
        profile: start at the Plan step of this profile.
        ask: prompts to use; ``None``: on this terminal.
        watch: shows the started run, and returns its exit code.
        look_for: seconds to wait for machines and figures before they are shown.

    Raises:
        KeyboardInterrupt: ctrl+c; no file is left incomplete.
    """
    wizard = Wizard(services, profile)
    try:
        with ctrl_c_heard():
            run = PlainWizard(wizard, ask or prompter(), look_for).hold(may_watch=watch is not None)
    except (Leave, EOFError):
        return ExitCode.DONE
    finally:
        wizard.close_and_report()
    return watch(run) if watch is not None and run is not None else ExitCode.DONE


class PlainWizard:
    """Walks the user through the set-up."""

    def __init__(self, wizard: Wizard, ask: BareLines, look_for: float = LOOK_FOR) -> None:
        self._wizard = wizard
        self._ask, self._look_for = ask, look_for
        self._lines_told = 0
        self._in_full = False
        """Whether all candidate plans are shown, with all figures."""

    @property
    def _state(self) -> WizardState:
        return self._wizard.state

    def hold(self, may_watch: bool) -> Path | None:
        """Ask until the run trains; return its run folder if the user wants to watch it here."""
        steps: dict[Step, Callable[[], None]] = {
            Step.HOME: self._home, Step.MACHINES: self._machines, Step.ACCESS: self._access, Step.CHECKS: self._checks,
            Step.LINKS: self._links, Step.JOB: self._job, Step.STRATEGY: self._strategy, Step.PLAN: self._plan,
        }  # fmt: skip
        while self._state.step is not Step.LAUNCH or not self._launched():
            if self._state.step is not Step.LAUNCH:
                self._head()
                steps[self._state.step]()
        run = Path(self._state.launch.value.run)
        self._ask.say(
            f"the run trains in the background; watch it with: {command_line('runs', 'attach', run.name[:20])}"
        )
        watches_here = may_watch and self._ask.line("Watch it here? y or n", "y").casefold() in ("y", "yes")
        return run if watches_here else None

    # ------------------------------------------------------------------------------------------------------ tools

    def _head(self) -> None:
        step, shown = self._state.step, visited(self._state.needless)
        progress = f"{shown.index(step) + 1} of {len(shown)}" if step in shown else ""
        self._ask.say("")
        self._ask.say(f"{step.heading}, {progress}. {step.question}")

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._ask.say(line)

    def _do(self, action: Action) -> None:
        self._wizard.do(action)
        if self._state.notice:
            self._ask.say(self._state.notice)

    def _choose(self, question: str, answers: Mapping[str, Action], otherwise: Answered | None = None) -> None:
        """Ask a question and apply the action for the answer; going back and leaving work everywhere."""
        answer = self._ask.line(f"{question}; {_EVERYWHERE}:")
        if answer.casefold() in ("q", "quit"):
            raise Leave
        if answer.casefold() in ("b", "back"):
            action: Action | None = do.go_back()
        else:
            action = answers.get(answer) or (otherwise(answer) if otherwise is not None else None)
        if action is not None:
            self._do(action)

    def _until(self, condition: Callable[[WizardState], bool], patience: float = PATIENCE) -> None:
        """Wait for a condition and print progress; return after ``patience`` seconds without any."""
        while self._wizard.wait(lambda state: condition(state) or state.logged != self._lines_told, patience):
            state = self._state
            new = min(state.logged - self._lines_told, len(state.log))
            self._say(f"  {line}" for line in state.log[len(state.log) - new :])
            self._lines_told = state.logged
            if condition(state):
                return

    # ------------------------------------------------------------------------------------------------------ steps

    def _home(self) -> None:
        self._until(lambda state: state.home.status not in UNSETTLED)
        home = self._state.home
        profiles = home.value.profiles
        self._say(words.home_lines(self._state))
        if home.cause:
            self._ask.say(f"{home.cause}; {home.fix}")
        answer = self._ask.line("A number to open it, d: check this computer, q: leave", "1")
        if answer.casefold() in ("q", "quit"):
            raise Leave
        if answer == "d":
            self._do(do.doctor())
            self._until(lambda state: bool(state.doctor.value) or bool(state.notice))
            findings = self._state.doctor.value
            self._say(f"  {finding.check}: {of_finding(finding).label}, {finding.seen}" for finding in findings)
        elif answer == "1":
            self._do(do.new_setup())
        else:
            row = _numbered(profiles, answer, first=2)
            if row is None:
                self._ask.say("no such number")
            else:
                self._do(do.rerun(row.name))

    def _machines(self) -> None:
        looked = self._look_for
        self._until(lambda state: bool(state.machines.rows) and state.machines.seconds >= looked, looked + 2)
        self._say(words.machine_lines(self._state))
        question = "Numbers to pick or leave out, user@host to add one, s: ask this network for SSH, l: list again, "
        self._choose(f"{question}Enter: continue", {"": do.go_on()}, self._picked)
        self._until(lambda state: not state.is_under_way(TaskKind.NEIGHBOURS))

    def _picked(self, answer: str) -> None:
        if answer == "s":
            networks = unasked_networks(self._state)
            agreed = networks and self._ask.line(f"{network_question(networks)} y or n", "n").casefold() in ("y", "yes")
            self._do(ask_neighbours(networks if agreed else ()))
            return
        for word in answer.replace(",", " ").split() if answer != "l" else ():
            row = _numbered(self._state.machines.rows, word)
            self._do(do.pick(row.key) if row is not None else do.add_machine(word))

    def _access(self) -> None:
        self._until(lambda state: all(row.status not in UNSETTLED for row in state.access))
        rows = self._state.access
        self._say(words.access_lines(rows))
        needy = [row for row in rows if row.need is not AccessNeed.NOTHING and row.status is not ItemStatus.SKIPPED]
        if needy:  # passwords after all host keys: one password may do for several
            self._settle(min(needy, key=lambda row: row.need is AccessNeed.PASSWORD))
        elif not blockers(self._state):
            self._do(do.go_on())
        else:
            question = f"Enter: try again, s NUMBER: skip that machine, u NUMBER {_USER}"
            self._choose(question, {"": do.retry()}, partial(self._steered, rows))

    def _settle(self, row: Access) -> None:
        as_user = partial(self._as_user, row)
        if row.need is AccessNeed.TRUST:
            self._ask.say(f"{row.name} shows a new host key: {row.fingerprint}")
            end = row.fingerprint[-COMPARED:]
            self._ask.say(f"compare it up to its end, {end}, with what this command prints there: {row.compare}")
            accept = do.trust_key(row.key, row.fingerprint)
            answers = {"y": accept, "yes": accept, "s": do.skip(row.key)}
            question = f"y: accept it, s: skip this machine, u {_USER}, Enter: try again"
            self._choose(question, answers, lambda answer: as_user(answer) or do.retry(row.key))
        elif row.need is AccessNeed.APPROVAL:
            self._say(row.report.demands if row.report is not None else ())
            answers = {"y": do.approve(row.key), "yes": do.approve(row.key), "s": do.skip(row.key)}
            self._choose("y: use it, s: skip this machine, Enter: try again", answers, lambda _: do.retry(row.key))
        elif self._may_reuse(row):
            pass
        elif password := self._ask.secret(f"Password of {row.place}, used once to install a key; Enter: none:"):
            self._wizard.give_password(row.key, password)
        else:
            question = f"Enter: skip {row.name}, u {_USER}, r: try again"
            self._choose(question, {"": do.skip(row.key), "r": do.retry(row.key)}, as_user)

    def _may_reuse(self, row: Access) -> bool:
        """Ask whether this machine, and others of its user, have the password that another one has accepted."""
        alike = self._wizard.password_offer(row)
        if not alike:
            return False
        agreed = self._ask.line(f"{same_password_question(alike)} y: yes, Enter: no").casefold() in ("y", "yes")
        self._wizard.answer_offer(alike, agreed)
        return agreed

    def _as_user(self, row: Access, answer: str) -> Action | None:
        command, _, user = answer.partition(" ")
        return do.set_user(row.key, user) if command == "u" and user.strip() else None

    def _steered(self, rows: Sequence[Access], answer: str) -> Action | None:
        """Return the action for an answer about machines at Access: ``s 2`` or ``u 2 ada``."""
        if not answer.startswith("u "):
            return self._skipped(rows, answer)
        number, _, user = answer.removeprefix("u ").strip().partition(" ")
        row = _numbered(rows, number)
        if row is None:
            self._ask.say("no such number")
            return None
        return self._as_user(row, f"u {user}")

    def _skipped(self, rows: Iterable[AssessedRow], answer: str) -> Action | None:
        row = _numbered(rows, answer.removeprefix("s").strip())
        if row is None:
            self._ask.say("no such number")
        return do.skip(row.key) if row is not None else None

    def _checks(self) -> None:
        self._until(lambda state: all(row.status not in UNSETTLED for row in state.checks))
        self._say(words.check_lines(self._state.checks))
        check_again = do.retry()
        if not blockers(self._state):
            self._choose("Enter: continue, r: check again", {"": do.go_on()}, lambda answer: check_again)
            return
        question = "f: install what is missing, i: send it from here, r or Enter: check again, s NUMBER: skip it"
        answers = {"f": do.fix_all(), "i": do.send_packages(), "": check_again, "r": check_again}
        self._choose(question, answers, partial(self._skipped, self._state.checks))

    def _links(self) -> None:
        self._until(lambda state: state.links.status not in UNSETTLED)
        self._say(words.link_lines(self._state))
        onwards = do.retry() if blockers(self._state) else do.go_on()
        self._choose("Enter: continue, r: measure again", {"": onwards, "r": do.retry()})

    def _job(self) -> None:
        self._until(lambda state: not state.is_under_way(TaskKind.SELECTING))
        if self._state.notice:
            self._ask.say(self._state.notice)
        kinds = (TaskKind.JOB, TaskKind.DATA, *((TaskKind.FITS,) if self._state.members else ()))
        self._until(lambda state: all(state.part(kind).status not in UNSETTLED for kind in kinds))
        job = self._state.job
        self._say(words.job_lines(self._state))
        if job.cause:
            self._ask.say(f"{job.cause}; {job.fix}")
        if bring := measures(self._state):
            self._ask.say(bring)
        question = "NAME=VALUE to change an option, o: all options, p NAME: other profile, Enter: continue"
        salvageable = self._state.data.value.salvageable
        question += ", l: leave out what cannot be read" if salvageable else ""
        self._choose(question, {"": do.go_on(), **({"l": leave_out()} if salvageable else {})}, self._changed)

    def _changed(self, answer: str) -> Action | None:
        if answer.startswith("p "):
            return do.choose_profile(answer[2:].strip())
        if answer != "o" and "=" in answer:
            name, _, value = answer.partition("=")
            return do.set_option(name.strip(), value)
        self._say(words.all_option_lines(self._state) if answer == "o" else ["write it like epochs=5"])
        return None

    def _strategy(self) -> None:
        self._until(lambda state: state.strategy.status not in UNSETTLED or not blockers(state))
        self._until(lambda state: state.strategy.status not in UNSETTLED, self._look_for)
        self._say(words.strategy_lines(self._state, self._in_full))
        question = "A number, every=STEPS between merges, fastest, closest-to-exact or least-traffic, m: measure again"
        question += ", x: fewer" if self._in_full else ", x: every way with its figures"
        onwards = do.retry() if self._state.strategy.status is ItemStatus.FAILED else do.go_on()
        preferences = {name: do.set_preference(name) for name in do.PREFERENCES}
        self._choose(
            f"{question}, Enter: continue", {"": onwards, "m": do.retry(), **preferences}, self._strategy_answer
        )

    def _strategy_answer(self, answer: str) -> Action | None:
        name, _, steps = answer.casefold().partition("=")
        if name.strip() in ("every", "h") and steps.strip().isdecimal():
            self._do(do.set_interval(int(steps)))
            self._until(lambda state: not state.is_under_way(TaskKind.INTERVAL), 10.0)
            return None
        if answer == "x":
            self._in_full = not self._in_full
            return None
        candidate = words.numbered_way(self._state, int(answer), self._in_full) if answer.isdecimal() else None
        if candidate is None:
            self._ask.say("no such way to train")
        return do.choose_strategy(candidate.index) if candidate is not None else None

    def _plan(self) -> None:
        self._until(lambda state: state.plan.status not in UNSETTLED)
        self._until(
            lambda state: state.strategy.status not in UNSETTLED and state.plan.status not in UNSETTLED,
            2 * self._look_for,
        )
        self._say(words.plan_lines(self._state))
        if blockers(self._state):
            self._choose("Enter: try again", {"": do.retry()})
        else:
            single = len(self._state.members) == 1  # several are measured at Strategy
            question = f"Enter: start, s: only save, n NAME: save under another name{', m: measure' if single else ''}"
            self._choose(question, {"m": do.measure()} if single else {}, self._confirmed)

    def _confirmed(self, answer: str) -> Action | None:
        if not answer:
            return do.confirm(self._said_in_clear())
        if answer.startswith("n "):
            return do.save_as(answer[2:].strip())
        if answer == "s":
            self._do(do.save_only(self._said_in_clear()))
            self._until(lambda state: state.saved or bool(state.notice), 20.0)
        self._ask.say(self._state.notice if answer == "s" else "no such answer")
        return None

    def _said_in_clear(self) -> str:
        """Ask for consent to unencrypted training traffic; empty if the plan has none."""
        if not self._state.plan.value.in_clear:
            return ""
        return self._ask.line(f"Training traffic would not be encrypted. Type '{do.IN_CLEAR}' to accept that:")

    # ----------------------------------------------------------------------------------------------------- launch

    def _launched(self) -> bool:
        """Print the progress of the start; return whether the run trains."""
        before: tuple[str, ...] = ()
        while (state := self._state).launch.status in UNSETTLED:
            lines = tuple(words.launch_lines(state.launch.value))
            self._say(line for line in lines if line not in before)
            before = lines
            self._wizard.wait(partial(_launch_changed, state.launch), 5.0)
        launch = self._state.launch
        self._say(line for line in words.launch_lines(launch.value) if line not in before)
        if launch.status is ItemStatus.OK:
            return True
        self._ask.say(f"the run did not start: {launch.cause}")
        self._ask.say(f"fix: {launch.fix}" if launch.fix else "")
        self._choose(
            "Enter: try again, d NAME: drop that machine",
            {"": do.retry()},
            lambda answer: do.drop(answer.removeprefix("d").strip()),
        )
        return False


def _launch_changed(before: StatePart[LaunchProgress], state: WizardState) -> bool:
    return state.launch != before


def _numbered(rows: Iterable[R], text: str, first: int = 1) -> R | None:
    listed = list(rows)
    if not text.isdecimal() or not first <= int(text) < first + len(listed):
        return None
    return listed[int(text) - first]
