"""Strategy: the recommended way to train with its reasons in numbers, and what every other way would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, NEXT, StepScreen, failure, progress
from app.shell.keys import Key
from app.shell.text import StatusMark, TableColumn, TableRow, bar, literal, muted
from app.wizard import actions
from app.wizard.records import RankedCandidate
from app.wizard.state import Step, WizardState
from app.wizard.ways import about, advised, offered, rhythm_text
from distributed.planning.run_time import together_text
from profiles.errors import counted
from profiles.quantities import bytes_text, duration_text, share_text, time_text


class StrategyScreen(StepScreen):
    """How should they train together?"""

    STEP = Step.STRATEGY
    DETAIL_BELOW = True
    SIDE = 32
    DEFAULT_CSS = f"StrategyScreen.-below.-wide #side {{ width: {SIDE}; }}"
    COLUMNS = (
        TableColumn("name", "way", most=34, least=18, folds=True),
        TableColumn("time", "this run", right=True, most=18, least=9),
        TableColumn("loss", "final loss", right=True, most=14, least=10),
    )
    HELP = (
        "'Fast' is the way that ends soonest for what it learns: the machines train each for themselves and merge the "
        "weights now and then ([ and ] change how often, and the figures follow). 'Exact' exchanges in every step, as "
        "one large machine would. 'One machine' is the fastest alone, recommended where the others would not help. "
        "'this run' is the predicted time of this run, from the measured links and speeds. x shows every way by its "
        "name with all figures: 'same loss in' is the time until the final loss of the fastest machine alone is "
        "reached, by which ways are ranked; 'waits' is the share of a step spent waiting for the network; 'loss' is "
        "how much higher it may end than with an exchange in every step; 'merge' is the number of steps between two "
        "exchanges."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("left_square_bracket,left", "interval(-2)", "Merge", "Half as many steps between merges.", written="[ ]"),
        Key("right_square_bracket,right", "interval(2)", "Merge less", "Twice as many: less traffic.", shown=False),
        Key("x", "details", "Details", "Every way to train by its name, with all figures; x again: the plain choice."),
        Key("p", "preference", "Prefer", "What matters most: fastest, closest to exact, least traffic."),
        Key("r", "retry", "Measure", "Run the task briefly on every machine and predict again with the new figures."),
    )

    _detailed = False

    def columns(self, state: WizardState) -> Sequence[TableColumn]:
        return _DETAILS if self._detailed else self.COLUMNS

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        better = advised(state.ways, state.answers.preference)
        if self._detailed:
            return [_row(way, way.choice.name, way is state.chosen, way is better, _figures(way)) for way in state.ways]
        choices = offered(state.ways, state.chosen)
        longest = max((way.seconds for _, way in choices), default=0.0)
        return [_row(way, label, way is state.chosen, way is better, _plain(way, longest)) for label, way in choices]

    def action_details(self) -> None:
        self._detailed = not self._detailed
        self.draw()

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        """What a way is, and why the recommended one is recommended."""
        lines = [line for way in state.ways if str(way.index) == key for line in _about(way, self._detailed)]
        found = state.strategy.found
        why = [muted(f"· {text}") for text in (*found.reasons, *(found.details if self._detailed else ()))]
        return [*lines, *([Content(""), literal("Why the recommended way"), *why] if why and lines else [])]

    def head(self, state: WizardState) -> Content:
        """How long the chosen way takes, as it is: with another interval it is another time."""
        found, chosen = state.strategy, state.chosen
        if found.cause or chosen is None:
            return failure(found)
        good = advised(state.ways, state.answers.preference) is chosen
        return literal(next(about(chosen)), "$text-success" if good else "")

    def empty(self, state: WizardState) -> Content:
        return progress(state.strategy, "Nothing predicted yet.")

    def summary(self, state: WizardState) -> str:
        return f"prefer {state.answers.preference}"

    def hint(self, state: WizardState) -> Content:
        chosen, better = state.chosen, advised(state.ways, state.answers.preference)
        if chosen is not None and better is None:
            return muted(f"Merging every {counted(chosen.best_interval, 'step')} is recommended.")
        if better is not None and better is not chosen:
            return muted("This is not the recommended way.")
        return muted("Arrow keys select a way; times are predicted from measured links and speeds.")

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


_DETAILS = (
    TableColumn("name", "way", most=34, least=18, folds=True),
    TableColumn("time", "this run", right=True, most=9, least=7),
    TableColumn("same", "same loss in", right=True, most=9, least=7),
    TableColumn("interval", "merge every", right=True, most=9, least=5),
    TableColumn("network", "waits", right=True, most=6, least=5),
    TableColumn("loss", "loss", right=True, most=8, least=5),
    TableColumn("step", "step", right=True, most=9, least=6, rank=1),
    TableColumn("bytes", "traffic/h", right=True, most=9, least=8, rank=2),
)
_BAR = 8


def _row(way: RankedCandidate, label: str, chosen: bool, good: bool, figures: Sequence[Content]) -> TableRow:
    look, choice, key = StatusMark.CHOSEN if chosen else StatusMark.NOT_CHOSEN, way.choice, str(way.index)
    who = f" {choice.members[0]}" if choice.alone else f" {counted(len(choice.members), 'machine')}"
    who += " nccl" if choice.engine == "nccl" and not way.recommended else ""
    symbol = Content.styled(look.symbol + " ", look.style)
    advice = " recommended" if good else ""
    name = Content.assemble(symbol, literal(label, "bold" if chosen else ""), muted(who), (advice, "$text-success"))
    if way.problem:
        rest = [Content("")] * (len(figures) - 1)
        return TableRow(key, (name, literal("does not fit", "$text-error"), *rest), selectable=False)
    return TableRow(key, (name, *figures))


def _plain(way: RankedCandidate, longest: float) -> tuple[Content, ...]:
    """Return the time, drawn against the longest one, and what becomes of the loss."""
    if not way.seconds:
        return (muted(_unknown(way)), Content("-"))
    loss = way.candidate.loss_increase
    drawn = bar(way.seconds / longest, _BAR) if longest else ""
    time = Content.assemble(literal(f"{duration_text(way.seconds):>8} "), muted(drawn))  # cut where it is too long
    return (time, literal(f"up to +{100 * loss:.1f} %" if loss >= 0.0005 else "no higher"))


def _figures(way: RankedCandidate) -> tuple[Content, ...]:
    found = way.candidate
    if not found.predicted or not found.step:
        return (muted(_unknown(way)), *[Content("-")] * (len(_DETAILS) - 2))
    return (
        literal(duration_text(way.seconds)),
        literal(duration_text(way.same_loss_seconds or None)),
        literal("-" if way.choice.alone else str(way.interval)),
        literal(share_text(found.waiting)),
        literal(f"+{found.loss_increase:.1%}" if found.loss_increase else "-"),
        literal(time_text(found.step)),
        literal(bytes_text(found.bytes_per_hour) if found.bytes_per_hour else "-"),
    )


def _unknown(way: RankedCandidate) -> str:
    return "not measured" if way.candidate.predicted else "not predicted"


def _about(way: RankedCandidate, detailed: bool) -> list[Content]:
    found, choice = way.candidate, way.choice
    who = f"{together_text(choice.members)}{', not encrypted' if choice.engine == 'nccl' else ''}"
    lines = [literal(", ".join(filter(None, (who, rhythm_text(way)))))]
    lines += [muted(text) for text in list(about(way))[1:]]  # the first one stands above the table
    if detailed and found.step:
        lines.append(muted(_in_numbers(way)))
        if len({member.share for member in found.members}) > 1:
            merged = ", ".join(f"{member.name} {share_text(member.share)}" for member in found.members)
            lines.append(muted(f"weights are merged by: {merged}"))
    if not found.step and found.predicted:
        lines.append(muted("r runs the task on it briefly."))
    if way.periodic:
        lines.append(muted("[ and ] change how often they merge."))
    return [*lines, *([literal(way.problem, "$text-error")] if way.problem else [])]


def _in_numbers(way: RankedCandidate) -> str:
    found = way.candidate
    steps = f"{counted(found.steps, 'step')} of {counted(found.global_batch, 'sample')}"
    if way.choice.alone:
        return steps
    return f"{steps}; {found.speed_up:.2f}x the samples/s, {found.useful_speed_up:.2f}x the progress"
