"""The live dashboard of one run: six tabs that draw one picture twice a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.notifications import SeverityLevel
from textual.style import Style
from textual.widgets import ContentSwitcher

from app.console import command_about, profile_text, visible
from app.dashboard.dialogs.commands import Commands, Proof, Reporting, StopDialog, without_effect
from app.dashboard.dialogs.next_steps import ModelDialog, commands_after
from app.dashboard.dialogs.writing import next_dialog
from app.dashboard.reader import Picture, RunReader
from app.dashboard.tabs.charts import ChartsPane
from app.dashboard.tabs.logs import LogsPane
from app.dashboard.tabs.machines import MachinesPane
from app.dashboard.tabs.network import NetworkPane
from app.dashboard.tabs.overview import EventsPane, OverviewPane
from app.dashboard.tabs.pane import LEVELS, Pane, Words
from app.dashboard.tabs.samples import SamplesDialog
from app.follow import Follower
from app.run_view.headline import RunHeadline, headline
from app.run_view.timeline import with_reason
from app.shell.base_screen import BaseScreen
from app.shell.dialogs import QuestionDialog, TextDialog, refusal_by
from app.shell.keys import Key, bindings
from app.shell.text import literal
from app.wizard.state.ways import label_of_run
from distributed.hosts.file import machine_to_add
from distributed.hosts.schema import Machine
from distributed.planning.run_time import plan_stages_text
from training.run.requests.request_book import Action

_MARK = 2
"""Cells of the symbol before the headline."""
PAINT = 0.5
FIRST = 0.05
"""Seconds between the first paints, until the events are read."""
TABS: tuple[tuple[str, str, type[Pane]], ...] = (
    ("1", "Overview", OverviewPane),
    ("2", "Machines", MachinesPane),
    ("3", "Charts", ChartsPane),
    ("4", "Network", NetworkPane),
    ("5", "Logs", LogsPane),
    ("6", "Events", EventsPane),
)
_NEXT = "After a run: try its model, see the report, or what to type to go on."
_SAMPLES = "What the model makes of a few held-out samples, before and after training."
_OF_TABS = {key.key: key for _, _, kind in TABS for key in kind.KEYS}


class DashboardScreen(BaseScreen):
    """The dashboard of one run.

    Args:
        source: of its events, where they do not come live from the folder (a replay).
    """

    AUTO_FOCUS = ""
    HEADING = "Dashboard"
    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("d", "detach", "Detach", "Leave; the run goes on in the background.", main=True),
        Key("p", "pause", "Pause", "Pause training after the same step everywhere, or resume it."),
        Key("s", "snapshot", "Snapshot", "Write a snapshot now."),
        Key("x", "stop", "Stop", "Stop training with a snapshot, and check that nothing is left running."),
        Key("space", "freeze", "Freeze", "Freeze the picture; data still arrives."),
        Key("plus", "add", "Add", "Add a machine to the run."),
        Key("minus", "drop", "Drop", "Remove one machine; the others continue."),
        Key("o", "report", "Report", "Write the report of this run and open it."),
        Key("n", "next", "Next", _NEXT, shown=False),
        Key("b", "samples", "Samples", _SAMPLES, shown=False),
        *[Key(key, f"tab('{name.lower()}')", name, f"Tab: {name}.", shown=False) for key, name, _ in TABS],
    )
    BINDINGS: ClassVar[list[BindingType]] = bindings(_OF_TABS.values())
    DEFAULT_CSS = """
    DashboardScreen > #body { padding: 0 1; }
    DashboardScreen #tabs { height: 1; text-wrap: nowrap; }
    DashboardScreen #headline { height: auto; max-height: 3; }
    DashboardScreen #since { height: auto; max-height: 3; display: none; }
    DashboardScreen ContentSwitcher { height: 1fr; }
    DashboardScreen Pane { height: 100%; padding-top: 1; }
    """

    def __init__(self, run_dir: Path, source: Follower | None = None) -> None:
        super().__init__()
        self._reader = RunReader(run_dir, source)
        self.commands = Commands(run_dir)
        self._reporting = Reporting(run_dir, lambda address: self.app.open_url(address))
        self.picture = Picture(run_dir)
        """The picture that is painted."""
        self._frozen = False
        self._replay = source is not None
        self._tab = "overview"
        self._back = True
        """Whether the news since the last visit are shown: until another tab is opened."""

    # ------------------------------------------------------------------------------------------------- the frame

    def body(self) -> ComposeResult:
        yield Words(id="tabs")
        yield Words(id="headline")
        yield Words(id="since")
        with ContentSwitcher(initial=self._tab):
            for _, name, kind in TABS:
                yield kind(id=name.lower())

    def on_mount(self) -> None:
        super().on_mount()
        self._reader.start()
        self.query_one("#tabs", Words).show(_tabs(self._tab))
        self.set_interval(PAINT, self._paint)
        self.set_timer(FIRST, self._paint_first)

    def on_unmount(self) -> None:
        self._reader.close()

    def _paint_first(self) -> None:
        self._paint()
        if not self.picture.read and self.picture.events < 2000:
            self.set_timer(FIRST, self._paint_first)

    def on_resize(self) -> None:
        if self.ready:
            self._draw()

    def title_line(self) -> Content:
        picture = self.picture
        plan = picture.plan
        name = profile_text(plan.profile.name) if plan else picture.path.name
        method = "" if plan is None else plan.launch.title if plan.launch else label_of_run(plan)
        run_id = plan.run_id if plan else ""
        pieces: list[Content | str] = [
            Content.styled("Muster", "bold $primary"), literal(name, "bold"), literal(run_id, "$text-muted"),
            literal(method, "$text-muted"),
        ]  # fmt: skip
        if self._replay:
            pieces.append(Content.styled("replay", "$text-accent"))
        if self._frozen:
            pieces.append(Content.styled("frozen, space continues", "bold $text-warning"))
        return Content("  ").join(piece for piece in pieces if piece)

    def offered_keys(self) -> tuple[Key, ...]:
        if not self.ready:
            return self.KEYS
        pane_keys = self._pane.KEYS
        screen_keys = self.KEYS
        if not self._alive:
            screen_keys = self._keys_after_the_end()
        elif self.picture.state.status == "paused":
            screen_keys = tuple(
                Key("p", "pause", "Resume", "Resume training.") if key.key == "p" else key for key in screen_keys
            )
        screen_keys = tuple(key for key in screen_keys if key.action not in without_effect(self.picture))
        return (screen_keys[0], *pane_keys, *screen_keys[1:])

    def _keys_after_the_end(self) -> tuple[Key, ...]:
        report = Key("o", "report", "Report", "Write the report of this run and open it.", main=True)
        following = [Key("n", "next", "Next", _NEXT)] if self._next_commands() else []
        following += [Key("b", "samples", "Samples", _SAMPLES)] if self.picture.showcase else []
        view_keys = [key for key in self.KEYS if key.action == "freeze" or key.action.startswith("tab(")]
        return (report, *following, Key("d", "detach", "Leave", "Leave."), *view_keys)

    def help_text(self) -> str:
        plan = self.picture.plan
        names = (
            f"{label_of_run(plan)}: {plan.profile.strategy.strategy} over {plan.engine}."
            if plan and not plan.is_script
            else ""
        )
        names += f"\n{plan_stages_text(plan)}." if plan and plan.is_staged else ""
        return f"{self._pane.about()}\n{names}\n" if self.ready else ""

    def headless(self) -> str:
        words = ("replay",) if self._replay else ("logs", "-f") if self._tab == "logs" else ("attach", "--plain")
        return command_about(self.picture.path, "runs", *words) + " | cat" * self._replay

    def copied(self) -> str:
        return self._pane.copied() or (self.picture.plan.run_id if self.picture.plan else str(self.picture.path))

    def leave_question(self) -> str:
        return "The run goes on without this screen. Leave it?" if self._alive else ""

    # ------------------------------------------------------------------------------------------------- painting

    @property
    def _alive(self) -> bool:
        return self.picture.live and not self._replay and self.picture.state.ended is None

    @property
    def _pane(self) -> Pane:
        return self.query_one(f"#{self._tab}", Pane)

    def _paint(self) -> None:
        newest = self._reader.picture
        self._tell(newest)
        if not self._frozen:
            self.picture = newest
            self._draw()

    def _draw(self) -> None:
        picture = self.picture
        self.refresh_frame()
        self.query_one("#headline", Words).show(self._headline(picture))
        since = self.query_one("#since", Words)
        since.display = bool(picture.since) and self._back
        since.show(literal(picture.since, "$text-accent"))
        self._pane.show(picture)

    def _headline(self, picture: Picture) -> Content:
        if not picture.read and picture.events:
            return literal(f"reading what has happened so far: {picture.events} events", "$text-muted")
        line = headline(picture)
        if picture.damage and not picture.state.members:
            line = RunHeadline("bad", "Damaged", (picture.damage,))
        line = line.within(self.query_one("#headline", Words).size.width - _MARK)
        mark = LEVELS[line.level]
        pieces = [mark.show(line.word).stylize("bold")]
        pieces += [literal(detail, mark.style if line.level == "bad" and index == 1 else "")
                  for index, detail in enumerate(line.details)]  # fmt: skip
        return Content(" · ").join(pieces)

    def _tell(self, picture: Picture) -> None:
        while news := self._reporting.news():
            self._say(*news, timeout=8)
        # never over a dialog in which somebody types or reads
        if isinstance(self.app.screen, DashboardScreen | ModelDialog) and (report := self._reporting.report()):
            self.app.call_later(self.app.clear_notifications)  # that it is being written
            self.app.push_screen(report)
        for asked, answer in self.commands.news(picture):
            if answer.outcome != "accepted":  # that it was requested was shown already
                words = with_reason(f"{asked} {answer.outcome}", answer.message)
                self._say(words, "warning" if answer.outcome == "refused" else "information")

    def _say(self, words: str, severity: SeverityLevel = "warning", timeout: float = 4) -> None:
        self.notify(visible(words), severity=severity, timeout=timeout, markup=False)

    # -------------------------------------------------------------------------------------------------- actions

    def action_tab(self, name: str) -> None:
        """Go to a tab."""
        self._tab, self._back = name, False
        self.query_one(ContentSwitcher).current = name
        self.query_one("#tabs", Words).show(_tabs(name))
        pane = self._pane
        self.set_focus(next((widget for widget in pane.query("RowTable, LogView") if widget.focusable), None))
        self._draw()

    def action_pane(self, key: str) -> None:
        """Pass a key to the tab that it belongs to."""
        pane = self._pane
        if any(pane_key.action == f"pane('{key}')" for pane_key in pane.KEYS):
            if key == "u":
                self._reader.next_former()
            pane.press(key)

    def action_filter(self) -> None:
        pane = self._pane
        if isinstance(pane, LogsPane):
            pane.search()
        else:
            super().action_filter()

    def on_row_table_ticked(self) -> None:
        self.action_freeze()

    def action_freeze(self) -> None:
        """Hold the picture, or let it go on."""
        self._frozen = not self._frozen
        self._paint()
        self.refresh_frame()

    action_retry = _paint

    def action_detach(self) -> None:
        """Leave at once; the run goes on."""
        if self.app.screen is not self:
            return  # left already: a second key was on its way
        if len(self.app.screen_stack) > 2:
            self.close()
        else:
            self.app.exit()

    def close(self) -> None:
        """Go to where this screen was opened from, which hears whether the run goes on."""
        self.dismiss(self._alive)

    def action_pause(self) -> None:
        self._ask("resume" if self._reader.picture.state.status == "paused" else "pause")

    def action_snapshot(self) -> None:
        self._ask("snapshot")

    def action_stop(self) -> None:
        self._confirm("Stop training on all machines, with a snapshot?", "Stop", self._stop)

    def _stop(self) -> None:
        if self._ask("stop"):
            plan = self.picture.plan
            proof = Proof(self.picture.path, plan.run_id if plan else "")
            self.app.push_screen(StopDialog(proof, lambda: self._reader.picture))

    def action_drop(self) -> None:
        """Drop the machine under the cursor."""
        if self._tab != "machines":
            self.action_tab("machines")
            self._say("select a machine with the arrows, then press - again", "information")
            return
        rank = self.query_one(MachinesPane).selected
        if rank is not None:
            name = self.picture.name(rank)
            question = f"Drop {visible(name)}? The others continue."
            self._confirm(question, "Drop it", lambda: self._ask("drop", name))

    def action_add(self) -> None:
        """Ask for a machine to add."""
        away = [(m.name, f"{m.status} {m.message}".strip()) for m in self.picture.state.members.values()
                if m.name and not m.active]  # fmt: skip
        example = "user@host of another machine, or localhost for this computer"
        about = (
            literal(
                f"A machine of this run that is away, {example}."
                if away
                else f"No machine of this run is away. Name {example}."
            ),
        )
        needed = "Type it as after ssh, for example ada@studio.local."
        refusal = refusal_by(self._machine_to_add)
        dialog = TextDialog("Add a machine", about, accept="Add", choices=away, needed=needed, problem_of=refusal)
        self.app.push_screen(dialog, self._add)

    def _machine_to_add(self, text: str) -> tuple[str, Machine | None]:
        """Return the name of one of the run's machines, or another machine."""
        name = text.strip()
        is_member = any(member.name == name for member in self.picture.state.members.values())
        return (name, None) if is_member else ("", machine_to_add(name))

    def _add(self, text: str | None) -> None:
        if text is not None:
            self._ask("add", *self._machine_to_add(text))

    def action_report(self) -> None:
        """Write the report and open it."""
        self._reporting.start()
        self._paint()

    def _next_commands(self) -> list[str]:
        """Return the commands to type after the run; empty while it goes on."""
        ended = self.picture.ended
        return [] if ended is None else commands_after(ended, self.picture.metadata)

    def action_next(self) -> None:
        """Offer the actions with the model, and further commands."""
        ended, showcase = self.picture.ended, self.picture.showcase
        if ended is not None and (commands := self._next_commands()):
            self.app.push_screen(next_dialog(ended, commands, showcase, self.action_report))

    def action_samples(self) -> None:
        """Show the held-out samples."""
        if self.picture.showcase:
            self.app.push_screen(SamplesDialog(self.picture.showcase))

    def _confirm(self, question: str, yes: str, act: Callable[[], object]) -> None:
        if not self._alive:
            self._say("this is a replay" if self._replay else "this run has ended")
            return

        def answered(sure: bool | None) -> None:
            if sure:
                act()

        self.app.push_screen(QuestionDialog(question, yes, "No"), answered)

    def _ask(self, action: Action, machine: str = "", entry: Machine | None = None) -> bool:
        wrong = "this is a replay" if self._replay else ""
        if action in without_effect(self._reader.picture):
            wrong = "the run is ending: this would do nothing"
        wrong = wrong or self.commands.ask(action, time.time(), machine, entry)
        if wrong:
            self._say(wrong)
        else:
            self._say(f"{action}: requested", "information", 2)
        return not wrong


def _tabs(current: str) -> Content:
    tabs = []
    for key, name, _ in TABS:
        is_current = name.lower() == current
        press = Style.from_meta({"@click": f"screen.tab('{name.lower()}')"})
        styles = ("bold $text-primary", "bold underline") if is_current else ("$text-primary", "$text-muted")
        tabs.append(Content.assemble((key, styles[0]), " ", (name, styles[1])).stylize(press))
    return Content("   ").join(tabs)
