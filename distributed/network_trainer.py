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

from profiles.errors import BadInput, MusterError, RunFailed
from profiles.schema import Profile
from training.local_trainer import ObjectTrainer
from training.records.event_log import follow_events
from training.records.events import ErrorEvent, Event
from training.records.plan import JOB_FACTORY, RunPlan
from training.records.run_files import explain_errors, is_live
from training.records.run_folder import RunFolder, folder_name
from training.run.outcome import NewestAttempt, RunOutcome

if TYPE_CHECKING:
    from distributed.preparation.prepare import PrepareOptions
    from training.tasks.custom import CustomJob

__all__ = ["NetworkTrainer"]

JOB = "job"
"""Folder in the run folder with what the run trains: ``objects/`` and, beside it, the Python files."""
_OBJECTS = "objects"


class NetworkTrainer(ObjectTrainer):
    """Train on the machines of a hosts file, as ``distributed-train`` does: same run folder, events and errors.

    A function given as model or data set is called on every machine; an object is written to files and sent. With
    ``strategy="auto"`` several machines, their links and this job on them are measured, and the fastest strategy is
    taken; figures up to a week old are reused. Ctrl-C stops the run on all machines, with snapshots, and is raised
    again; a second one ends it at once.

    Args:
        model: as :class:`training.local_trainer.ObjectTrainer` takes it, and so are ``train_dataset``, ``val_dataset``
            and ``settings``; objects but texts are defined at a module's top level.
        hosts: the hosts file.
        trust_new: accept the host keys of unknown machines.
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

    def _check(self, job: CustomJob) -> None:
        from training.tasks.object_files import check_names

        check_names(job)

    def _run(self, profile: Profile, custom_job: CustomJob) -> RunOutcome:
        from distributed.hosts.file import accept_pythons, load_hosts
        from distributed.launcher import DistributedLauncher
        from distributed.preparation.custom_code import code_of
        from distributed.ssh.config import accept

        if profile.data.local_data:
            _refuse_sent_data(custom_job)
        hosts = load_hosts(self._hosts)
        accept_pythons(hosts)
        accept(hosts.ssh_config)  # the author of the script named the file
        output = Path(profile.run.output_dir)
        with _job_folder(output, custom_job) as job_folder:
            launcher = DistributedLauncher(hosts, _with_job(profile, job_folder), self._prepare_options())
            planned = launcher.plan()
            path = output / folder_name(planned.plan)
            plan = planned.plan.model_copy(update={"profile": _with_job(planned.plan.profile, path / JOB)})
            try:
                started = dataclasses.replace(planned, plan=plan)
                launcher.start(started, ["NetworkTrainer.fit"], lambda folder: job_folder.rename(folder / JOB))
                for option in plan.profile.user_code:  # the author of the script may resume its run
                    if (code := code_of(plan.profile, option)) is not None:
                        code.approve()
            except BaseException:
                _stop(path)
                raise
        return self._to_the_end(path, plan)

    def _resume(self, path: Path, plan: RunPlan, custom_job: CustomJob) -> RunOutcome:
        """Resume with the job stored in the run folder, whatever has changed in the script since.

        A model that lies on machines is cut anew where the hosts file names others than the run had.
        """
        from distributed.hosts.file import RUN_HOSTS, accept_pythons, load_hosts
        from distributed.resuming import resume_run
        from distributed.ssh.config import accept

        if not (path / JOB).is_dir():
            raise BadInput(f"{path / JOB}: the model and data of the run are missing", "start a new run instead")
        reported_events = sum(1 for _ in RunFolder.open(path).events())
        accept(load_hosts(path / RUN_HOSTS).ssh_config)  # the author of the script named the run
        can_move = plan.is_staged and plan.world_size == 1 and self._hosts.is_file()
        hosts = load_hosts(self._hosts) if can_move else None
        if hosts is not None:
            accept_pythons(hosts)
            accept(hosts.ssh_config)
        resume_run(path, plan, self._prepare_options(), ["NetworkTrainer.fit"], hosts)
        return self._to_the_end(path, plan, reported_events)

    def _to_the_end(self, path: Path, plan: RunPlan, reported_events: int = 0) -> RunOutcome:
        """Report the events until the run has ended, except those reported already."""
        attempt = NewestAttempt()
        try:
            for number, event in enumerate(_events(path)):
                attempt.note(event)
                if number >= reported_events:
                    self._on_event(event)
        except BaseException:
            _stop(path)
            raise
        outcome = attempt.outcome(path)
        if outcome.status == "failed":
            message = with_machine(attempt.error, plan) if attempt.error is not None else outcome.message
            outcome = dataclasses.replace(outcome, message=message, hint=outcome.hint or f"see {path / 'logs'}")
        if outcome.status == "completed":
            shutil.rmtree(path / JOB, ignore_errors=True)  # needed only to resume
        return outcome

    def _prepare_options(self) -> PrepareOptions:
        from distributed.preparation.prepare import PrepareOptions

        return PrepareOptions(trust=(lambda key: True) if self._trust_new else None)


def _refuse_sent_data(job: CustomJob) -> None:
    from training.tasks.object_files import check_names

    by_name = check_names(job)
    for option, data in (("train_dataset", job.train), ("val_dataset", job.validation)):
        if data is not None and option not in by_name:
            message = (
                f"{option} is an object, which goes to all machines, and local_data = true keeps data where they are"
            )
            raise BadInput(message, "give a function that reads the data of the machine that it is called on")


def _with_job(profile: Profile, job: Path) -> Profile:
    """Return the profile with the job read from a folder."""
    changed = {
        "model": profile.model.model_copy(update={"model_path": JOB_FACTORY}),
        "data": profile.data.model_copy(update={"dataset_path": str(job.resolve() / _OBJECTS)}),
    }
    return profile.model_copy(update=changed)


@contextlib.contextmanager
def _job_folder(output: Path, job: CustomJob) -> Iterator[Path]:
    """Write the job and the code it needs into a temporary folder, removed on exit unless it was moved."""
    from training.tasks.object_files import check_names, write_job

    with explain_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".job-", dir=output, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / _OBJECTS).mkdir()
            write_job(job, folder / _OBJECTS)
            functions = (job.loss, job.collate, job.weight, job.metrics, job.optimizer, job.train_step)
            definitions = (job.model, job.train, job.validation, *functions, job.lr_scheduler)
            files = [text.rpartition(":")[0] for text in definitions if isinstance(text, str) and ".py:" in text]
            _copy_code([*files, *(name.partition(":")[0] for name in check_names(job).values())], folder)
            yield folder


def _copy_code(modules: Iterable[str], folder: Path) -> None:
    """Copy the Python files that the modules need, so that the run can be resumed whatever changes in them."""
    from distributed.preparation.code_sync import JOB_CODE, user_sources

    (folder / JOB_CODE).mkdir()
    origin: dict[Path, Path] = {}
    for module in dict.fromkeys(modules):
        files, top = user_sources(module)
        for file in files:
            target = folder / JOB_CODE / file.relative_to(top)
            if origin.setdefault(target, file).resolve() != file.resolve():
                message = f"{file} and {origin[target]} would be the same module on the machines"
                raise BadInput(message, "rename one of them")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _events(path: Path) -> Iterator[Event]:
    try:
        for event in follow_events(path / "events.jsonl", lambda: is_live(path)):
            if event is not None:
                yield event
    except FileNotFoundError:
        raise RunFailed(f"{path}: the run folder is gone", "find out what removed it, and start again") from None


def _stop(path: Path) -> None:
    """Stop the run with snapshots and wait until nothing of it is left; a second Ctrl-C ends it at once."""
    from training.run.requests.request_book import leave_request

    with contextlib.suppress(MusterError):  # the run is gone already
        try:
            leave_request(path, "stop")
            for _ in _events(path):
                continue
        except KeyboardInterrupt:
            leave_request(path, "kill")
            for _ in _events(path):
                continue


def with_machine(error: ErrorEvent, plan: RunPlan) -> str:
    """Return the message of an error, prefixed with the name of its machine."""
    names: dict[int | None, str] = {member.rank: member.name for member in plan.members}
    name = names.get(error.member, "")  # a machine added later is not in the plan
    return error.message if error.machine or not name else f"{name}: {error.message}"
