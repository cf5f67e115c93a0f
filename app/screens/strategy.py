"""Strategy: the recommended candidate plan with its reasons in numbers, and the cost of every other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, NEXT, SKIP, StepScreen, failure, progress
from app.shell.keys import Key
from app.shell.text import StatusMark, TableColumn, TableRow, bar, literal, muted
from app.wizard.state import actions
from app.wizard.state.records import CandidateRow, ItemStatus
from app.wizard.state.state import Step, WizardState
from app.wizard.state.ways import about, advised, offered, rhythm_text
from distributed.planning.run_time import divided_members, steps_text, together_text
from profiles.errors import counted
from profiles.quantities import bytes_text, duration_text, share_text, time_text


class StrategyScreen(StepScreen):
    """How should they train together?"""

    STEP = Step.STRATEGY
    DETAIL_BELOW = True
    SIDE = 32
    DEFAULT_CSS = f"StrategyScreen.-below.-wide #side {{ width: {SIDE}; }}"
    COLUMNS = (
        TableColumn("name", "way", max_width=34, min_width=18, folds=True),
        TableColumn("time", "this run", right=True, max_width=18, min_width=9),
        TableColumn("loss", "final loss", right=True, max_width=14, min_width=10),
    )
    HELP = (
        "'Fast' is the way that ends soonest for what it learns: the machines train each for themselves and merge the "
        "weights now and then ([ and ] change how often, and the figures follow). 'Exact' exchanges in every step, as "
        "one large machine would. 'One machine' is the fastest alone, recommended where the others would not help. "
        "'this run' is the predicted time of this run, from the measured links and speeds; 'why' says what makes the "
        "recommended way the best one. x shows every way by its name, with all figures and all reasons: 'same loss in' "
        "is the time until the final loss of the fastest machine alone is reached, by which ways are ranked; 'waits' "
        "is the share of the machines' time spent waiting for exchanges; 'loss' is how much higher it may end than "
        "with an exchange in every step; 'merge' is the number of steps between two exchanges."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("left_square_bracket,left", "interval(-2)", "Merge", "Half as many steps between merges.", written="[ ]"),
        Key("right_square_bracket,right", "interval(2)", "Merge less", "Twice as many: less traffic.", shown=False),
        Key("x", "details", "Details", "Every way to train by its name, with all figures; x again: the plain choice."),
        Key("p", "preference", "Prefer", "What matters most: fastest, closest to exact, least traffic."),
        Key("r", "retry", "Measure", "Run the task briefly on every machine and predict again with the new figures."),
        SKIP,
    )

    def offered_keys(self) -> tuple[Key, ...]:
        measures = self.state.strategy.status is ItemStatus.WORKING
        others = tuple(key for key in self.KEYS if key is not SKIP)
        return (SKIP, *others) if measures else others

    _detailed = False

    def columns(self, state: WizardState) -> Sequence[TableColumn]:
        return _DETAILS if self._detailed else self.COLUMNS

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        recommended = advised(state.ways, state.answers.preference)
        if self._detailed:
            return [
                _row(ranked, ranked.choice.name, ranked is state.chosen, ranked is recommended, _figures(ranked))
                for ranked in state.ways
            ]
        choices = offered(state.ways, state.chosen)
        longest = max((way.seconds for _, way in choices), default=0.0)
        return [
            _row(way, label, way is state.chosen, way is recommended, _plain(way, longest)) for label, way in choices
        ]

    def action_details(self) -> None:
        self._detailed = not self._detailed
        self.draw()

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        """Return the description of a candidate, and the reasons for the recommendation."""
        lines = [line for ranked in state.ways if str(ranked.index) == key for line in _about(ranked, self._detailed)]
        strategy = state.strategy.value
        followed = state.chosen is None or state.chosen.interval == state.chosen.best_interval
        label = "why: " if followed else "before you changed it: "
        reasons = [Content.assemble((label, "$text-muted"), literal(text)) for text in strategy.reasons[:1]]
        others = (*strategy.reasons[1:], *(strategy.details if self._detailed else ()))
        reasons += [muted(f"· {text}") for text in others]
        return [*lines, *([Content(""), *reasons] if reasons and lines else [])]

    def head(self, state: WizardState) -> Content:
        """Return the predicted time of the chosen candidate with its current interval."""
        strategy, chosen = state.strategy, state.chosen
        if strategy.cause or chosen is None:
            return failure(strategy)
        good = advised(state.ways, state.answers.preference) is chosen
        time = literal(next(about(chosen)), "$text-success" if good else "")
        doubts = [StatusMark.WARNING.show(f"{text}: press r to measure again") for text in strategy.value.in_use]
        return Content("\n").join([time, *doubts, *self.map_lines(state)])

    def empty(self, state: WizardState) -> Content:
        return progress(state.strategy, "Nothing predicted yet.")

    def summary(self, state: WizardState) -> str:
        return f"prefer {state.answers.preference}"

    def hint(self, state: WizardState) -> Content:
        chosen, recommended = state.chosen, advised(state.ways, state.answers.preference)
        if chosen is not None and recommended is None:
            return muted(f"Merging every {counted(chosen.best_interval, 'step')} is recommended.")
        if recommended is not None and recommended is not chosen:
            return muted("This is not the recommended way.")
        if len(state.ways) == 1:
            return Content("")
        return muted("Arrow keys select a way; times are predicted from measured links and speeds.")

    def draw(self) -> None:
        super().draw()
        chosen = self.state.chosen
        if chosen is not None and self.ready and not self._by_hand:
            self.table.select(str(chosen.index))

    _by_hand = False

    def on_row_table_moved(self, event: object) -> None:
        ranked = next((candidate for candidate in self.state.ways if str(candidate.index) == self.table.cursor), None)
        chosen = self.state.chosen
        if ranked is not None and chosen is not None and ranked.index != chosen.index and not ranked.problem:
            self._by_hand = True
            self.do(actions.choose_strategy(ranked.index))
        self.draw()

    def action_interval(self, factor: int) -> None:
        chosen = self.state.chosen
        if chosen is not None:
            interval = self.state.answers.interval or chosen.interval  # the answer may not be predicted yet
            steps = interval * 2 if factor > 0 else max(1, interval // 2)
            passed = min(interval, steps) < chosen.best_interval < max(interval, steps)  # halves are rounded
            self.do(actions.set_interval(chosen.best_interval if passed else steps))

    def action_preference(self) -> None:
        preferences, current = actions.PREFERENCES, self.state.answers.preference
        index = preferences.index(current) if current in preferences else -1
        self._by_hand = False
        self.do(actions.set_preference(preferences[(index + 1) % len(preferences)]))

    def headless(self) -> str:
        return command_line("machines", "plan", self.state.answers.profile)


_DETAILS = (
    TableColumn("name", "way", max_width=34, min_width=18, folds=True),
    TableColumn("time", "this run", right=True, max_width=9, min_width=7),
    TableColumn("same", "same loss in", right=True, max_width=9, min_width=7),
    TableColumn("interval", "merge every", right=True, max_width=9, min_width=5),
    TableColumn("network", "waits", right=True, max_width=6, min_width=5),
    TableColumn("loss", "loss", right=True, max_width=8, min_width=5),
    TableColumn("step", "step", right=True, max_width=9, min_width=6, rank=1),
    TableColumn("bytes", "traffic/h", right=True, max_width=9, min_width=8, rank=2),
)
_BAR = 8


def _row(
    ranked: CandidateRow, label: str, is_chosen: bool, is_recommended: bool, figures: Sequence[Content]
) -> TableRow:
    look, choice, key = StatusMark.CHOSEN if is_chosen else StatusMark.NOT_CHOSEN, ranked.choice, str(ranked.index)
    members = f" {choice.members[0]}" if choice.alone else f" {counted(len(choice.members), 'machine')}"
    groups = divided_members(choice.blocks)
    members += f" as {counted(groups, 'member')}" if groups > 1 else ""
    members += " nccl" if choice.engine == "nccl" and not ranked.recommended else ""
    symbol = Content.styled(look.symbol + " ", look.style)
    advice = " recommended" if is_recommended else ""
    name = Content.assemble(
        symbol, literal(label, "bold" if is_chosen else ""), muted(members), (advice, "$text-success")
    )
    if ranked.problem:
        empty_cells = [Content("")] * (len(figures) - 1)
        return TableRow(key, (name, literal("does not fit", "$text-error"), *empty_cells), selectable=False)
    return TableRow(key, (name, *figures))


def _plain(ranked: CandidateRow, longest: float) -> tuple[Content, ...]:
    """Return the time, drawn relative to the longest one, and the effect on the loss."""
    if not ranked.seconds:
        return (muted(_unknown(ranked)), Content("-"))
    loss = ranked.candidate.loss_increase
    time_bar = bar(ranked.seconds / longest, _BAR) if longest else ""
    time = Content.assemble(
        literal(f"{duration_text(ranked.seconds):>8} "), muted(time_bar)
    )  # cut where it is too long
    return (time, literal(f"up to +{share_text(loss)}" if loss >= 0.0005 else "the same"))


def _figures(ranked: CandidateRow) -> tuple[Content, ...]:
    candidate = ranked.candidate
    if not candidate.predicted or not candidate.step:
        return (muted(_unknown(ranked)), *[Content("-")] * (len(_DETAILS) - 2))
    return (
        literal(duration_text(ranked.seconds)),
        literal(duration_text(ranked.same_loss_seconds or None)),
        literal("-" if ranked.choice.alone else str(ranked.interval)),
        literal(share_text(candidate.waiting)),
        literal(f"+{share_text(candidate.loss_increase)}" if candidate.loss_increase else "-"),
        literal(time_text(candidate.step)),
        literal(bytes_text(candidate.bytes_per_hour) if candidate.bytes_per_hour else "-"),
    )


def _unknown(ranked: CandidateRow) -> str:
    return "not measured" if ranked.candidate.predicted else "not predicted"


def _about(ranked: CandidateRow, detailed: bool) -> list[Content]:
    candidate, choice = ranked.candidate, ranked.choice
    members = f"{together_text(choice.members, choice.blocks)}{', not encrypted' if choice.engine == 'nccl' else ''}"
    described = ", ".join(filter(None, (members, rhythm_text(ranked))))
    lines = [] if choice.alone and not detailed else [literal(described)]  # the row names the machine
    lines += [muted(text) for text in list(about(ranked))[1:]]  # the first one stands above the table
    if detailed and candidate.step:
        lines.append(muted(_in_numbers(ranked)))
        if len({member.shard for member in candidate.members}) > 1:
            merged = ", ".join(f"{member.name} {share_text(member.shard)}" for member in candidate.members)
            lines.append(muted(f"weights are merged by: {merged}"))
    if not candidate.step and candidate.predicted:
        lines.append(muted("r runs the task on it briefly."))
    if ranked.periodic:
        lines.append(muted("[ and ] change how often they merge."))
    return [*lines, *([literal(ranked.problem, "$text-error")] if ranked.problem else [])]


def _in_numbers(ranked: CandidateRow) -> str:
    candidate = ranked.candidate
    steps = steps_text(candidate)
    if ranked.choice.alone:
        return steps
    return f"{steps}; {candidate.speed_up:.2f}x the samples/s, {candidate.useful_speed_up:.2f}x the progress"
