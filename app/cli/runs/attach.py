"""``attach``, ``logs``, ``replay`` and ``demo-run``: watching a run from any terminal, live or again."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import OUTPUT, AnyRun, Ascii, Detach, Json, Output
from app.cli.runs.question import Question
from app.cli.terminal import answer, heard_by, somebody
from app.console import can_only_print, command_about, say, say_error, show_line, visible
from app.dashboard.log_book import log_lines
from app.follow import Follower, Replay
from app.progress import PlainProgress, progress_for
from app.report import completed_lines, document, failure_hint, stopped_line, title_of
from app.run_view.last_visit import Visit
from app.run_view.run_state import RunState, reduce_events
from app.run_view.tables.evaluations import evaluation_lines
from app.run_view.timeline import run_sentence
from app.run_view.view import EndedRun, RunView
from distributed.run.returning import take_up
from profiles.bootstrap import release_keys
from profiles.errors import BadInput, ExitCode
from profiles.quantities import span_text
from training.records.event_log import newest_number, read_events
from training.records.events import ENGINE, Event, MemberEvent, TimingEvent
from training.records.plan import SCRIPT
from training.records.run_files import is_live
from training.records.run_folder import RunFolder
from training.records.runs import find_run
from training.run.requests.request_book import Action, leave_request
from training.run.stopping import SCRIPT_GRACE

STOPPING = {
    "stop": "stopping at the next step that all reach, with a snapshot",
    "kill": "ending at once, without a snapshot",
}
STOPPING_SCRIPT = f"stopping: the script has {span_text(SCRIPT_GRACE)} to end (press again to end at once)"
TAKEN_UP = "the supervisor of this run was gone; another one asks its machines how far they have come"
_START_PATIENCE = 60.0
"""Seconds to wait for a run to begin before it is left in the background: hashing much data takes longer."""
_SCRIPT_PATIENCE = 3.0
"""Seconds in which a launched script that cannot begin has usually failed."""
_LOOK = 0.05
_HANDOVER_PATIENCE = 10.0
"""Seconds in which a resumed run passes from the command's process to its own."""
QUESTION = "[d]etach: the run goes on (default), [s]top with a snapshot, or [k]ill? then Enter: "
"""After Ctrl-C; another Ctrl-C detaches."""
_ACTIONS: dict[str, Action] = {"s": "stop", "k": "kill"}


def stopping(path: Path, action: Action) -> str:
    """Return the message about what stopping the run will do."""
    launched = action == "stop" and RunFolder.open(path).metadata.strategy == SCRIPT
    return STOPPING_SCRIPT if launched else STOPPING[action]


# --------------------------------------------------------------------------------------------------------------- attach


def attach(
    run: AnyRun = "",
    plain: Annotated[bool, typer.Option("--plain", help="Print progress instead of the dashboard.")] = False,
    ascii_only: Ascii = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Show a run from its beginning until it ends: in the dashboard if the terminal allows, else line by line.

    Raises:
        BadInput: no such run.
    """
    try:
        path = find_run(output, run)
    except BadInput:
        from app.cli.runs.carried import show_carried  # loads SSH, which a run of this computer does not need

        if (code := show_carried(run, as_json)) is None:
            raise
        return code
    if take_up(path):
        say(TAKEN_UP)
    if fits_here() and not plain and not as_json:
        return show_dashboard(path, ascii_only)
    return show_run(path, as_json, ascii_only)


def fits_here() -> bool:
    """Whether this is a terminal that can show the dashboard."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not can_only_print()


def refuse_bad_keys() -> None:
    """Validate the user's keys, if a dashboard would open here, so that an error ends the command before a run starts.

    Raises:
        BadInput: see :func:`app.shell.keymap.read_keymap`.
    """
    from app.screens.own_keys import own_keys

    if fits_here():
        own_keys()


def ascii_lines() -> Callable[[str], None]:
    """Return a function that writes lines to stderr in pure ASCII."""
    from app.shell.look import ascii_text  # loads textual

    return lambda line: say(ascii_text(line))


def show_dashboard(path: Path, ascii_only: bool = False) -> ExitCode:
    """Show a run in the dashboard; the exit code is the run's if it has ended, 130 after Ctrl-C, else 0."""
    from app.dashboard.app import run_dashboard  # loads textual
    from app.screens.own_keys import own_keys

    code = ExitCode(run_dashboard(path, ascii_only, keymap=own_keys()))
    tell_of_run(path)
    return code


def tell_of_run(path: Path) -> None:
    """Say, once the screen is closed, whether the run continues and which commands come next."""
    if is_live(path):
        _goes_on(path)
        return
    try:
        tell(Follower(path).ended(reduce_events(read_events(path / "events.jsonl"))), False)
    except BadInput as error:
        say(f"{error.message}; {error.hint}" if error.hint else error.message)


def tell(ended: EndedRun, as_json: bool) -> ExitCode:
    """Write how a run ended: the document on stdout, or lines for a person; return the run's exit code."""
    outcome = ended.outcome
    if as_json:
        answer(True, document(ended), (), outcome.exit_code)
    elif outcome.status == "completed":
        for line in completed_lines(ended):
            show_line(line)
    if outcome.status == "cancelled":
        say(stopped_line(ended))
    elif outcome.status == "failed" and not as_json:
        say_error(outcome.message, failure_hint(ended))
    return outcome.exit_code


def _goes_on(path: Path) -> None:
    say(f"the run goes on; watch: {command_about(path, 'runs', 'attach')}")
    say(f"stop it: {command_about(path, 'runs', 'stop')}")


def leave(path: Path, as_json: bool, since: int = -1) -> ExitCode:
    """Report a run that was started in the background; if it has ended already, how.

    Args:
        since: number of the last event before it was started.
    """
    if (ended := _ended_at_once(path, since)) is not None:
        return tell(ended, as_json)
    run_id = RunFolder.open(path).metadata.run_id
    code = answer(as_json, {"run_id": run_id, "run_dir": str(path), "status": "starting"}, [run_id])
    if not as_json:
        Visit(path, newest_number(path / "events.jsonl")).leave(time.time())  # what happens from here on is news
        say(f"runs in the background; watch it with: {command_about(path, 'runs', 'attach')}")
    return code


def _ended_at_once(path: Path, since: int) -> EndedRun | None:
    """Wait until the workers of a run that was just started have connected; if it ends before that, return how."""
    end = time.monotonic() + _START_PATIENCE
    quiet = time.monotonic() + _HANDOVER_PATIENCE
    while True:
        follower = Follower(path)
        seen = _seen_until_start(follower, since, end)
        if seen is None:
            return None
        if any(event.seq is not None and event.seq > since for event in seen) or time.monotonic() > quiet:
            return follower.ended(reduce_events(seen))
        time.sleep(_LOOK)  # this start has said nothing: another process resumes the run, and lets it go to its own


def _seen_until_start(follower: Follower, since: int, end: float) -> list[Event] | None:
    """Return the events of a run that has ended; ``None`` as soon as it trains, or at time ``end``."""
    metadata = RunFolder.open(follower.path).metadata
    seen: list[Event] = []
    for event in follower.events():
        if event is not None:
            seen.append(event)
        if event is None and time.monotonic() < end:
            time.sleep(_LOOK)
        elif event is None:
            return None
        elif (event.seq or 0) > since and _starts(event, metadata.run_type == "local"):
            if metadata.strategy != SCRIPT:
                return None
            end = min(end, time.monotonic() + _SCRIPT_PATIENCE)
    return seen


def _starts(event: Event, local: bool) -> bool:
    if local:
        return isinstance(event, MemberEvent) and event.status == "started"
    return isinstance(event, TimingEvent) and event.part == ENGINE


def show_run(
    path: Path,
    as_json: bool,
    ascii_only: bool = False,
    person: Callable[[bool], bool] = somebody,
    since: int | None = None,
) -> ExitCode:
    """Show a run until it ends or the user detaches; the exit code is the run's.

    Args:
        person: whether a user watches the output, given whether it is JSON.
        since: number of the last event before it was resumed.
    """
    release_keys()  # there is no screen
    follower = Follower(path)
    write = ascii_lines() if ascii_only else None
    begun = next((event.time for event in read_events(path / "events.jsonl")), None)
    names = {member.rank: member.name for member in follower.plan.all_members}
    progress = progress_for(title_of(follower.plan), write=write, begun=begun, names=names, since=since)
    visit, signals, greeted = Visit(path), list[int](), not person(as_json)
    leaves = False
    with heard_by(lambda number, frame: signals.append(number)), progress, contextlib.ExitStack() as asking:
        question: Question | None = None
        for event in follower.events():
            if event is not None:
                visit.note(event, progress.state)
                progress(event)
            elif not greeted:
                greeted = _greet(visit, progress.state)
            choice = question.answer() if question is not None else None
            number = signals.pop(0) if signals else None
            if number is not None and question is None and _can_be_asked(number):
                question = asking.enter_context(Question(QUESTION, progress, answers=("", "d", *_ACTIONS)))
            elif number is not None:  # once more, or nobody can be asked
                choice = ""
            if choice is not None:
                question = None
                asking.close()
                if leaves := not _ends(path, choice):
                    break
    if leaves:
        _goes_on(path)
        if person(as_json):
            visit.leave(time.time())
        return ExitCode.DONE
    ended = follower.ended(progress.state)
    if not greeted:
        _greet(visit, ended.state)
    code = tell(ended, as_json)
    if somebody(as_json):
        visit.leave(time.time())
    return code


def _greet(visit: Visit, state: RunState) -> bool:
    """Report what has happened since the last visit; return ``True``."""
    if line := visit.line(state, time.time()):
        say(visible(line))
    return True


def _can_be_asked(number: int) -> bool:
    """Whether a signal is the user's Ctrl-C; others, and those without a terminal, detach."""
    return number == signal.SIGINT and sys.stdin.isatty()


def _ends(path: Path, choice: str) -> bool:
    """Carry out the answer to :data:`QUESTION`; return whether the run is to end, which is watched on."""
    action = _ACTIONS.get(choice.strip().lower()[:1])
    if action is not None:
        leave_request(path, action)
        say(stopping(path, action))
    return action is not None


# ----------------------------------------------------------------------------------------------------------------- logs


def logs(
    run: AnyRun = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    output: Output = OUTPUT,
) -> ExitCode:
    """Write the logs of a run's processes, with its warnings and lost machines, to stdout, each line with its machine.

    Raises:
        BadInput: no such run.
    """
    folder, plan, is_empty = RunFolder.open(find_run(output, run)), None, True
    with contextlib.suppress(BadInput):
        plan = folder.plan()
    view = RunView(folder.path, plan=plan, metadata=folder.metadata)
    with contextlib.suppress(KeyboardInterrupt):
        for line in log_texts(view, lambda: follow and is_live(view.path)):
            show_line(line)
            is_empty = False
    if is_empty and not follow:
        words = f"run {view.path.name}: its machines wrote no log, and none was lost"
        say(f"{words}; what happened in it: {command_about(view.path, 'runs', 'show')}")
    return ExitCode.DONE


def log_texts(view: RunView, goes_on: Callable[[], bool], notices: bool = True) -> Iterator[str]:
    """Yield each line in a run's logs with its machine; see :func:`app.dashboard.log_book.log_lines`."""
    for machine, text in log_lines(view, goes_on, notices):
        yield f"{machine}: {visible(text)}"


# --------------------------------------------------------------------------------------------------------------- replay


def replay(
    run: AnyRun = "",
    speed: Annotated[
        float, typer.Option(metavar="X", min=0.01, max=100_000, help="Playback speed; 2: twice as fast.")
    ] = 1.0,
    ascii_only: Ascii = False,
    output: Output = OUTPUT,
) -> ExitCode:
    """Replay a finished run, at its own speed or faster."""
    source = Replay(find_run(output, run), speed)
    if not fits_here():
        return _plainly(source, ascii_only)
    from app.dashboard.app import run_dashboard  # loads textual, which a pipe does not need
    from app.screens.own_keys import own_keys

    return ExitCode(run_dashboard(source.path, ascii_only, source=source, keymap=own_keys()))


def _plainly(source: Replay, ascii_only: bool) -> ExitCode:
    """Print the run's progress lines with the run's own timing."""
    write = ascii_lines() if ascii_only else say
    events = source.events()
    first_event = next(events, None)  # sets the clock of the run to its first event
    with PlainProgress(f"replay of {title_of(source.plan)}", RunState(), write, source.now) as progress:
        for event in itertools.chain([first_event], events):
            if event is not None:
                progress(event)
    ended = source.ended(progress.state)
    write(visible(run_sentence(ended.outcome.status, ended.outcome.message)))
    for line in evaluation_lines(ended.state):
        write(line)
    return ExitCode.DONE


def demo_run(
    machines: Annotated[int, typer.Option(metavar="N", help="Number of machines, 1 to 8.")] = 3,
    speed: Annotated[float, typer.Option(min=0.1, max=1000, help="Playback speed; 2: twice as fast.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="0: the recorded times; else they vary by up to 5 %.")] = 0,
    at_once: Annotated[bool, typer.Option("--at-once", help="Write the finished run and show nothing.")] = False,
    detach: Detach = False,
    ascii_only: Ascii = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Write a recorded run into a new run folder, at once or at its own speed, and show it."""
    from app.demo.run import start_demo_run
    from app.demo.services import recommended, write_demo_run

    if at_once:
        path = write_demo_run(output, machines, seed, time.time())
    else:
        path = start_demo_run(output, recommended(machines), sys.argv, seed, speed)
    if not (at_once or detach):
        return attach(path.name[:20], ascii_only=ascii_only, output=output, as_json=as_json)
    if not as_json:
        say("demo: no machine trains; this is a recorded run")
    if not (as_json or at_once):
        say(f"watch it with: {command_about(path, 'runs', 'attach')}")
    return answer(as_json, {"run_dir": str(path), "run_id": path.name[:20]}, [str(path)])
