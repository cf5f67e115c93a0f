"""The sections of a report that are text and tables. All text from outside is escaped by :func:`text`."""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone

from app.console import command_line, visible
from app.html_report.evidence import Evidence
from app.report import rerun_line
from app.run_view.figures import MORE_DATA, data_text, stages_times_text
from app.run_view.metrics import simulated_text
from app.run_view.pair_paths import is_loopback
from app.run_view.run_state import UNFINISHED
from app.run_view.tables.evaluations import metric_rows
from app.run_view.tables.machine_changes import machine_changes
from app.run_view.timeline import TimelineEntry, entry_text
from app.task_results import results_of
from distributed.planning.documents.document import Candidate, Planning, Reason
from distributed.planning.reasons import sentence
from profiles.errors import counted
from profiles.quantities import (
    bytes_text,
    duration_text,
    energy_text,
    memory_text,
    share_text,
    temperature_text,
    time_text,
)
from training.records.attempts import starting_seconds_in
from training.records.model_folders import has_chat_template, is_language_model
from training.records.plan import status_word

_MOODS = {"completed": "good", "running": "good", "cancelled": "calm"}
"""Style of a run's status; others are ``bad``."""
SHOWN_CANDIDATES = 8
_TOLD_CHANGES = 6
_NOT_CONSIDERED = ("no-cost-model", "no-interval")
_HOW = {"dialled": "directly", "came": "directly, opened by the other", "relayed": "through the relay"}


def text(content: object) -> str:
    """Return text from outside as HTML, with control characters written out."""
    return html.escape(visible(content))


def label(content: object) -> str:
    """Return text from outside for a chart: plotly reads a subset of HTML, so markup is escaped."""
    return html.escape(visible(content), quote=False)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    """Return a table; ``numbers`` are the columns that are aligned to the right."""

    def cells(kind: str, row: Sequence[object]) -> str:
        marked = (' class="number"' if column in numbers else "" for column in range(len(row)))
        return "".join(f"<{kind}{mark}>{text(cell)}</{kind}>" for mark, cell in zip(marked, row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>" if header else ""
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Return names and values as a list."""
    return "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows) + "</dl>"


def command(*words: str) -> str:
    """Return a command to copy."""
    return f"<pre>{text(command_line(*words))}</pre>"


def heading(evidence: Evidence) -> str:
    """Return name, status and the figures that matter most."""
    metadata, summary, state = evidence.metadata, evidence.summary, evidence.state
    word, mood = status_word(summary.status), _MOODS.get(summary.status, "bad")
    cards = [("steps", state.steps_text), ("trained", duration_text(evidence.seconds))]
    if (starting := starting_seconds_in(state.attempts)) is not None:
        cards.insert(1, ("to start", duration_text(starting)))
    if state.simulated_hours is not None:
        cards.append(("on the simulated machines", simulated_text(state.simulated_hours)))
    telling = {row.split: row for row in reversed(metric_rows(state))}  # the first metric of each split
    cards += [(f"{row.label} on {split}", row.change.replace("->", "→")) for split, row in sorted(telling.items())]
    if evidence.whole_rate:
        cards.append(("over the whole run", evidence.whole_rate))
    cards.append(("workers", str(evidence.expected)))
    shown = "".join(f"<div><b>{text(value)}</b><span>{text(name)}</span></div>" for name, value in cards)
    kind = ' class="error"' if mood == "bad" else ""
    error = f"<p{kind}>{text(metadata.error_message)}</p>" if metadata.error_message else ""
    attempts = f", attempt {metadata.attempt}" if metadata.attempt > 1 else ""
    return (
        f'<header><h1>{text(metadata.profile)}</h1><p><span class="status {mood}">{text(word)}</span> '
        f"run {text(metadata.run_id)}{attempts}, started {text(metadata.start_time)}</p>{error}{_story(evidence)}"
        f'<div class="cards">{shown}</div></header>'
    )


def _story(evidence: Evidence) -> str:
    """Return in one line whether the run met its plan and why not, and which machines came and went."""
    sentences = [str(evidence.plan_vs_actual)] if evidence.plan_vs_actual else []
    for step, entry in machine_changes(evidence.state)[:_TOLD_CHANGES]:
        sentences.append(f"{evidence.name(entry.member)} {entry.word} at step {step:.0f}")
    return f'<p class="story">{text("; ".join(sentences))}</p>' if sentences else ""


def machines(evidence: Evidence) -> str:
    """Return the table of the members and their work."""
    header = ("rank", "machine", "device", "state", "planned batch", "steps", "samples", "compute", "wait", "transfer")
    rows = []
    hosts = {host.get("rank"): host for host in evidence.metadata.hosts}
    members, energy = evidence.state.members, evidence.state.joules is not None
    heat = any(member.hottest is not None for member in members.values())
    for rank in sorted({*members, *(rank for rank in hosts if isinstance(rank, int))}):
        member, host = members.get(rank), hosts.get(rank, {})
        done = member.total if member and member.total.steps else None
        device = (member.device if member else "") or host.get("device", "")
        status = member.status if member else "-"
        status_text = f"{status}: {member.message}" if member and status in ("lost", "failed", "left") else status
        row = [rank, evidence.name(rank), device, status_text]
        row += [host.get("batch_size", "-"), done.steps if done else "-", done.samples if done else "-"]
        wall, times = (done.seconds or 1.0, (done.compute, done.wait, done.transfer)) if done else (1.0, ())
        row += [f"{duration_text(seconds)} ({share_text(seconds / wall)})" for seconds in times] or ["-"] * 3
        memory = member.memory_peak if member else 0
        row += [memory_text(memory) if memory else "-"]
        row += ["-" if member is None or member.hottest is None else temperature_text(member.hottest)] * heat
        rows.append([*row, *[energy_text(member.joules if member else None)] * energy])
    columns = (*header, "peak memory", *["hottest"] * heat, *["energy"] * energy)
    return table(columns, rows, numbers=(0, *range(4, len(columns)))) + _data_note(evidence) + _energy_note(evidence)


def _data_note(evidence: Evidence) -> str:
    data = data_text(evidence.state, whole_run=True)
    stages = stages_times_text(evidence.state)
    notes = [*([f"{data}: {MORE_DATA}."] if data else []), *([f"{stages}."] if stages else [])]
    return "".join(f"<p>{text(note)}</p>" for note in notes)


def _energy_note(evidence: Evidence) -> str:
    state = evidence.state
    if state.joules is None:
        return ""
    measured = sorted({meter for member in state.members.values() for meter in member.meters})
    unknown = sum(member.joules is None for member in state.members.values())
    silent = f" Machines without a meter that could be read: {unknown}." if unknown else ""
    words = f"Total energy: {energy_text(state.joules)}, as meters in the machines counted it ({', '.join(measured)});"
    return f"<p>{text(words)} screens, memory and power supplies are not included.{silent}</p>"


def network(evidence: Evidence) -> str:
    """Return the table of the members' exchanges, and their routes."""
    exchanged = {rank: work for rank, work in evidence.work.items() if work.bytes_sent or work.bytes_received}
    if not exchanged:
        return "<p>Nothing was exchanged: one worker trained alone.</p>"
    rows = []
    for rank, work in exchanged.items():
        mean = time_text(work.sync_seconds / work.syncs) if work.syncs else "-"
        moved = (bytes_text(work.bytes_sent), bytes_text(work.bytes_received))
        rows.append((evidence.name(rank), *moved, work.syncs, mean, duration_text(work.wait)))
    header = ("machine", "sent", "received", "synchronisations reported", "mean each", "wait in steps")
    return table(header, rows, numbers=range(1, 6)) + _routes_table(evidence)


def steady(figures: Sequence[tuple[str, str, str]]) -> str:
    """Return the table of figures that were the same at every synchronisation: name, value, description."""
    return table(("at every synchronisation", "", ""), figures) if figures else ""


def _routes_table(evidence: Evidence) -> str:
    """Return the table of the newest routes between members."""
    rows = [
        (evidence.name(rank), evidence.name(route.peer), _HOW[route.how], route.address or "-", route.interface or "-")
        for rank, member in evidence.state.members.items()
        for _, route in sorted(member.routes.items())
        if not is_loopback(route)
    ]
    return table(("from", "to", "path", "address", "over"), rows) if rows else ""


def strategy(evidence: Evidence) -> str:
    """Return the strategy, the reasons, and the ranking of the candidate plans."""
    metadata, planning = evidence.metadata, evidence.planning
    rows: list[tuple[str, object]] = [("strategy", metadata.strategy), ("engine", metadata.engine)]
    rows.append(("why", metadata.strategy_reason or "the profile or a person chose it; no reason was recorded"))
    best = planning.best if planning else None
    if best is None and len(metadata.hosts) == 1:
        return "<p>One machine trained alone.</p>"
    if planning is None or best is None:
        return facts(rows) + "<p>No plan was kept with this run, so there is no ranking of other ways to train.</p>"
    reasons = (*planning.reasons, *best.reasons)
    words = dict.fromkeys(_words(reason) for reason in reasons if reason.code not in (*_NOT_CONSIDERED, "group-wins"))
    words.pop(metadata.strategy_reason, None)
    others = [_words(reason) for reason in reasons if reason.code in _NOT_CONSIDERED]
    header = ("", "strategy", "machines", "this run", "same loss in", "step", "waiting", "traffic/h")
    ranking = [_candidate(planning, candidate, candidate is best) for candidate in planning.ranking[:SHOWN_CANDIDATES]]
    left = len(planning.ranking) - len(ranking)
    omitted_note = f"<p>{left} more are in planning.json.</p>" if left > 0 else ""
    not_considered = (
        f"<details><summary>Strategies that were not considered</summary>{_list(others)}</details>" if others else ""
    )
    return facts(rows) + _list(words) + table(header, ranking, numbers=range(3, 8)) + omitted_note + not_considered


def _list(words: Iterable[str]) -> str:
    lines = "".join(f"<li>{text(word)}</li>" for word in words)
    return f"<ul>{lines}</ul>" if lines else ""


def _words(reason: Reason) -> str:
    try:
        return sentence(reason)
    except (KeyError, ValueError, IndexError):  # a reason of another version
        return f"{reason.code} {reason.subject}"


def _candidate(planning: Planning, candidate: Candidate, chosen: bool) -> tuple[object, ...]:
    choice = candidate.choice
    interval = f", every {choice.interval} steps" if choice.interval > 1 else ""
    description = (
        "one machine alone" if choice.alone else f"{choice.strategy} {choice.codec} over {choice.engine}{interval}"
    )
    members = ", ".join(choice.members)
    if not candidate.fits or not candidate.predicted:
        return ("", description, members, "not predicted" if candidate.fits else "does not fit", "", "", "", "")
    runs = duration_text(candidate.seconds), duration_text(planning.same_loss_seconds(candidate) or None)
    steps = time_text(candidate.step), share_text(candidate.waiting), bytes_text(candidate.bytes_per_hour)
    return ("chosen" if chosen else "", description, members, *runs, *steps)


def prediction(evidence: Evidence) -> str:
    """Return the table of predicted and measured figures."""
    comparison = evidence.comparison
    if comparison is None:
        short = "the run was too short, or differs from the planned one" if evidence.planning else ""
        return f"<p>Nothing to compare: {short or 'no prediction was kept with this run'}.</p>"
    traffic = comparison.predicted_bytes_per_hour, comparison.measured_bytes_per_hour
    rows = [
        _comparison_row("time of a step", comparison.predicted_step, comparison.measured_step, time_text),
        _comparison_row("of which all wait", comparison.predicted_wait, comparison.measured_wait, time_text),
        _comparison_row("waiting, of the time", comparison.predicted_share, evidence.state.waiting_share, share_text),
        _comparison_row("traffic an hour", *traffic, bytes_text),
    ]
    rows += [
        _comparison_row(f"compute on {visible(member.name)}", member.predicted, member.measured, time_text)
        for member in comparison.members
    ]
    if (whole := evidence.plan_vs_actual) is not None:
        promised, took = whole.prediction.time.seconds, whole.seconds
        rows.insert(0, ("the whole run", duration_text(promised), duration_text(took), f"{took / promised:.2f}"))
    note = f"<p>A step: over {counted(comparison.steps, 'step')}, without the first few.</p>"
    return table(("", "predicted", "measured", "measured / predicted"), rows, numbers=(1, 2, 3)) + note


def _comparison_row(
    name: str, predicted: float, measured: float | None, text_of: Callable[[float], str]
) -> tuple[str, str, str, str]:
    if measured is None:
        return name, text_of(predicted), "-", "-"
    tells = predicted > max(1e-9, measured / 100)  # a multiple of next to nothing says nothing
    return name, text_of(predicted), text_of(measured), f"{measured / predicted:.2f}" if tells else "-"


def result(evidence: Evidence) -> str:
    """Return the results, the model's path and how to use it."""
    rows = [(row.split, row.label, *row.texts) for row in metric_rows(evidence.state)]
    reached = table(("data", "metric", "first", "best", "last"), rows, numbers=(2, 3, 4)) if rows else ""
    if evidence.model is None:
        step, none = evidence.state.resume_step, "<p>This run has no finished model.</p>"
        if not evidence.resume_command or evidence.summary.status not in UNFINISHED:
            return reached + none
        following = f"<pre>{text(evidence.resume_command)}</pre>"
        return f"{reached}{none}<p>It can be resumed from the snapshot of step {step}:</p>{following}"
    model_facts = facts([("model", evidence.model.resolve()), ("size", bytes_text(evidence.model_bytes))])
    model = str(evidence.model.resolve())
    verb, *objects = results_of(evidence.metadata.task).usage or [""]
    use = command("model", verb, model, *objects) if verb else ""
    if is_language_model(evidence.model):
        use = (
            command("model", "chat", model)
            if has_chat_template(evidence.model)
            else command("model", "generate", model, "A TEXT")
        )
    return reached + model_facts + use


def notices(evidence: Evidence) -> str:
    """Return errors and warnings; the earliest error first, because later ones often follow from it."""
    state = evidence.state
    tracks = [state.timeline[kind] for kind in ("error", "warning") if kind in state.timeline]
    rows = "".join(_notice(evidence, entry) for track in tracks for entry in track.entries if state.holds(entry))
    if not rows:
        return "<p>None.</p>"
    dropped = sum(track.count - len(track.entries) for track in tracks)
    omitted_note = f"<p>{dropped} more are in events.jsonl.</p>" if dropped else ""
    return f'<ul class="notices">{rows}</ul>{omitted_note}'


def _notice(evidence: Evidence, notice: TimelineEntry) -> str:
    moment = "?"
    with contextlib.suppress(ValueError, OverflowError, OSError):
        moment = f"{datetime.fromtimestamp(notice.time, timezone.utc):%H:%M:%S}"
    prefix, words = f"{moment} UTC {notice.kind}:", entry_text(notice, evidence.name)
    hint = f'<div class="hint">{text(notice.hint)}</div>' if notice.hint else ""
    return f'<li class="{notice.kind}"><span>{text(prefix)}</span> {text(words)}{hint}</li>'


def reproduction(evidence: Evidence) -> str:
    """Return how to reproduce the run: command, data, versions and settings."""
    metadata = evidence.metadata
    line = rerun_line(metadata)
    started = f"<pre>{text(line)}</pre>" if line else "<p>It was started from Python, not by a command.</p>"
    resumed = "<p>This is the command of the last attempt.</p>" if "--resume" in metadata.command else ""
    rows: list[tuple[str, object]] = [("model", metadata.model), ("data", metadata.dataset)]
    if evidence.plan is not None:
        rows += [("plan", evidence.plan.hash()), ("samples of one step", evidence.plan.global_batch)]
    rows += [("run folder", evidence.path.resolve())]
    versions = table(("", "version"), sorted(metadata.versions.items()))
    settings = html.escape(json.dumps(metadata.config, indent=1, default=str))
    return (
        started + resumed + facts(rows) + f"<h3>Versions</h3>{versions}"
        f"<details><summary>All settings</summary><pre>{settings}</pre></details>"
    )
