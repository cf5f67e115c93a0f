"""``distributed-train --try``: a few real steps of the real run, and what was measured in them.
``--plan-only``: what would run, and nothing is started.

The run goes into a temporary folder that is removed. Features that were computed stay in the cache, where the real run
finds them.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.terminal import answer, fail, heard_by
from app.cli.train.local_run import StartRun, run_to_end
from app.cli.train.request import TrainRequest
from app.cli.train.start import plan_of
from app.console import say, visible
from app.follow import Follower
from app.plan_table import details_text, way_text
from app.progress import progress_for
from app.report import title_of
from app.run_view.run_state import RunState
from app.run_view.view import EndedRun
from distributed.planning.run_time import RunTime, promised_time
from profiles.errors import BadInput, ExitCode, counted
from profiles.quantities import bytes_text, duration_text, memory_text, share_text, throughput_text, time_text
from training.numerics.schedule import RunSteps, ends_in_warm_up, run_steps
from training.records.event_log import read_events
from training.records.events import Event, StepEvent, SyncEvent
from training.records.plan import RunPlan
from training.records.run_files import explain_errors, write_atomically
from training.records.run_folder import RunFolder
from training.run.requests.request_book import leave_request
from training.run.run_controller import RunController
from training.strategies.user_strategy import shortened_for_trial, sync_schedule_of
from training.workers.data_findings import warm_up_remark

if TYPE_CHECKING:
    from distributed.launcher import DistributedLauncher, PlannedRun
    from distributed.planning.documents.document import Planning

STEPS = 6
INNER_STEPS = 3
"""Maximum sync interval in a trial, so that two synchronisations are measured."""
EVALUATED = 8
"""Samples of each evaluation split: enough to test evaluation."""
_NOT_MEASURED = "How long it takes is not known; --try runs a few steps and tells."


@dataclass(frozen=True)
class RehearsalFigures:
    """Figures of a trial, without the first step of every member, which warms up."""

    strategy: str
    engine: str
    workers: int
    steps: int
    seconds_per_step: float
    """Wall time per step of the real run, including the wait for synchronisation, spread over the sync interval."""
    samples_per_second: float
    compute_share: float
    wait_share: float
    transfer_share: float
    bytes_per_sync: float
    """Bytes sent and received by one member per synchronisation (per step, if every step synchronises)."""
    steps_between_syncs: int
    memory_peak: int
    """Bytes, of the largest worker process."""
    device_memory_peak: int | None
    total_steps: int
    """Steps of the whole run."""
    total_samples: int
    """Its samples: the steps that end an epoch may be smaller than those of the trial."""
    evaluating: float = 0.0
    """Estimated seconds of all its evaluations; 0: unknown."""

    @property
    def seconds_total(self) -> float:
        """Estimated time of the whole run."""
        rate = self.samples_per_second
        return (self.total_samples / rate if rate else 0.0) + self.evaluating


def rehearse(request: TrainRequest, start_run: StartRun = RunController) -> ExitCode:
    """Run ``--try``.

    Raises:
        MusterError: nothing was started.
    """
    plan = plan_of(request)
    _write(plan, None, request)
    with _folder_for_a_moment() as temporary:
        short = shortened(plan)
        folder = RunFolder.create(Path(temporary), short, list(request.command))
        ended = run_to_end(short, folder, progress_for(f"trial run · {title_of(plan)}"), start_run=start_run)
        return _tell(plan, ended, request)


def not_for_real(launcher: DistributedLauncher, planned: PlannedRun, request: TrainRequest) -> ExitCode:
    """Run ``--try`` on the machines of a plan, where Ctrl-C ends it, or ``--plan-only``.

    Raises:
        MusterError: nothing was started.
    """
    if request.plan_only:
        launcher.dismiss()
        return show_plan(planned.plan, request, planned.planning)
    _write(planned.plan, planned.planning, request)
    short = dataclasses.replace(planned, plan=shortened(planned.plan), planning=None, figures=None)
    with _folder_for_a_moment() as temporary:
        path = launcher.start(short, request.command, output=Path(temporary))
        follower = Follower(path)
        progress = progress_for(f"trial run · {title_of(planned.plan)}")
        with heard_by(lambda number, frame: _end(path)), progress:
            for event in follower.events():
                if event is not None:
                    progress(event)
        return _tell(planned.plan, follower.ended(progress.state), request, planned.planning)


def _end(path: Path) -> None:
    leave_request(path, "kill")
    say("ending at once")


def _folder_for_a_moment() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="muster-try-", ignore_cleanup_errors=True)


def _tell(plan: RunPlan, ended: EndedRun, request: TrainRequest, planning: Planning | None = None) -> ExitCode:
    """Report what a trial of ``plan`` measured, or why it failed."""
    outcome = ended.outcome
    if outcome.status != "completed":
        return fail(outcome.message or outcome.status, outcome.hint, outcome.exit_code, request.as_json)
    measured = measure(plan, read_events(ended.path / "events.jsonl"), ended.state, planning)
    document = {**dataclasses.asdict(measured), "seconds_total": measured.seconds_total, **_document(plan)}
    remark = "" if warm_up_remark(plan) else ends_in_warm_up(measured.total_steps, plan.profile)  # else told before
    text = lines(measured, promised_time(planning))
    return answer(request.as_json, document, [*text, *([f"short         {remark}"] if remark else [])])


def show_plan(plan: RunPlan, request: TrainRequest, planning: Planning | None = None) -> ExitCode:
    """Run ``--plan-only``: show the plan of a run that is not started.

    Args:
        planning: the planner's document, if it chose among candidate plans.

    Raises:
        BadInput: the file of ``--out`` cannot be written.
    """
    _write(plan, planning, request)
    time = promised_time(planning)
    times = time.sentences if time else [_NOT_MEASURED]  # what makes them doubtful was told with the choice
    description = [*_parts(plan), way_text(plan), *map(visible, times)]
    if request.details:
        description.append(details_text(plan, planning))
    description.append("Nothing was started.")
    return answer(request.as_json, {**_document(plan), "promised": time.document() if time else None}, description)


def _parts(plan: RunPlan) -> Iterator[str]:
    """Yield what each member does in a step; members that do the same share a line."""
    names = defaultdict(list)
    for member in plan.members:
        names[member.batch_size, member.lead.kind].append(visible(member.name))
    for (batch_size, kind), alike in names.items():
        where = "" if kind == "auto" else f" on {kind}"
        yield f"{', '.join(alike)}: {counted(batch_size, 'sample')} a step{' each' if len(alike) > 1 else ''}{where}"


def _document(plan: RunPlan) -> dict[str, Any]:
    return {"plan": plan.model_dump(mode="json"), "plan_hash": plan.hash()}


def _write(plan: RunPlan, planning: Planning | None, request: TrainRequest) -> None:
    """Write the file of ``--out``: the planner's document, which ``--plan`` accepts, if there is one; else the plan."""
    if request.out is None:
        return
    with explain_errors(request.out, "--out"):
        write_atomically(request.out, (planning or plan).model_dump_json(indent=2).encode())
    say(f"written to {visible(request.out)}")


def shortened(plan: RunPlan) -> RunPlan:
    """Return the plan of the trial: same model, data, batches and members, but a few steps."""
    profile = plan.profile
    limit = profile.data.max_eval_samples
    changes = {
        "training": {"max_steps": min(STEPS, profile.training.max_steps or STEPS)},
        "evaluation": {"eval_before": False, "eval_interval": 0},
        "snapshot": {"snapshot_interval": 0},
        "data": {"max_eval_samples": min(limit, EVALUATED) if limit else EVALUATED},
    }
    sections = {name: getattr(profile, name).model_copy(update=change) for name, change in changes.items()}
    sections["strategy"] = shortened_for_trial(profile.strategy, INNER_STEPS)
    return plan.model_copy(update={"profile": profile.model_copy(update=sections)})


def measure(
    plan: RunPlan, events: Iterable[Event], state: RunState, planning: Planning | None = None
) -> RehearsalFigures:
    """Compute the figures of the real run from the events of a trial.

    Args:
        planning: knows how many samples the real run evaluates.

    Raises:
        BadInput: there was not a single step.
    """
    by_member: dict[int, list[StepEvent]] = defaultdict(list)
    syncs: list[SyncEvent] = []
    for event in events:
        if isinstance(event, StepEvent):
            by_member[event.member or 0].append(event)
        elif isinstance(event, SyncEvent):
            syncs.append(event)
    warm = [steps[1:] or steps for steps in by_member.values()]
    if not warm:
        raise BadInput("the trial run took no step", "add training data, or lower batch_size")
    settings = plan.profile.strategy
    interval = sync_schedule_of(settings).interval if plan.world_size > 1 else 1
    batches = [statistics.mean(step.samples for step in steps) for steps in warm]
    computes = [
        batch * statistics.median(step.compute / max(1, step.samples) for step in steps)
        for batch, steps in zip(batches, warm, strict=True)
    ]
    compute = max(computes)
    wait, transfer, traffic = _per_sync(syncs if interval > 1 else [], warm)
    seconds = compute + wait / interval
    computing = statistics.fmean(computes) / seconds if seconds else 0.0
    members = state.members.values()
    device_peaks = [m.device_memory_peak for m in members if m.device_memory_peak is not None]
    whole = _whole_run(plan, [step for steps in by_member.values() for step in steps])
    return RehearsalFigures(
        strategy=plan.profile.strategy.strategy,
        engine=plan.engine,
        workers=plan.world_size,
        steps=state.step,
        seconds_per_step=seconds,
        samples_per_second=sum(batches) / seconds if seconds else 0.0,
        compute_share=computing,
        wait_share=1.0 - computing if seconds else 0.0,
        transfer_share=min(1.0, transfer / interval / seconds) if seconds else 0.0,
        bytes_per_sync=traffic,
        steps_between_syncs=interval,
        memory_peak=max((member.memory_peak for member in members), default=0),
        device_memory_peak=max(device_peaks, default=None),
        total_steps=whole.steps,
        total_samples=whole.samples,
        evaluating=_seconds_per_evaluated_sample(state) * _evaluated_samples(planning, whole.steps),
    )


def _evaluated_samples(planning: Planning | None, steps: int) -> int:
    return planning.job.evaluation.samples_in(steps) if planning else 0


def _seconds_per_evaluated_sample(state: RunState) -> float:
    evaluations = [results.last for results in state.evaluations.values()]
    return sum(e.seconds for e in evaluations) / max(1, sum(e.samples for e in evaluations))


def _whole_run(plan: RunPlan, steps: Sequence[StepEvent]) -> RunSteps:
    """Return the steps of the whole run, extrapolated from the fraction of an epoch that was trained."""
    training = plan.profile.training
    last_step = max(steps, key=lambda step: step.step)
    taken = Counter[int]()
    for step in steps:
        taken[step.step] += step.samples
    batch = max(1, *taken.values())
    if last_step.epoch <= 0:
        return RunSteps(training.max_steps or last_step.step, batch)
    epoch_samples = max(1, round(taken.total() / last_step.epoch))
    return run_steps(epoch_samples, batch, training.epochs, training.drop_last, training.max_steps)


def _per_sync(syncs: Sequence[SyncEvent], warm: Sequence[Sequence[StepEvent]]) -> tuple[float, float, float]:
    """Return wait and transfer in seconds, and bytes per member, of one synchronisation."""
    if syncs:
        costs = [(sync.wait, sync.seconds, sync.bytes_sent + sync.bytes_received) for sync in syncs]
    else:
        # The fastest member waits for the others too; the slowest one's wait is what the exchange itself costs.
        slowest = max(warm, key=lambda steps: statistics.median(step.compute for step in steps))
        costs = [(step.wait, step.transfer, step.bytes_sent + step.bytes_received) for step in slowest]
    wait, transfer, traffic = (statistics.median(column) for column in zip(*costs))
    return wait, transfer, traffic


def lines(measured: RehearsalFigures, promised: RunTime | None = None) -> list[str]:
    """Return the figures as lines of text."""
    evaluations = "" if measured.evaluating else ", without evaluations"
    compared = f" ({promised.beside})" if promised else ""
    interval = "step" if measured.steps_between_syncs == 1 else f"{measured.steps_between_syncs} steps"
    exchange = (
        f"{bytes_text(measured.bytes_per_sync)} a worker, every {interval}" if measured.workers > 1 else "nothing"
    )
    device = f", {memory_text(measured.device_memory_peak)} on the device" if measured.device_memory_peak else ""
    return [
        "",
        f"Trial: {counted(measured.steps, 'real step')} with {counted(measured.workers, 'worker')}",
        f"step          {time_text(measured.seconds_per_step)}, {throughput_text(measured.samples_per_second)}",
        f"of which      {share_text(measured.compute_share)} computing, {share_text(measured.wait_share)} waiting for "
        "the others",
        f"sends         {exchange}",
        f"memory        {memory_text(measured.memory_peak)} in the largest worker{device}",
        f"whole run     {counted(measured.total_steps, 'step')}, about {duration_text(measured.seconds_total)}"
        f"{evaluations}{compared}",
        "Nothing was saved.",
    ]
