"""The fourth tab: the cost of the exchanges, compared with the plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations

from textual.app import ComposeResult
from textual.content import Content

from app.console import short_names
from app.dashboard.reader import Picture
from app.dashboard.tabs.pane import Pane, Words
from app.plan_table import choice_text
from app.run_view.figures import waiting_text
from app.run_view.pair_paths import pair_lines, pairs
from app.run_view.tables.exchanges import ExchangeRow, exchanges
from app.shell.keys import WIDE
from app.shell.link_map import LinkMedium, MapLink, drawn, legend
from app.shell.row_table import RowTable
from app.shell.terminal_app import app_of
from app.shell.text import TableColumn, TableRow, literal, muted
from distributed.planning.cables import CABLES
from distributed.planning.reasons import OWNERSHIP_CODES, sentence
from profiles.errors import counted
from profiles.quantities import bytes_text, duration_text, rate_figure, rate_text, share_text, time_text
from training.strategies.registry import strategy_class
from training.strategies.user_strategy import sync_schedule_of

COLUMNS = (
    TableColumn("round", "round", right=True, min_width=5),
    TableColumn("step", "step", right=True, min_width=4),
    TableColumn("members", "machines", right=True, min_width=4, rank=5),
    TableColumn("sent", "sent", right=True, min_width=7),
    TableColumn("received", "received", right=True, min_width=7, rank=4),
    TableColumn("paused", "paused", right=True, min_width=6, rank=3),
    TableColumn("time", "time", right=True, min_width=6),
    TableColumn("last", "last", min_width=12, rank=1),
    TableColumn("late", "late by", right=True, min_width=6, rank=2),
    TableColumn("transfer", "transfer", right=True, min_width=8),
    TableColumn("rate", "Mbit/s", right=True, min_width=6),
    TableColumn("planned", "of plan", right=True, min_width=6),
)
_WORTH = 1.05
"""Predicted gain from which on another candidate plan is recommended."""
_SHOWN = 64
_LEAST = 16
"""Lines of this tab without the map."""
_NAME, _WIDE_NAME = 12, 24
"""Most cells of a machine's name, in a narrow and in a wide terminal."""
_JUDGED_BYTES = 64_000
_JUDGED_SECONDS = 0.02
"""Bytes and planned seconds of an exchange below which its time is that of round trips and of waking processes: a share
of the plan would say nothing of the network."""
_NONE_YET = "Synchronisations appear here as they happen."


class NetworkPane(Pane):
    """Totals, advice, and the newest synchronisations."""

    ABOUT = (
        "Every synchronisation: bytes of the machine that sends most; for how long training was paused; and the time "
        "from its start to its result: until the last machine came, for which the others waited, and what was left "
        "then, the transfer. Where there is a plan, 'of plan' is the transfer against the planned "
        "one ('small' where an exchange has too few bytes to judge, '-' where a machine was away, 'a loss' "
        "where all waited for one that was lost). Far above 100 % the network is slower than measured, or the "
        "machines are busy with other work. A faster way is named with its predicted gain. Which way each pair goes "
        "is said too: directly, dialled by one of the two for both directions, or through the relay."
    )
    DEFAULT_CSS = """
    NetworkPane #sums, NetworkPane #map { height: auto; padding-bottom: 1; }
    NetworkPane RowTable { height: 1fr; }
    """

    def compose(self) -> ComposeResult:
        yield Words(id="sums")
        yield Words(id="map")
        yield RowTable(COLUMNS, id="syncs")

    def draw(self, picture: Picture) -> None:
        lines = [] if picture.expected == 1 else [*sums(picture), *advice(picture)]  # the table says why there are none
        self.query_one("#sums", Words).show(Content("\n").join(lines))
        shown, words = self.query_one("#map", Words), link_map(picture, *self.size, app_of(self).ascii_only)
        shown.display = bool(words)
        shown.show(words)
        table = self.query_one(RowTable)
        none = "One machine alone exchanges nothing." if picture.expected == 1 else none_yet(picture)
        table.say_when_empty(literal(none, "$text-muted"))
        cells = _WIDE_NAME if self.app.size.width >= WIDE else _NAME
        table.show([sync_row(row, picture, cells) for row in exchanges(picture.state)[: -_SHOWN - 1 : -1]])


def link_map(picture: Picture, width: int, height: int, ascii_only: bool = False) -> Content:
    """Return the map of machines and links, measured and used ones; empty where it does not fit."""
    members = picture.state.members
    names = {rank: picture.name(rank) for rank in members}
    measured = {}
    if picture.figures is not None:
        measured = {frozenset((link.source, link.target)): link for link in picture.figures.cluster.links}
    used = {frozenset((rank, peer)): (forward, backward) for rank, peer, forward, backward in pairs(members)}
    lines = []
    for rank, peer in combinations(sorted(members), 2):
        link, routes = measured.get(frozenset((names[rank], names[peer]))), used.get(frozenset((rank, peer)), ())
        if link is not None or routes:
            relayed = any(route is not None and route.how == "relayed" for route in routes)
            unusable = link is not None and not link.usable
            direct = LinkMedium.AIR if link and link.air else LinkMedium.CABLE
            kind = LinkMedium.RELAY if relayed or unusable else direct
            lines.append(MapLink(names[rank], names[peer], kind, *((link.mbit, link.mbit_back) if link else ())))
    max_lines = min(height // 2, height - _LEAST)
    drawing = drawn(list(names.values()), lines, width, max_lines - 2, ascii_only=ascii_only) if lines else Content("")
    return Content("\n").join([drawing, legend(lines)]) if drawing else drawing


def sync_row(row: ExchangeRow, picture: Picture, name_cells: int = _NAME) -> TableRow:
    """Return the row of one synchronisation; the last machine's name has at most ``name_cells`` cells."""
    ranks = sorted({*picture.state.members, row.last} - {-1})
    names = dict(zip(ranks, short_names([picture.name(rank) for rank in ranks], name_cells)))
    planned, of_plan = picture.planned, muted("-")
    if planned is not None and planned.exchange:
        of_plan = _of_plan(row, planned.exchange, len(planned.choice.members))
    cells = (
        literal(row.number),
        literal(row.step),
        literal(row.members),
        literal(bytes_text(row.sent)),
        literal(bytes_text(row.received)),
        literal(time_text(row.paused)),
        literal(time_text(row.seconds)),
        literal(names.get(row.last, "-")),
        literal(time_text(row.late)),
        literal(time_text(row.transfer)),
        literal(rate_figure(row.mbit)),
        of_plan,
    )
    return TableRow(f"{row.step}/{row.number}", cells)


def none_yet(picture: Picture) -> str:
    """Return why no synchronisation is listed yet: members that hold equal weights list those that compare them."""
    if picture.plan is None or picture.state.ended is not None:
        return _NONE_YET
    settings, state = picture.plan.profile.strategy, picture.state
    if sync_schedule_of(settings).interval > 1 or strategy_class(settings.strategy).equal != "always":
        return _NONE_YET
    interval, total = settings.verify_interval, state.total_steps
    following = (state.step // interval + 1) * interval if interval else None
    listed = f"one in {interval} is listed here" if interval else "the last one is listed here"
    when = "when the run ends"
    if following is not None and (total is None or following < total):
        when = f"at step {following}"
    return f"The machines synchronise in every step; {listed}, the first {when}."


def synchronisations(picture: Picture) -> int:
    """Return how many synchronisations the run has had: reported ones, or its steps where each has one."""
    plan, state = picture.plan, picture.state
    count = max((member.exchanges for member in state.members.values()), default=0)
    in_every_step = plan is not None and sync_schedule_of(plan.profile.strategy).interval == 1
    return max(count, state.step) if in_every_step and picture.expected > 1 else count


def _of_plan(row: ExchangeRow, planned: float, expected: int) -> Content:
    """Return the transfer of an exchange over the planned seconds of one of all ``expected`` machines, where that can
    be judged."""
    if row.interrupted:
        return muted("a loss")
    if planned < _JUDGED_SECONDS or row.sent < _JUDGED_BYTES:
        return muted("small")
    if row.members < expected:
        return muted("-")
    ratio = row.transfer / planned
    return literal(share_text(ratio) if ratio < 10 else f"{ratio:.0f}x", "$text-warning" if ratio > 1.15 else "")


def sums(picture: Picture) -> Iterator[Content]:
    """Yield the totals of the run: bytes, synchronisations, waiting, routes, and the plan's figures."""
    members = list(picture.state.members.values())
    totals = [member.total for member in members]  # with those from before a member was lost
    sent, received = sum(total.bytes_sent for total in totals), sum(total.bytes_received for total in totals)
    count = synchronisations(picture)
    rows = exchanges(picture.state)
    listed = f" ({min(len(rows), _SHOWN)} listed)" if count > min(len(rows), _SHOWN) > 0 else ""
    words = [
        f"{bytes_text(sent)} sent, {bytes_text(received)} received by all, {counted(count, 'synchronisation')}{listed}"
    ]
    yield literal("; ".join(filter(None, (*words, waiting_text(picture.state)))))
    if lines := pair_lines(picture.state.members, picture.name):
        yield literal("paths: " + "; ".join(lines), "$text-muted")
    for reason in picture.planning.reasons if picture.planning is not None else ():
        if reason.code in (*OWNERSHIP_CODES, *CABLES):
            yield literal(sentence(reason), "$text-muted")
    for text in (*(_medians(rows, picture) if rows else ()), *_pace(picture)):
        yield literal(text, "$text-muted")


def _medians(rows: Sequence[ExchangeRow], picture: Picture) -> Iterator[str]:
    """Yield the usual times of a synchronisation, beside that of the plan."""
    planned, usual = picture.planned, [row for row in rows if not row.interrupted] or rows
    time, transfer = (
        statistics.median(values) for values in zip(*((r.seconds, r.transfer) for r in usual), strict=True)
    )
    rate = rate_text(statistics.median(row.mbit for row in usual))
    plan = f" ({time_text(planned.exchange)} planned)" if planned is not None else ""
    yield f"median synchronisation: {time_text(time)}, of it transfer {time_text(transfer)}{plan}, {rate}"


def _pace(picture: Picture) -> Iterator[str]:
    """Yield the usual time of a step, with what it waits for exchanges, beside that of the plan."""
    planned = picture.planned
    paces = [member.seconds_per_step or 0.0 for member in picture.state.members.values() if member.active]
    if planned is not None and (longest := max(paces, default=0.0)):
        yield f"step of the slowest machine: {time_text(longest)} ({time_text(planned.step)} planned)"


def advice(picture: Picture) -> list[Content]:
    """Return the advice: the best candidate plan that is predicted to be faster, and its gain."""
    planning, chosen = picture.planning, picture.planned
    if planning is None or chosen is None:
        return [literal("this run has no plan with predictions, so there is no advice", "$text-muted")]
    better = [c for c in planning.ranking if c.fits and c.useful_speed_up > chosen.useful_speed_up * _WORTH]
    if not better:
        return [literal("no other way to train is predicted to be faster", "$text-muted")]
    best = max(better, key=lambda candidate: candidate.useful_speed_up)
    runs = duration_text(best.seconds), duration_text(chosen.seconds)
    words = f"advice: {choice_text(best.choice)}: the run would take {runs[0]} instead of {runs[1]}"
    loss = f"; the final loss may be {share_text(best.loss_increase)} higher" if best.loss_increase else ""
    return [literal(words + loss, "$text-warning")]
