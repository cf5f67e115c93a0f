"""Checks and Links: whether each machine can train, with fixes, and the network speed between every two machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.network_map import map_link
from app.screens.step_screen import (
    GO_ON,
    MARKS,
    NEXT,
    StepScreen,
    cause_lines,
    failure,
    progress,
    shown_state,
    shown_status,
)
from app.shell.dialogs import QuestionDialog
from app.shell.keys import Key
from app.shell.link_map import drawn, legend
from app.shell.text import MARGIN, StatusMark, TableColumn, TableRow, bar, join, literal, moving_bar, muted
from app.wizard.state import actions
from app.wizard.state.assessment import copying_text, of_finding, of_pair, path_of, warnings_of
from app.wizard.state.records import GOOD, UNSETTLED, Check, ItemStatus
from app.wizard.state.state import Step, TaskKind, WizardState
from profiles.errors import counted
from profiles.quantities import duration_text, latency_figure, rate_figure, share_text

if TYPE_CHECKING:  # load SSH, which the first screen does without
    from distributed.checks.findings import Finding
    from distributed.measuring.link_figures import PairFigures

_CELL = 15
_NAME = 16
_BETWEEN = "|"
_BAR, _INSTALLING = 16, 6
"""Cells of the progress bar of an installation, and the number of bars shown."""
_ROWS, _FRAME = 4, 11
"""Minimum lines of the table of links; lines around map and table, including the map's legend."""


class ChecksScreen(StepScreen):
    """Are they ready to train?"""

    STEP = Step.CHECKS
    COLUMNS = (
        TableColumn("what", "machine, check", max_width=28, min_width=14),
        TableColumn("state", "state", max_width=18, min_width=8),
        TableColumn("seen", "found", max_width=48, min_width=14),
        TableColumn("needed", "needed", max_width=34, min_width=10, rank=1),
    )
    HELP = (
        "All machines are checked at the same time: Python, torch with a small calculation on every device, disk, "
        "memory, system, power and sleep, clock, data, ports, versions. A warning costs time or may end a run; a "
        "problem keeps a machine from training. 'f' installs what is missing on the selected machine, 'F' on all: "
        "each takes about 1.6 GB (5.6 GB with an NVIDIA card) in Muster's folder there; 'machines clean' removes it "
        "again. Where a machine has no internet, 'i' sends it the packages from this computer."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("f", "fix", "Install", "Install the packages that are missing on the selected machine."),
        Key("s", "skip", "Skip", "Continue without the selected machine, or include it again."),
        Key("i", "send", "Send", "Send the missing packages from this computer, for machines without internet."),
        Key("F", "fix_all", "All", "Install the packages that are missing, on all machines."),
        Key("o", "show_all", "Passed", "Also show the checks that passed, or only the others."),
    )

    _shows_passed = _placed = False
    _repaired = ""
    """Key of the machine at whose findings the cursor was when they began to be looked for again."""

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        return [row for check in state.checks for row in self._machine(check, check.key in state.answers.skipped)]

    def _machine(self, check: Check, skipped: bool) -> list[TableRow]:
        app = self.steered
        state, seen, folded = shown_state(app, check), Content(""), self._folded(check)
        if skipped:
            state = shown_status(app, ItemStatus.SKIPPED)
        elif check.fixable and (error := self._install_error(self.state, check)):
            state, seen = StatusMark.PROBLEM.show("install failed"), literal(error, "$text-error")
        elif folded is not None:
            seen = literal(folded.seen)
            state = StatusMark.PROBLEM.show("not installed") if check.status is ItemStatus.FAILED else state
        head = TableRow(check.key, (literal(check.name, "bold"), state, seen, Content("")))
        shown_findings = [finding for finding in check.findings if self._shows_passed or finding.level != "ok"]
        with_rows = not skipped and folded is None
        return [head, *(_finding(check, finding) for finding in shown_findings if with_rows)]

    def _folded(self, check: Check) -> Finding | None:
        """Return the finding that the machine's own row shows: its packages are missing, and nothing else is wrong."""
        faults = [finding for finding in check.findings if finding.level != "ok"]
        is_folded = len(faults) == 1 and faults[0].safe and faults[0].check == "ready" and not self._shows_passed
        return faults[0] if is_folded else None

    def _key_of(self, check: Check, finding: Finding) -> str:
        return check.key if finding is self._folded(check) else f"{check.key}{_BETWEEN}{finding.check}"

    def draw(self) -> None:
        """Draw, and move the cursor to the first problem once all checks are done; after a repair, of its machine."""
        cursor = self.table.cursor if self.ready else ""
        super().draw()
        if not self.ready:
            return
        if cursor and self.table.cursor != cursor:  # the row of a finding is gone while all is checked again
            self._repaired = cursor.partition(_BETWEEN)[0]
            self.table.select(self._repaired)
        state = self.state
        working = not state.checks or any(check.status in UNSETTLED for check in state.checks)
        if working or self._placed:
            self._placed = self._placed and not working
            return
        self._placed = True
        included = [check for check in state.checks if check.key not in state.answers.skipped]
        findings = [(check, finding) for check in included for finding in check.findings]
        faults = [pair for level in ("problem", "warning") for pair in findings if pair[1].level == level]
        of_repaired = [pair for pair in faults if pair[0].key == self._repaired == self.table.cursor]
        if of_repaired or (faults and self.table.cursor in ("", state.checks[0].key)):  # unless the person was quicker
            check, finding = (of_repaired or faults)[0]
            self.table.select(self._key_of(check, finding))
        self._repaired = ""

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        machine, _, _ = key.partition(_BETWEEN)
        check = next((check for check in state.checks if check.key == machine), None)
        finding = self._finding(state, key)
        if finding is not None:
            error = self._install_error(state, check) if check is not None else ""
            failed = [literal(f"installing was tried and failed: {error}", "$text-error")] if error else []
            is_cut = finding.needed and _BETWEEN in key and not self.shows_whole("needed", finding.needed)
            needed = [muted(f"needed: {finding.needed}")] if is_cut else []
            assessed = of_finding(finding)
            found = replace(assessed, cause="") if self.shows_whole("seen", finding.seen) else assessed
            if finding.safe:
                found = replace(found, fix=found.fix.replace(" missing,", " missing on this machine,"))
            return [*needed, *(failed if finding.safe else ()), *cause_lines(found)]
        return cause_lines(check) if check is not None else ()

    def _install_error(self, state: WizardState, check: Check) -> str:
        """Return why the last installation on a machine failed; empty while one is under way."""
        line = "" if check.key in state.under_repair else state.repairs.value.get(check.name, "")
        return getattr(line, "words", line)

    def head(self, state: WizardState) -> Content:
        """Return the progress of each installation."""
        rows = [check for check in state.checks if check.key in state.under_repair][:_INSTALLING]
        return Content("\n").join(
            [self._installation(check, state.repairs.value.get(check.name, "")) for check in rows]
        )

    def _installation(self, check: Check, line: str) -> Content:
        share, words = getattr(line, "share", 0.0), getattr(line, "words", line) or "looking at what is there"
        repairs = [record for record in self.steered.wizard.asked_for() if record.task.kind is TaskKind.REPAIR]
        clock = duration_text(self.steered.clock() - repairs[-1].at) if repairs else ""
        progress_bar = f"{bar(share, _BAR)} {share_text(share):>5}" if share else moving_bar(self.steered.clock(), _BAR)
        name, width = literal(check.name, "bold"), self.app.size.width - MARGIN * 2
        for drawn_share in (progress_bar, share_text(share) if share else ""):
            content = join(name, literal(drawn_share, "$text-primary"), clock, muted(words))
            if content.cell_length <= width:
                return content
        return content

    def _finding(self, state: WizardState, key: str) -> Finding | None:
        check = next((check for check in state.checks if check.key == key.partition(_BETWEEN)[0]), None)
        findings = check.findings if check is not None else ()
        return next((finding for finding in findings if check and self._key_of(check, finding) == key), None)

    def summary(self, state: WizardState) -> str:
        ready = sum(check.status in GOOD for check in state.checks)
        return f"{ready} of {len(state.checks)} ready"

    def hint(self, state: WizardState) -> Content:
        if any(check.fixable for check in state.checks):
            return muted("f installs on this machine, F on all; i sends the packages to all from here.")
        return muted("Checking changes nothing on any machine.")

    @property
    def _machine_at_cursor(self) -> str:
        return self.table.cursor.partition(_BETWEEN)[0]

    def action_fix(self) -> None:
        """Install on the selected machine, and offer to do so on the others that lack packages, too."""
        lacking = [check for check in self.state.checks if check.fixable and check.status is not ItemStatus.SKIPPED]
        others = [one for one in lacking if one.key not in (self._machine_at_cursor, *self.state.under_repair)]
        is_lacking = any(one.key == self._machine_at_cursor for one in lacking)
        self.do(actions.fix(self._machine_at_cursor))
        if not is_lacking or not others:
            return

        def answered(agreed: bool | None) -> None:
            if agreed:
                self.do(actions.fix_all())

        names = " and ".join(one.name for one in others) if len(others) < 3 else f"{len(others)} other machines"
        self.app.push_screen(QuestionDialog(f"Install on {names}, too?", "Install on all", "Only here"), answered)

    def action_fix_all(self) -> None:
        self.do(actions.fix_all())

    def action_send(self) -> None:
        self.do(actions.send_packages())

    def action_skip(self) -> None:
        self.toggle_skip(self._machine_at_cursor)

    def action_retry(self) -> None:
        self.do(actions.retry(self._machine_at_cursor))

    def action_show_all(self) -> None:
        self._shows_passed = not self._shows_passed
        self.draw()

    def copied(self) -> str:
        finding = self._finding(self.state, self.table.cursor)
        return finding.fix if finding is not None and finding.fix and not finding.safe else super().copied()

    def headless(self) -> str:
        return command_line("distributed-check", self.state.answers.profile)


def _finding(check: Check, finding: Finding) -> TableRow:
    assessment = of_finding(finding)
    state = MARKS[assessment.status].show(assessment.label)
    cells = (literal("  " + finding.check), state, literal(finding.seen), muted(finding.needed))
    return TableRow(f"{check.key}{_BETWEEN}{finding.check}", cells)


class LinksScreen(StepScreen):
    """How fast is the network?"""

    STEP = Step.LINKS
    COLUMNS = (
        TableColumn("pair", "from, to", max_width=52, min_width=18, folds=True),
        TableColumn("there", "Mbit/s", right=True, max_width=8, min_width=6),
        TableColumn("back", "back", right=True, max_width=8, min_width=5),
        TableColumn("rtt", "ms", right=True, max_width=7, min_width=4),
        TableColumn("state", "state", max_width=16, min_width=9),
        TableColumn("path", "path", max_width=44, min_width=10, rank=1),
    )
    HELP = (
        "Every two machines send data to each other, one pair after the other, so that no measurement disturbs "
        "another. The figures decide which way to train is fastest here. On the map, a thicker line is faster, Wi-Fi "
        "is dashed, and what has to be relayed is dotted. Where a cable would make training at least 5 % faster, that "
        "is predicted as soon as the speeds of the machines are known: come back from Strategy."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("r", "retry", "Measure again", "Measure all links again."),
    )

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        return [_pair_row(pair) for pair in state.links.value if not pair.from_starter]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        pair = next((pair for pair in state.links.value if _pair_key(pair) == key), None)
        if pair is None:
            return ()
        path, assessment = path_of(pair), of_pair(pair)
        warnings = [literal(text, "$text-warning") for text in warnings_of(pair)]
        causes = cause_lines(replace(assessment, cause="") if warnings else assessment)
        return [*([] if self.shows_whole("path", path) else [muted(path)]), *warnings, *causes]

    def head(self, state: WizardState) -> Content:
        links = state.links
        if links.cause:
            return failure(links)
        width = self.app.size.width - 4
        names = [row.name for row in state.members]
        between = [pair for pair in links.value if not pair.from_starter]
        cables = [literal(line, "$text-accent") for line in state.strategy.value.cables]
        if (link_map := self._map(names, between, len(cables))) and between:
            return Content("\n").join([link_map, legend([map_link(pair) for pair in between]), *cables])
        fits = len(names) >= 2 and _NAME + _CELL * len(names) <= width
        table = [matrix(names, between, _NAME, _CELL)] if fits and between else []
        return Content("\n").join([*table, *cables])

    def _map(self, names: Sequence[str], pairs: Sequence[PairFigures], below: int) -> Content:
        """Return the map, if it fits together with the table under it."""
        width, height = self.app.size
        rows = min(len(pairs) + 1, max(_ROWS, height // 4))
        return drawn(
            names, [map_link(pair) for pair in pairs], width - 4, height - _FRAME - below - rows,
            chosen=self.table.cursor.split(_BETWEEN), ascii_only=self.steered.ascii_only,
        )  # fmt: skip

    def empty(self, state: WizardState) -> Content:
        alone = "One machine trains: there is no link between machines."
        return progress(state.links, "Measuring." if state.busy else alone)

    def summary(self, state: WizardState) -> str:
        links = [pair for pair in state.links.value if not pair.from_starter]
        return counted(len(links), "link") if links else ""

    def hint(self, state: WizardState) -> Content:
        return muted(copying_text(state.links.value) or "Measured with a few MB each; later plans reuse the figures.")

    def headless(self) -> str:
        return command_line("machines", "measure", self.state.answers.profile)


def _pair_key(pair: PairFigures) -> str:
    return f"{pair.source}|{pair.target}"


def _pair_row(pair: PairFigures) -> TableRow:
    figures, assessment = pair.figures, of_pair(pair)
    return TableRow(
        _pair_key(pair),
        (
            literal(" > ".join(pair.labels)),
            literal(rate_figure(figures.mbit) if figures else ""),
            literal(rate_figure(figures.mbit_back) if figures and figures.mbit_back else ""),
            literal(latency_figure(figures.rtt_ms) if figures else ""),
            MARKS[assessment.status].show(assessment.label),
            muted(path_of(pair)),
        ),
    )


def matrix(names: Sequence[str], pairs: Sequence[PairFigures], name_width: int, cell: int) -> Content:
    """Return Mbit/s and ms from every machine (line) to every other (column)."""
    pair_by_ends = {(pair.source, pair.target): pair for pair in pairs}
    pair_by_ends |= {(pair.target, pair.source): pair for pair in pairs if pair.figures and pair.figures.mbit_back}
    headings = [_fit(muted(name), cell) for name in names]
    lines = [muted("Mbit/s, ms").pad_right(name_width - 10) + Content("").join(headings)]
    for source in names:
        cells = [_fit(_figure(pair_by_ends.get((source, target)), source, target), cell) for target in names]
        lines.append(
            literal(source).truncate(name_width - 1, ellipsis=True).pad_right(max(1, name_width - len(source)))
            + Content("").join(cells)
        )
    return Content("\n").join(lines)


def _fit(text: Content, cells: int) -> Content:
    text = text.truncate(cells - 1, ellipsis=True)
    return text.pad_left(cells - text.cell_length)


def _figure(pair: PairFigures | None, source: str, target: str) -> Content:
    if source == target or pair is None:
        return muted("" if source == target else "?")
    assessment, figures = of_pair(pair), pair.figures
    style = "" if assessment.status is ItemStatus.OK else MARKS[assessment.status].style
    mbit = 0.0 if figures is None else figures.mbit if source == pair.source else figures.mbit_back
    return Content.assemble(
        (rate_figure(mbit), style), (f" {latency_figure(figures.rtt_ms if figures else 0.0)}", "$text-muted")
    )
