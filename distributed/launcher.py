"""From a profile and a hosts file to a run that goes on by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts, save_hosts
from distributed.planning.feedback import keep_planning
from distributed.planning.fitting import fit
from distributed.planning.reasons import why_in_words
from distributed.preparation.members import rooms_of
from distributed.preparation.preflight import Ready
from distributed.preparation.prepare import PrepareOptions, hosts_of, prepare
from distributed.run.planning import Planned, PlanOptions, plan_machines
from profiles.schema import Profile
from training.events import TimingEvent
from training.plan import RunPlan
from training.processes import BackgroundProcess, Laps
from training.run_folder import RunFolder


class DistributedLauncher:
    """Makes machines ready, plans a run on them, and starts its supervisor.

    Args:
        hosts: the machines.
        profile: what to train.
        prepare_options: how machines are made ready.
        plan_options: what the plan should be like.
        whole_process: the time of the start begins with this process, not with this object.
    """

    def __init__(
        self,
        hosts: Hosts,
        profile: Profile,
        prepare_options: PrepareOptions | None = None,
        plan_options: PlanOptions | None = None,
        whole_process: bool = False,
    ) -> None:
        self._hosts = hosts
        self._profile = profile
        self._prepare_options = prepare_options or PrepareOptions()
        self._plan_options = plan_options or PlanOptions()
        self._timings: list[TimingEvent] = []
        self._laps = Laps(self._timings.append, whole_process)
        self._stand_by: BackgroundProcess | None = None

    def plan(self) -> Planned:
        """Make all machines ready and return the plan of a run on them; their connections are closed again.

        Raises:
            NotReady: some machine cannot take part.
            BadInput: the profile does not fit that many members.
        """
        self._laps.end("command: program")
        self._stand_by = _supervisor()
        machines: Sequence[Ready] = ()
        try:
            machines = prepare(self._hosts, self._profile.model.task, self._prepare_options)
            self._laps.end("machines: checked")
            profile = fit(self._profile, rooms_of(self._profile, machines), self._prepare_options.tell)
            planned = plan_machines(machines, profile, self._plan_options, self._prepare_options.tell)
            self._hosts = hosts_of(self._hosts, [link for link, _ in planned.machines])
            self._laps.end("machines: planned")
            return planned
        except BaseException:
            self.dismiss()
            raise
        finally:
            for link, _ in machines:
                link.close()

    def dismiss(self) -> None:
        """Start nothing after all. Idempotent."""
        if self._stand_by is not None:
            self._stand_by.dismiss()
            self._stand_by = None

    def start(
        self, planned: Planned, command: Sequence[str], fill: Callable[[Path], object] = lambda folder: None
    ) -> Path:
        """Make the run folder, let ``fill`` put more into it, start the supervisor, and return the folder.

        Raises:
            BadInput: the folder cannot be made.
            RunFailed: the supervisor did not start.
        """
        supervisor, self._stand_by = self._stand_by or _supervisor(), None
        try:
            path = self._folder(planned, command)
            fill(path)
        except BaseException:
            supervisor.dismiss()
            raise
        supervisor.start(path)
        return path

    def _folder(self, planned: Planned, command: Sequence[str]) -> Path:
        output = Path(self._profile.run.output_dir)
        reason = why_in_words(planned.planning) if planned.planning else ""
        folder = RunFolder.create(output, planned.plan, list(command), run_type="distributed", strategy_reason=reason)
        if planned.planning is not None:
            keep_planning(folder.path, planned.planning, planned.figures)
        save_hosts(self._hosts, folder.path / RUN_HOSTS)
        self._laps.end("command: plan")
        for timing in self._timings:
            folder.append(timing)
        folder.close()
        return folder.path


def resume_run(path: Path, plan: RunPlan, prepare_options: PrepareOptions, command: Sequence[str]) -> None:
    """Let the run in ``path`` go on, in the background, on the machines that hold its snapshots.

    Raises:
        BadInput: another process works on it.
        NotReady: some machine cannot take part.
        RunFailed: the supervisor did not start.
    """
    hosts = load_hosts(path / RUN_HOSTS)
    links = [link for link, _ in prepare(hosts, plan.profile.model.task, prepare_options)]
    for link in links:
        link.close()
    folder = RunFolder.resume(path, plan, list(command))
    save_hosts(hosts_of(hosts, links), path / RUN_HOSTS)
    folder.close()
    _supervisor().start(path)


def _supervisor() -> BackgroundProcess:
    return BackgroundProcess("distributed.supervisor")
