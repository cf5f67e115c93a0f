"""How a run is doing, in one line that every display shares. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from app.run_view.figures import LAST_EVALUATION, data_text, end_stage, stages_times_text, start_stages
from app.run_view.member_state import MIN_STEPS, TROUBLE, WINDOW_SECONDS, MemberState
from app.run_view.plan_vs_actual import lateness_text
from app.run_view.ribbon import rate_of_run
from app.run_view.run_state import INTERRUPTED, RunState
from app.run_view.tables.machine_changes import arrivals_and_departures
from app.run_view.tables.newcomers import adding_text
from app.run_view.timeline import TimelineEntry, chronological, with_reason
from app.run_view.view import RunView
from distributed.planning.run_time import SLOWER_BELOW, took_text
from profiles.quantities import age_text, clock_text, duration_text, machine_text, share_text, span_text
from training.records.attempts import starting_seconds_in

STALLED_AFTER = 30.0
"""Seconds without a step, or ten steps' time if that is longer, after which a run is called stalled."""
_SOON = 120.0
"""Seconds to the end below which a run is no longer judged."""
_LONG_LOST = 30.0
"""Seconds from which a loss is told with its age instead of its reason."""
_SHORT = 3600.0
"""Seconds of a run, as promised, or so far where nothing was, below which its end is shown as the time left; in longer
ones as the time of day: so it keeps one form."""
_STOPPED_BY_USER = ("stopped by the user", "ended by the user")
"""Reasons of members that have left, where all are to."""
_LOW_BATTERY = 30.0
"""Per cent below which a machine on battery is told to be plugged in."""
Level = Literal["starting", "good", "warning", "bad", "paused", "done", "stopped"]


@dataclass(frozen=True)
class RunHeadline:
    """The line: its level, a word, and details."""

    level: Level
    word: str
    details: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    """Details that are left out where the line is too long, in this order."""

    def within(self, cells: int) -> RunHeadline:
        """Return the line without the spare details that do not fit; three cells separate two details."""
        if not self.spare or len(self.word) + sum(len(detail) + 3 for detail in self.details) <= cells:
            return self
        gone, *spare = self.spare
        remaining = tuple(detail for detail in self.details if detail != gone)
        return replace(self, details=remaining, spare=tuple(spare)).within(cells)


def headline(view: RunView) -> RunHeadline:
    """Return the headline of a run."""
    state, now = view.state, view.now
    if state.ended is not None and state.status != INTERRUPTED:
        return _ended(view)
    if not view.live or state.ended is not None:
        done = _progress(state)
        return RunHeadline(
            "bad", "Interrupted", ("the process that ran it is gone", *done, state.saved_progress), spare=done
        )
    states = state.members.values()
    lost = [member for member in states if member.status in TROUBLE]
    present_count = sum(member.active or member.status == "done" for member in states)
    present = ", ".join(filter(None, (f"{present_count}/{view.expected} machines", adding_text(state))))
    if order := ending_order(state):
        level: Level = "stopped" if order == "Stopping" else "paused"
        return RunHeadline(level, order, (order_stage(view), *_progress(state)))
    if state.status == "paused":
        return RunHeadline("paused", "Paused", (present, *_progress(state)))
    if state.status == "starting" or not (view.launched or any(member.step for member in states)):
        return RunHeadline("starting", "Starting", (present, *start_stages(state, now)))
    stage = end_stage(state, far=view.plan is not None and view.plan.own_folders)
    end = _done_at(view)
    is_told = bool(end) and stage.startswith(LAST_EVALUATION) and not end[0].endswith(" 0:00")
    figures, spare = ((stage, *(end if is_told else ())), ()) if stage else _times(view, end)
    silent = _silence(state, now)
    if lost:
        word = "Degraded" if any(member.active for member in states) else "Lost"
        omitted = (f"and {len(lost) - 2} more",) if len(lost) > 2 else ()
        return RunHeadline("bad", word, (present, *(_why(m, now) for m in lost[:2]), *omitted, *figures), spare=spare)
    if stage:
        return RunHeadline("starting", "Finishing", (present, *figures))
    if silent:
        return RunHeadline("warning", "Stalled", (present, f"no step for {duration_text(silent)}"))
    remarks = remarks_on(state)
    if verdict := _slower_than_alone(view):
        details = (present, *end, *verdict[1:], *remarks, *figures[len(end) :])
        return RunHeadline("warning", verdict[0], details, spare=spare)
    details = (present, *end, *remarks, *figures[len(end) :])
    return RunHeadline("warning" if remarks else "good", "Attention" if remarks else "Healthy", details, spare=spare)


def _times(view: RunView, end: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of when the run ends, beside its promise and one machine alone, and those of them that are left
    out where there is no room: never the end."""
    late = _lateness(view)
    promised, alone, stages = "" if late else _promised(view), _alone(view), stages_times_text(view.state)
    end = (*end, *([late] if late else []))
    figures = (*end, *filter(None, (promised, alone, stages)))
    return figures, tuple(detail for detail in (stages, promised, alone) if detail in figures[1:])


def ending_order(state: RunState) -> Literal["Stopping", "Pausing", ""]:
    """Return the word for a stop or a pause that was accepted and is not done yet; empty: there is none."""
    begun = (state.started or 0.0) - 1.0
    under_way = {
        answer.action for answer in state.requests.values() if answer.outcome == "accepted" and answer.time >= begun
    }
    left = [member.message for member in state.members.values() if member.status == "left"]
    if under_way & {"stop", "kill"} or any(message in _STOPPED_BY_USER for message in left):
        return "Stopping"
    return "Pausing" if "pause" in under_way and state.status == "running" else ""


def order_stage(view: RunView) -> str:
    """Return what is under way until the run has stopped or paused."""
    if view.launched:
        return "its script was asked to end and has 30 s to do so"
    if ending_order(view.state) == "Pausing":
        return "the current step ends first"
    return "the current step ends, then a snapshot is written" if view.state.step else "it has taken no step yet"


def problems(state: RunState) -> list[TimelineEntry]:
    """Return the errors and losses that hold, the root cause first; of a failed run, those it died of.

    Problems of a machine end when it is back. How its worker ended is known after its connection broke, and is the
    cause then, as in the headline.
    """
    entries = _explained(chronological(state.timeline))
    back = {entry.member: entry.time for entry in chronological(state.timeline) if entry.kind == "back"}
    if state.started is not None:
        entries = [entry for entry in entries if entry.time >= state.started - 1.0]
    return [entry for entry in entries if entry.time > back.get(entry.member, -math.inf)]


def _explained(timeline: Sequence[TimelineEntry]) -> list[TimelineEntry]:
    """Return errors and losses, each loss with how its worker ended, where a later warning says so."""
    entries: list[TimelineEntry] = []
    lost: dict[int, int] = {}
    for entry in timeline:
        if entry.kind == "warning" and entry.why and entry.member in lost:
            loss = entries[lost[entry.member]]
            text = with_reason(loss.text.removesuffix(f": {loss.why}"), entry.why)
            entries[lost[entry.member]] = loss._replace(text=text, why=entry.why)
        elif entry.kind in ("error", "lost"):
            lost |= {entry.member: len(entries)} if entry.kind == "lost" else {}
            entries.append(entry)
    return entries


def age(member: MemberState, now: float) -> float | None:
    """Return the seconds since a member's newest event, at least 0 where clocks differ."""
    return None if member.updated is None else max(0.0, now - member.updated)


def lag(state: RunState, member: MemberState) -> int:
    """Return by how many steps a member is behind the most advanced one."""
    return max((peer.step for peer in state.members.values()), default=0) - member.step


@dataclass(frozen=True)
class HoldUp:
    """The member that the others wait for, with seconds a step over the whole run, as in the shares of waiting."""

    member: MemberState
    seconds: float
    """Its time to compute a step."""
    others: float
    """Mean time of the others to compute theirs."""


def slowest(state: RunState) -> HoldUp | None:
    """Return the member that the others wait for: at least a tenth more compute time a step than the median, where that
    makes up at least half of the others' wait, and that at least half of it, and it waits less than they do.

    ``None`` where no member stands out.
    """
    working = {member.rank: member.total for member in state.members.values() if member.has_worked}
    times = {rank: total.compute / total.steps for rank, total in working.items()}
    if len(times) < 2:
        return None
    rank = max(times, key=lambda r: times[r])
    others = working.keys() - {rank}
    mean_time = statistics.fmean(times[other] for other in others)
    wait = statistics.fmean(working[other].wait / working[other].steps for other in others)
    share = statistics.fmean(state.members[other].shares[1] for other in others)
    is_slow = times[rank] > 1.1 * statistics.median(times.values()) and state.members[rank].shares[1] < share
    explains = 0.5 <= (times[rank] - mean_time) / wait <= 2 if wait > 0 else False
    return HoldUp(state.members[rank], times[rank], mean_time) if is_slow and explains else None


def _ended(view: RunView) -> RunHeadline:
    state = view.state
    if state.status == "completed":
        took = took_text(view.seconds, view.time)
        return RunHeadline("done", "Completed", (*_progress(state), took), spare=_progress(state))
    if state.status == "cancelled":
        why = () if state.message in ("", "stopped", state.saved_progress) else (state.message,)
        return RunHeadline("stopped", "Stopped", (*_progress(state), state.saved_progress, *why))
    causes = problems(state)
    message = state.message or (causes[0].text if causes else "")
    return RunHeadline("bad", "Failed", (*_progress(state), *((message,) if message else ())), spare=_progress(state))


def _progress(state: RunState) -> tuple[str, ...]:
    return (f"step {state.steps_text}",) if state.step else ()


def _why(member: MemberState, now: float) -> str:
    """Return ``pc lost (silent for 5 s)``, and later ``pc lost 2 min ago``."""
    name, seconds = f"{machine_text(member.label)} {member.status}", now - (member.since or now)
    if member.status == "lost" and seconds >= _LONG_LOST:
        return f"{name} {age_text(seconds)} ago"
    return f"{name} ({member.message})" if member.message else name


def _slower_than_alone(view: RunView) -> tuple[str, ...]:
    """Return that the run is slower than the best machine alone, and to stop it where that pays; empty: it is not, or
    that cannot be judged: members have changed a short time ago, other programs use a machine, or the end is near."""
    state, time, left = view.state, view.time, view.state.time_left(view.now)
    if time is None or time.alone_rate <= 0 or left is None or left.seconds < _SOON:
        return ()
    if not _is_settled(state, view.now) or _busy_machines(state):
        return ()
    ratio = _rate(state) / time.alone_rate * _slowdown_of_alone(view, time.alone)
    if not 0 < ratio < SLOWER_BELOW:
        return ()
    alone, start = f"{machine_text(time.alone)} alone", starting_seconds_in(state.attempts)
    word = f"Slower than {alone} ({ratio:.2f}x)"
    pays = not view.replayed and start is not None and left.seconds - left.doubt > ratio * left.seconds + start
    return (word, f"stop it and train on {alone}") if pays else (word,)


def _is_settled(state: RunState, now: float) -> bool:
    """Whether enough steps were measured since members came or went last."""
    changes = [entry.time for entry in arrivals_and_departures(state)]
    begun = [time for attempt in state.attempts for time in (attempt.begun, attempt.trains_since) if time is not None]
    working = [member for member in state.members.values() if member.active]
    pace = max((member.seconds_to_advance or math.inf for member in working), default=math.inf)
    return now - max(changes + begun, default=now) >= max(WINDOW_SECONDS, MIN_STEPS * pace)


def _rate(state: RunState) -> float:
    """Return the samples/s of the run: the better of those in the members' windows and in the last steps."""
    series = rate_of_run(state)
    newest = series.buckets[-max(1, MIN_STEPS // series.width) :]
    return max(state.samples_per_second, statistics.fmean(bucket.mean for bucket in newest) if newest else 0.0)


def _forecasts(view: RunView) -> dict[str, float]:
    """Return the predicted seconds of compute in a step, by name."""
    return {member.name: member.seconds for member in view.planned.members} if view.planned else {}


def _slowdown_of_alone(view: RunView, name: str) -> float:
    """Return measured over predicted compute of the machine that the run is compared with, at least 1; 1: unknown."""
    forecasts = _forecasts(view)
    member = next((member for member in view.state.members.values() if member.label == name and member.window), None)
    if member is None or not forecasts.get(name):
        return 1.0
    return max(1.0, statistics.fmean(step.compute for step in member.window) / forecasts[name])


def _done_at(view: RunView) -> tuple[str, ...]:
    """Return the text of when the run ends; empty: unknown."""
    left = view.state.time_left(view.now)
    if left is None or not _is_near(left.seconds + left.doubt):
        return ()
    doubt = round(left.doubt / 60)
    if _is_short(view):
        return (f"done in {duration_text(left.seconds)}" + (f" ±{span_text(60 * doubt)}" if doubt else ""),)
    return (f"done {clock_text(view.now + left.seconds, view.now)} ±{span_text(60 * max(1, doubt))}",)


def _is_short(view: RunView) -> bool:
    """Whether ends are shown as times left: judged by the promise, or the time so far, which do not go up and down."""
    return ((view.time.seconds if view.time else 0.0) or view.seconds) < _SHORT


def _lateness(view: RunView) -> str:
    """Return that the run will be later than promised, and why; empty: it will not, or that cannot be judged yet."""
    left = view.state.time_left(view.now)
    if left is None or view.time is None or not _is_settled(view.state, view.now):
        return ""
    return lateness_text(view.state, view.seconds + left.seconds, left.doubt, view.time.seconds, _forecasts(view))


def _promised(view: RunView) -> str:
    """Return the text of the end that the plan promised."""
    end = _end_after(view.time.seconds, view) if view.time else None
    if end is None:
        return ""
    moment = _moment(end, view)
    return f"promised end was {moment}" if moment.endswith(" ago") else f"promised {moment}"


def _alone(view: RunView) -> str:
    """Return the text of when the best machine alone would be done, had it begun with the run."""
    time = view.time
    end = _end_after(time.alone_seconds, view) if time else None
    if time is None or end is None:
        return ""
    fewer, moment = " (fewer samples)" if time.fixed_steps else "", _moment(end, view)
    done = "would have ended " if moment.endswith(" ago") else ""
    return f"{machine_text(time.alone)} alone {done}{moment}{fewer}"


def _end_after(seconds: float, view: RunView) -> float | None:
    """Return the Unix time at which the run has taken so many seconds; ``None``: unknown, or far away."""
    left = seconds - view.seconds
    return view.now + left if seconds > 0 and _is_near(left) else None


def _is_near(seconds: float) -> bool:
    return math.isfinite(seconds) and abs(seconds) < 30 * 86_400


def _moment(moment: float, view: RunView) -> str:
    """Return ``in 1:20`` or ``14:03``, in the form of the run's own end, to be comparable."""
    if not _is_short(view):
        return clock_text(moment, view.now)
    seconds = moment - view.now
    return f"in {duration_text(seconds)}" if seconds > 0 else f"{duration_text(-seconds)} ago"


def _silence(state: RunState, now: float) -> float:
    """Return the seconds since the newest step of any member where they are too many, else 0."""
    working = [member for member in state.members.values() if member.active and member.window]
    if not working or state.updated is None:
        return 0.0
    newest = max(member.window[-1].time for member in working)
    pace = max(_pace(member) for member in working)
    silence = now - max(newest, state.updated)
    return silence if silence > max(STALLED_AFTER, 10 * pace) else 0.0


def remarks_on(state: RunState) -> tuple[str, ...]:
    """Return what holds a run back that goes on: weights, heat, batteries, owners of machines, other programs, data."""
    remarks = []
    if state.weights_differ:
        remarks.append("weights differ between machines")
    hot = [member for member in state.members.values() if member.throttled and member.active and not member.gives_way]
    remarks += [f"{machine_text(member.label)} is slowed down by heat" for member in hot[:2]]
    remarks += [
        f"{machine_text(name)} runs on battery, {share_text(percent / 100)}: plug it in"
        for name, percent in _low_batteries(state)[:2]
    ]
    yielding = [member for member in state.members.values() if member.gives_way]
    remarks += [f"{machine_text(member.label)} gives way: {member.gives_way}" for member in yielding[:2]]
    if shares := _busy_machines(state):
        busiest = max(shares, key=lambda name: shares[name])
        remarks.append(
            f"other programs use {share_text(shares[busiest] / 100)} of the processors of {machine_text(busiest)}"
        )
    if data := data_text(state):
        remarks.append(data)
    return tuple(remarks)


def _low_batteries(state: RunState) -> list[tuple[str, float]]:
    """Return the names of machines whose battery runs out, with the per cent left."""
    members = [member for member in state.members.values() if member.active and not member.gives_way]
    loads = [(member.label, member.machine) for member in members if member.machine]
    charges = [(name, load.battery_percent) for name, load in loads if load.on_mains is False]
    return [(name, percent) for name, percent in charges if percent is not None and percent < _LOW_BATTERY]


def _busy_machines(state: RunState) -> dict[str, float]:
    """Return the share of the processors, in per cent, that other programs use on machines that they slow down, by
    name; members on one machine all report the same."""
    members = [member for member in state.members.values() if member.active and not member.gives_way]
    loads = [(member.label, member.machine) for member in members if member.machine]
    return {name: load.others_percent or 0.0 for name, load in loads if load.slowed_by_others}


def _pace(member: MemberState) -> float:
    return member.seconds_per_step or 0.0
