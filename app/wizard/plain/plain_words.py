"""Plain-text lines for each step of the set-up; every state is a word, nothing depends on colour or position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from app.console import command_line
from app.wizard.state.assessment import copying_text, of_finding, of_pair, path_of, warnings_of
from app.wizard.state.dependencies import MEASURES, is_unsaved
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.observations import origin_of
from app.wizard.state.records import (
    Access,
    Assessment,
    CandidateRow,
    Check,
    ItemStatus,
    JobOption,
    MachineRow,
)
from app.wizard.state.state import WizardState
from app.wizard.state.ways import about, advised, offered, rhythm_text
from distributed.planning.run_time import steps_text, together_text
from profiles.errors import counted
from profiles.quantities import bytes_text, duration_text, memory_text, rate_text, share_text, time_text


def home_lines(state: WizardState) -> Iterator[str]:
    """Yield live runs and the numbered profiles."""
    for run in state.home.value.runs:
        if run.live:
            watch = command_line("runs", "attach", run.run_id)
            yield f"live: {run.profile}, since {run.started_text}; watch it with: {watch}"
    yield "  1  a new set-up"
    for number, profile in enumerate(state.home.value.profiles, 2):
        entry, machines = profile.entry, state.presence_of(profile)
        present = sum(machine.present is True for machine in machines)
        asked = machines and all(machine.present is not None for machine in machines)
        online = f"; online: {present} of {counted(len(machines), 'machine')}" if asked else ""
        words = entry.error or (f"needs a {entry.needs}" if entry.needs else "ready")
        yield f"{number:>3}  {'saved profile' if profile.saved else 'profile'} {profile.name}: " + (
            f"{entry.description or words}{online}"
        )
        if any(machine.far for machine in machines):
            yield f"     this {MEASURES.format(names='its machines')}"


def machine_lines(state: WizardState) -> Iterator[str]:
    """Yield the numbered machines."""
    for number, row in enumerate(state.listed, 1):
        picked = "picked" if row.key in state.answers.picked else "not picked"
        yield f"{number:>3}  {row.name}: {', '.join(filter(None, (picked, row.label, *_about(row))))}"
        yield from _trouble(row)
    if len(state.machines.rows) < 2:
        yield f"searched: {'; '.join(state.machines.searched)}"
        yield from (*state.machines.advice, *state.machines.nothing_found)


def _about(row: MachineRow) -> Iterator[str]:
    yield from (text for text in (row.chip, row.memory, row.system) if text)
    yield origin_of(row)
    online = [path for path in row.paths if path.online] or list(row.paths)
    if online and not row.here:
        details = f" and {counted(len(online) - 1, 'more path')}" if len(online) > 1 else ""
        yield f"{online[0].endpoint.host_port} over {online[0].endpoint.kind.value}{details}"


def access_lines(rows: Iterable[Access]) -> Iterator[str]:
    status_text = {True: ItemStatus.OK, False: ItemStatus.FAILED, None: ItemStatus.WAITING}
    for number, row in enumerate(rows, 1):
        stages = row.report.stages.items() if row.report is not None else ()
        reached = ", ".join(f"{stage.value} {status_text[passed].value}" for stage, passed in stages)
        yield f"{number:>3}  {row.name}: {row.label}{f' ({reached})' if reached else ''}"
        yield from _trouble(row)


def check_lines(rows: Iterable[Check]) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        yield f"{number:>3}  {row.name}: {row.label}"
        for finding in row.findings:
            if finding.level != "ok":
                needed = f"; needed: {finding.needed}" if finding.needed else ""
                assessed = of_finding(finding)
                yield f"     {assessed.label}: {finding.check}: {finding.seen}{needed}"
                yield from _fix(assessed.fix)


def link_lines(state: WizardState) -> Iterator[str]:
    if copying := copying_text(state.links.value):
        yield f"  {copying}"
    for pair in (pair for pair in state.links.value if not pair.from_starter):
        ends, figures = f"  {' to '.join(pair.labels)}", pair.figures
        if figures is None:
            yield f"{ends}: {of_pair(pair).label}"
        else:
            reached, back = rate_text(figures.mbit), rate_text(figures.mbit_back)
            speed = f"{reached} there, {back} back, {time_text(figures.rtt_ms / 1000)}"
            yield f"{ends}: {speed}, over {path_of(pair)}"
        yield from (f"     warning: {text}" for text in warnings_of(pair))
    yield from _trouble(state.links, "  ")


def job_lines(state: WizardState) -> Iterator[str]:
    job, data = state.job.value, state.data.value
    yield f"  profile: {state.answers.profile}"
    yield f"  model: {job.model or 'none'} (known: {', '.join(job.models)}; or a folder, or a name on the hub)"
    length = f", {duration_text(data.hours * 3600)}" if data.hours else ""
    yield f"  dataset: {job.dataset or 'none'}: {state.data.label}{length}"
    yield from (f"     {problem}" for problem in data.problems)
    yield from _fix(state.data.fix) if data.problems else _trouble(state.data)
    yield from (f"     {note}" for note in data.notes)
    yield from (f"     cannot be read: {name}" for name in data.broken)
    for fit in state.fits.value:
        size = f", needs {memory_text(fit.needed)} of {memory_text(fit.free)} free" if fit.needed and fit.free else ""
        yield f"  memory of {fit.name}: {fit.label}{size}"
        yield from _trouble(fit)
    yield from _trouble(state.fits, "  ")
    yield from (_option(option) for option in job.options if not option.advanced or option.changed)


def all_option_lines(state: WizardState) -> Iterator[str]:
    """Yield every option with its help."""
    yield from (f"{_option(option)}: {option.spec.help}" for option in state.job.value.options)


def _option(option: JobOption) -> str:
    unit = f" {option.spec.unit}" if option.spec.unit not in ("", option.name) and option.value else ""
    wrong = f": WRONG, {option.problem}" if option.problem else ""
    return f"  {option.name} = {option.spec.shown(option.value)}{unit}{', changed' if option.changed else ''}{wrong}"


def strategy_lines(state: WizardState, in_full: bool = False) -> Iterator[str]:
    """Yield the numbered candidate plans; ``in_full``: all of them by strategy name, with all figures."""
    ranking, chosen = state.strategy.value, state.chosen
    if chosen is not None:
        yield from (f"  {text}" for text in about(chosen))
    yield from (f"  warning: {text}: m measures again" for text in ranking.in_use)
    yield from (f"  {text}" for text in (*ranking.reasons, *(ranking.details if in_full else ())))
    better = advised(state.ways, state.answers.preference)
    for number, (label, candidate) in enumerate(_choices(state, in_full), 1):
        mark = "chosen, " if candidate is chosen else ""
        mark += "recommended, " if candidate is better else ""
        words = way_words(candidate) if in_full else plain_way_words(candidate)
        yield f"{number:>3}  {label}: {mark}{words}"
    yield from _trouble(state.strategy, "  ")


def _choices(state: WizardState, in_full: bool) -> list[tuple[str, CandidateRow]]:
    if not in_full:
        return offered(state.ways, state.chosen)
    return [(f"{way.choice.name} over {way.choice.over}", way) for way in state.ways]


def numbered_way(state: WizardState, number: int, in_full: bool) -> CandidateRow | None:
    """Return the candidate plan with this number in :func:`strategy_lines`."""
    choices = _choices(state, in_full)
    return choices[number - 1][1] if 1 <= number <= len(choices) else None


def plain_way_words(candidate: CandidateRow) -> str:
    """Return which machines train, for how long, and how often they synchronise."""
    if candidate.problem:
        return candidate.problem
    takes = duration_text(candidate.seconds) if candidate.seconds else "not measured"
    return ", ".join(
        filter(None, (together_text(candidate.choice.members, candidate.choice.blocks), takes, rhythm_text(candidate)))
    )


def way_words(candidate: CandidateRow) -> str:
    predicted = candidate.candidate
    if candidate.problem:
        return candidate.problem
    if not predicted.step:
        return "not measured"
    phrases = [
        duration_text(candidate.seconds),
        f"{steps_text(predicted)}, {time_text(predicted.step)} each",
    ]
    if not candidate.choice.alone:
        phrases += [
            f"same loss after {duration_text(candidate.same_loss_seconds)}",
            f"{share_text(predicted.waiting)} waiting",
            f"{bytes_text(predicted.bytes_per_hour)} an hour",
        ]
    return ", ".join([*phrases, *([rhythm_text(candidate)] if candidate.periodic else [])])


def plan_lines(state: WizardState) -> Iterator[str]:
    plan_part = state.plan
    plan = plan_part.value
    yield f"  way: {plan.way}"
    if plan.left_out:
        yield f"  {plan.left_out}"
    for row in plan.changes:
        size = f", {bytes_text(row.bytes)}" if row.bytes else ""
        yield f"  {_SIGNS.get(row.sign, row.sign)} on {row.machine}: {row.what}{size}"
    if plan.copying:
        yield f"  copies: {plan.copying}"
    yield f"  time: {' '.join(plan.time) or 'not measured; m measures it'}"
    yield from (f"  encrypted: {text}" for text in plan.encrypted)
    yield from (f"  NOT encrypted: {text}" for text in plan.in_clear)
    if plan.about_data:
        yield f"  data: {plan.about_data}"
    yield f"  saved as profile: {plan.profile}"
    saving = " (works once saved: Enter saves and starts, s only saves)" if is_unsaved(state) else ""
    yield f"  command: {plan.command}{saving}"
    yield "  (with --plan-only it starts nothing; with --try it really runs a few steps and saves nothing)"
    yield from (f"  network: {text}" for text in plan.network)
    yield from _trouble(plan_part, "  ")


_SIGNS = {"+": "new", "~": "changed", "-": "removed"}


def launch_lines(launch: LaunchProgress) -> Iterator[str]:
    for row in launch.rows:
        done = sum(cell is ItemStatus.OK for cell in row.cells)
        at = launch.steps[done - 1] if done else "begun"
        yield f"  {row.name}: {at if row.status is not ItemStatus.FAILED else 'FAILED'}"
        yield from _trouble(row)
        if row.status is ItemStatus.FAILED:
            yield from (f"     log: {line}" for line in row.log)


def _trouble(row: Assessment, indent: str = "     ") -> Iterator[str]:
    if row.cause:
        yield f"{indent}{row.cause}"
        yield from _fix(row.fix)


def _fix(fix: str) -> Iterator[str]:
    if fix:
        yield f"     fix: {fix}"
