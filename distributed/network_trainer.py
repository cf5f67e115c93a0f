"""``NetworkTrainer``: training from Python on the machines of a hosts file.

::

    if __name__ == "__main__":
        trainer = NetworkTrainer(build_model, train_dataset, val_dataset, hosts="distributed_hosts.json")
        model = trainer.fit(strategy="diloco", epochs=3, learning_rate=1e-3)

Nothing is pickled: functions and classes travel by name, with the Python files that define them; weights and samples as
safetensors (:mod:`training.tasks.object_files`). A worker that imports the script imports this module too, so it
imports nothing of machines and SSH at its top.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles.errors import BadInput, ExitCode, MusterError, RunFailed
from profiles.schema import Profile
from training.event_log import follow_lines
from training.events import ErrorEvent, Event, from_line
from training.local_run import LocalOutcome
from training.plan import RunPlan
from training.run_files import explain, is_live
from training.run_folder import RunFolder, folder_name
from training.run_metadata import FINAL
from training.simulation import ObjectTrainer

if TYPE_CHECKING:
    from training.tasks.object_files import JobParts

__all__ = ["NetworkTrainer"]

JOB = "job"
"""What the run trains, in its folder: ``objects/`` and, beside it, the Python files."""
_OBJECTS = "objects"


class NetworkTrainer(ObjectTrainer):
    """Train on the machines of a hosts file, as ``distributed-train`` does: same run folder, events and errors.

    A function given as model or data set is called on every machine; an object is written to files and sent. Ctrl-C
    stops the run on all machines, with snapshots, and is raised again; a second one ends it at once.

    Args:
        model, train_dataset, val_dataset, loss, collate, output_dir, on_event: as
            :class:`training.simulation.ObjectTrainer`; what is not text is defined at the top level of a module.
        hosts: the hosts file.
        trust_new: accept the host keys of machines that are met for the first time.
    """

    profile_name = "network"

    def __init__(
        self,
        model: Any,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        hosts: Path | str = "distributed_hosts.json",
        trust_new: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(model, train_dataset, val_dataset, **settings)
        self._hosts = Path(hosts)
        self._trust_new = trust_new

    def _check(self, parts: JobParts) -> None:
        from training.tasks.object_files import check_names

        check_names(parts)

    def _run(self, profile: Profile, parts: JobParts) -> LocalOutcome:
        from distributed.hosts.file import load_hosts
        from distributed.launcher import DistributedLauncher
        from distributed.preparation.prepare import Manner

        manner = Manner(trust=(lambda key: True) if self._trust_new else None)
        launcher = DistributedLauncher(load_hosts(self._hosts), _without_a_choice(profile), manner)
        output = Path(profile.run.output_dir)
        with _job_folder(output, parts) as job:
            planned = launcher.plan()
            plan = _with_job(planned.plan, output)
            path = output / folder_name(plan)
            try:
                started = dataclasses.replace(planned, plan=plan)
                launcher.start(started, ["NetworkTrainer.fit"], lambda folder: _move(job, folder / JOB))
                outcome = self._follow(path, plan)
            except BaseException:
                _stop(path)
                raise
        if outcome.status == "completed":
            shutil.rmtree(path / JOB, ignore_errors=True)  # it is needed to resume only
        return outcome

    def _follow(self, path: Path, plan: RunPlan) -> LocalOutcome:
        """Hand the events on until the run has ended."""
        first_error: ErrorEvent | None = None
        for event in _events(path):
            if isinstance(event, ErrorEvent) and first_error is None:
                first_error = event
            self._on_event(event)
        return _outcome(path, plan, first_error)


def _without_a_choice(profile: Profile) -> Profile:
    """The job exists on no machine before it starts, so nothing can be measured to choose a strategy from."""
    if profile.strategy.strategy != "auto":
        return profile
    return profile.model_copy(update={"strategy": profile.strategy.model_copy(update={"strategy": "allreduce"})})


def _with_job(plan: RunPlan, output: Path) -> RunPlan:
    """The plan of the same run with the job of its own folder."""
    from distributed.preparation.code_sync import JOB_FACTORY

    profile = plan.profile
    place = output.resolve() / folder_name(plan) / JOB / _OBJECTS
    changed = {
        "model": profile.model.model_copy(update={"model_path": JOB_FACTORY}),
        "data": profile.data.model_copy(update={"dataset_path": str(place)}),
    }
    return plan.model_copy(update={"profile": profile.model_copy(update=changed)})


@contextlib.contextmanager
def _job_folder(output: Path, parts: JobParts) -> Iterator[Path]:
    """Write the job, and the code it needs, into a folder that is removed if it was not taken away."""
    from training.tasks.object_files import check_names, write_job

    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".job-", dir=output))
    except OSError as error:
        raise BadInput(*explain(error, output)) from None
    try:
        (folder / _OBJECTS).mkdir()
        write_job(parts, folder / _OBJECTS)
        given = (parts.model, parts.train, parts.validation, parts.loss, parts.collate)
        files = [part.rpartition(":")[0] for part in given if isinstance(part, str) and ".py:" in part]
        _copy_code([*files, *(name.partition(":")[0] for name in check_names(parts).values())], folder)
        yield folder
    except OSError as error:
        raise BadInput(*explain(error, folder)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_code(modules: Iterable[str], folder: Path) -> None:
    """Copy the Python files that the modules need, so that the run can be resumed whatever is changed meanwhile."""
    from distributed.preparation.code_sync import JOB_CODE, user_sources

    (folder / JOB_CODE).mkdir()
    origin: dict[Path, Path] = {}
    for module in dict.fromkeys(modules):
        files, top = user_sources(module)
        for file in files:
            place = folder / JOB_CODE / file.relative_to(top)
            if origin.setdefault(place, file).resolve() != file.resolve():
                message = f"{file} and {origin[place]} would be the same module on the machines"
                raise BadInput(message, "rename one of them")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def _move(folder: Path, place: Path) -> None:
    try:
        folder.rename(place)
    except OSError as error:
        raise BadInput(*explain(error, place)) from None


def _events(path: Path) -> Iterator[Event]:
    try:
        for line in follow_lines(path / "events.jsonl", lambda: is_live(path)):
            with contextlib.suppress(ValueError, RecursionError):  # a damaged line
                if line:
                    yield from_line(line)
    except FileNotFoundError:
        raise RunFailed(f"{path}: the run folder is gone", "see what removed it, and start again") from None


def _stop(path: Path) -> None:
    """Stop the run with snapshots and wait until nothing of it is left; a second Ctrl-C ends it at once."""
    from distributed.run.requests import leave_request

    with contextlib.suppress(MusterError):  # there is no such run any more
        try:
            leave_request(path, "stop")
            for _ in _events(path):
                continue
        except KeyboardInterrupt:
            leave_request(path, "kill")
            for _ in _events(path):
                continue


def _outcome(path: Path, plan: RunPlan, error: ErrorEvent | None) -> LocalOutcome:
    """Say how a run ended, from its folder; the folder is gone where its input could not be used."""
    try:
        metadata = RunFolder.open(path).metadata
        status, message, metrics = metadata.status, metadata.error_message, metadata.metrics
    except MusterError:
        status, message, metrics = "failed", "", {}
    if status not in FINAL:
        status, message = "failed", "interrupted: its supervisor is gone"
    if status == "completed":
        return LocalOutcome(status, path, metrics, ExitCode.DONE)
    if status == "cancelled":
        return LocalOutcome(status, path, metrics, ExitCode.STOPPED, message)
    if error is None:
        return LocalOutcome(status, path, metrics, ExitCode.RUN_FAILED, message, f"see {path / 'logs'}")
    code = ExitCode.RUN_FAILED if metrics.get("steps") else ExitCode(error.exit_code)
    return LocalOutcome(status, path, metrics, code, _with_machine(error, plan), error.hint)


def _with_machine(error: ErrorEvent, plan: RunPlan) -> str:
    names: dict[int | None, str] = {member.rank: member.name for member in plan.members}
    name = names.get(error.member, "")  # one that came later is not in the plan
    return error.message if name in error.message else f"{name}: {error.message}"
