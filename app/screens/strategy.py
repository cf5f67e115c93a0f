"""Strategy: the recommended way to train with its reasons in numbers, and what every other way would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, NEXT, StepScreen, failure, progress
from app.shell.keys import WIDE, Key
from app.shell.text import MARGIN, StatusMark, TableColumn, TableRow, bar, literal, muted, whole_width, widths
from app.wizard import actions
from app.wizard.records import RankedCandidate
from app.wizard.state import Step, WizardState
from profiles.errors import counted
from profiles.quantities import bytes_text, duration_text, time_text


class StrategyScreen(StepScreen):
    """How should they train together?"""

    STEP = Step.STRATEGY
    DETAIL_BELOW = True
    SIDE = 32
    DEFAULT_CSS = f"StrategyScreen.-below.-wide #side {{ width: {SIDE}; }}"
    COLUMNS = (
        TableColumn("name", "way", most=34, least=18, folds=True),
        TableColumn("speed", "speed-up", right=True, most=14, least=8),
        TableColumn("time", "same loss in", right=True, most=9, least=7),
        TableColumn("interval", "sync every", right=True, most=9, least=5),
        TableColumn("network", "waits", right=True, most=6, least=5),
        TableColumn("loss", "loss cost", right=True, most=8, least=5),
        TableColumn("step", "step", right=True, most=9, least=6, rank=1),
        TableColumn("bytes", "traffic/h", right=True, most=9, least=8, rank=2),
    )
    HELP = (
        "Every way to train on these machines, with its predicted cost from the measured links and speeds. "
        "'speed-up' compares with the fastest machine alone and includes the loss of quality; 'same loss in' is the "
        "time until that machine's final loss is reached; 'waits' is the share of a step spent waiting for the "
        "network; 'loss cost' is how much higher the loss may end than with an exchange in every step. One machine "
        "alone is listed too, and is recommended where it is faster. "
        "'sync every' is the number of steps between two exchanges: [ and ] change it, and the figures follow."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("left_square_bracket,left", "interval(-2)", "Sync", "Half as many steps between exchanges.", written="[ ]"),
        Key("right_square_bracket,right", "interval(2)", "Sync less", "Twice as many: less traffic.", shown=False),
        Key("p", "preference", "Prefer", "What matters most: fastest, closest to exact, least traffic."),
        Key("r", "retry", "Measure", "Run the task briefly on every machine and predict again with the new figures."),
    )

    def columns(self, state: WizardState) -> Sequence[TableColumn]:
        return _WITH_BARS if self._has_bars(state) else self.COLUMNS

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        return _rows(state, self._has_bars(state))

    def _has_bars(self, state: WizardState) -> bool:
        """Whether speed-ups are drawn too: beside whole names, not in the place of what a way costs."""
        rows = _rows(state, True)
        names = widths(_WITH_BARS, rows, self.room_beside)["name"] + MARGIN
        return self.app.size.width >= WIDE and names >= whole_width(_WITH_BARS[:1], rows)

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        """What a way is, and why the recommended one is recommended."""
        lines = [line for way in state.ways if str(way.index) == key for line in _about(way)]
        why = [muted(f"· {text}") for text in state.strategy.found.reasons[1:]]
        return [*lines, *([Content(""), literal("Why the recommended way"), *why] if why and lines else [])]

    def head(self, state: WizardState) -> Content:
        found = state.strategy
        return failure(found) if found.cause else literal(next(iter(found.found.reasons), ""), "$text-success")

    def empty(self, state: WizardState) -> Content:
        return progress(state.strategy, "Nothing predicted yet.")

    def summary(self, state: WizardState) -> str:
        return f"prefer {state.answers.preference}"

    def hint(self, state: WizardState) -> Content:
        chosen = state.chosen
        if chosen is not None and not chosen.recommended:
            return muted("This is not the recommended way.")
        return muted("The arrow keys select a way; figures are predictions from measured links and speeds.")

    def draw(self) -> None:
        super().draw()
        chosen = self.state.chosen
        if chosen is not None and self.ready and not self._by_hand:
            self.table.select(str(chosen.index))

    _by_hand = False

    def on_row_table_moved(self, event: object) -> None:
        way = next((way for way in self.state.ways if str(way.index) == self.table.cursor), None)
        chosen = self.state.chosen
        if way is not None and chosen is not None and way.index != chosen.index and not way.problem:
            self._by_hand = True
            self.do(actions.choose_strategy(way.index))
        self.draw()

    def action_interval(self, factor: int) -> None:
        chosen = self.state.chosen
        if chosen is not None:
            steps = chosen.interval * 2 if factor > 0 else max(1, chosen.interval // 2)
            self.do(actions.set_interval(steps))

    def action_preference(self) -> None:
        known, now = actions.PREFERENCES, self.state.answers.preference
        place = known.index(now) if now in known else -1
        self._by_hand = False
        self.do(actions.set_preference(known[(place + 1) % len(known)]))

    def headless(self) -> str:
        return command_line("plan", self.state.answers.profile)


_WITH_BARS = [replace(one, least=one.most) if one.key == "speed" else one for one in StrategyScreen.COLUMNS]


def _rows(state: WizardState, bars: bool) -> list[TableRow]:
    best = max((way.candidate.useful_speed_up for way in state.ways), default=0.0) if bars else 0.0
    return [_row(way, way is state.chosen, best) for way in state.ways]


def _row(way: RankedCandidate, chosen: bool, best: float) -> TableRow:
    """Return a row; its speed-up is drawn against the ``best`` one, unless that is 0."""
    look, choice, key = StatusMark.CHOSEN if chosen else StatusMark.NOT_CHOSEN, way.choice, str(way.index)
    advice = " recommended" if way.recommended else ""
    who = f" {choice.over}" if choice.alone else f" x{len(choice.members)}"
    who += " nccl" if choice.engine == "nccl" and not way.recommended else ""
    symbol = Content.styled(look.symbol + " ", look.style)
    name = Content.assemble(
        symbol, literal(choice.name, "bold" if chosen else ""), muted(who), (advice, "$text-success")
    )
    if way.problem:
        return TableRow(key, (name, literal("does not fit", "$text-error"), *[Content("")] * 6), selectable=False)
    return TableRow(key, (name, *_figures(way, best)))


def _figures(way: RankedCandidate, best: float) -> tuple[Content, ...]:
    found = way.candidate
    if not found.predicted:
        return (muted("not predicted"), *[Content("-")] * 6)
    if not found.step:
        return (muted("not measured"), *[Content("-")] * 6)
    drawn = " " + bar(found.useful_speed_up / best, 8) if best else ""
    fast = "$text-success" if found.useful_speed_up > 1.05 else "$text-warning" if found.useful_speed_up < 0.95 else ""
    return (
        Content.assemble((f"{found.useful_speed_up:.2f}x", fast), muted(drawn)),
        literal(duration_text(way.same_loss_seconds or None)),
        literal("-" if way.choice.alone else str(way.interval)),
        literal(f"{found.waiting:.0%}"),
        literal(f"+{found.loss_increase:.1%}" if found.loss_increase else "-"),
        literal(_seconds(found.step)),
        literal(bytes_text(found.bytes_per_hour) if found.bytes_per_hour else "-"),
    )


def _about(way: RankedCandidate) -> list[Content]:
    found, choice = way.candidate, way.choice
    who = ", ".join(choice.members)
    over = f"{choice.over} (not encrypted)" if choice.engine == "nccl" else choice.over
    lines = [literal(f"over {over}: {who}" if not choice.alone else who)]
    if len({member.share for member in found.members}) > 1:
        owned = ", ".join(f"{member.name} {member.share:.0%}" for member in found.members)
        lines.append(muted(f"shares of the averaging: {owned}"))
    if found.step:
        faster = f"{found.speed_up:.2f}x the samples/s, {found.useful_speed_up:.2f}x the progress"
        lines.append(muted(f"{faster}: the same loss in {duration_text(way.same_loss_seconds)}"))
        steps = f"{counted(found.steps, 'step')} of {counted(found.global_batch, 'sample')}"
        run = f"whole run: {steps}, {duration_text(way.seconds)}"
        lines.append(muted(f"{run}; loss +{found.loss_increase:.2%} at most expected"))
    elif not found.predicted:
        lines.append(muted("not predicted: the cost of this strategy is not known"))
    else:
        lines.append(muted("its speed was not measured: r runs the task on it briefly"))
    if way.periodic:
        lines.append(muted(f"one exchange every {way.interval} steps ([ and ] change it)"))
    return [*lines, *([literal(way.problem, "$text-error")] if way.problem else [])]


def _seconds(seconds: float) -> str:
    return time_text(seconds) if seconds else "-"  # not measured
