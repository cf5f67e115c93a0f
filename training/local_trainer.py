"""Training from Python: ``LocalTrainer`` uses several workers of this machine, ``NetworkTrainer``
(:mod:`distributed.network_trainer`) those of other machines, through the same trainer, exchange and strategies.

::

    trainer = LocalTrainer(model, train_dataset, val_dataset, workers=2)
    model = trainer.fit(strategy="diloco", epochs=3, learning_rate=1e-3)
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from profiles.errors import BadInput, ExitCode, MachinesNotReady, MusterError, RunFailed, StoppedByUser
from profiles.installation import RUNS_FOLDER, program
from profiles.schema import Profile
from training.records.events import Event
from training.records.plan import FIT, RunPlan
from training.records.run_files import explain_errors, private_file
from training.records.run_folder import RunFolder, has_snapshots
from training.records.run_index import remember
from training.records.runs import find_run
from training.run.local_plan import plan_local_run, with_workers
from training.run.narration import RunNarrator
from training.run.outcome import RunOutcome, noted_failure
from training.run.requests.request_server import LocalRequests
from training.run.resumption import LENGTHS, plan_to_resume
from training.run.run_controller import RunController
from training.run.stopping import stopped_by

if TYPE_CHECKING:
    from torch import nn

    from training.strategies.base import Strategy
    from training.tasks.base import SizedDataset
    from training.tasks.custom import CustomJob

CALLER, OBJECTS = "caller.pickle", "objects.pt"
"""Files for the workers of a :class:`LocalTrainer` in the private folder of their run: how to find the classes of the
caller's script, and the job."""
_WORKER = "training.workers.api_worker"

_CLUSTER = 'write LocalTrainer(..., simulate=4, cluster=Machines.read(Path("machines.json")))'

_ERRORS: dict[ExitCode, type[MusterError]] = {
    kind.exit_code: kind for kind in (BadInput, MachinesNotReady, StoppedByUser)
}


class TimedMachines(Protocol):
    """Machines that are simulated."""

    def with_clock(self, plan: RunPlan) -> RunPlan:
        """Return the plan of a simulated run with the clock of these machines."""
        ...


class ObjectTrainer(ABC):
    """Trains a model given as Python objects.

    Args:
        model: a module, or a function (also as text, ``module:name``) that takes nothing and returns one. Its forward
            gives a loss (a scalar, ``output.loss``, ``{"loss": ...}``), or ``loss`` is given.
        train_dataset: map-style data set of samples that ``collate`` (default: torch's) can batch, or an iterable one,
            or a function (also as text) that takes nothing and returns one. One of a :class:`LocalTrainer` may take
            ``rank`` and ``world_size``, and return the data of one worker (which sets ``local_data``). Of a
            ``DataLoader`` its data set, batch size, collate function and sampler are taken; without a sampler of its
            own, samples come in a new order in every epoch.
        val_dataset: evaluated before, at intervals, and after.
        loss: ``loss(output, target)`` for data sets of ``(input, target)`` pairs, or ``module:name``.
        collate: makes a batch of a list of samples, or ``module:name``.
        weight: number of items of a batch that its loss is a mean over, as of words; default: of its samples. Or
            ``module:name``.
        metrics: ``metrics(output, target)``: means over a batch of an evaluation, by name; or ``module:name``.
        optimizer: a class (``torch.optim.RAdam``), or a function of the trained parameters, or of model and options,
            that returns one; default: by the option ``optimizer``. Or ``module:name``.
        train_step: ``train_step(model, batch)``: the loss of a batch, in place of ``loss``; or ``module:name``.
        lr_scheduler: in place of the options ``lr_schedule`` and ``warmup_steps``: a class or function of an optimizer,
            or of ``optimizer`` and ``total_steps``, that returns one of ``torch.optim.lr_scheduler``; or
            ``lr_scheduler(step, total_steps)``, which returns the share of ``learning_rate`` for a step, from 0; or
            ``module:name``.
        output_dir: folder of the run folders.
        on_event: called with every event of the run; default: warnings and progress are written to standard error.
    """

    profile_name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str,
        train_dataset: SizedDataset | Callable[[], SizedDataset] | str,
        val_dataset: SizedDataset | Callable[[], SizedDataset] | str | None = None,
        *,
        loss: Callable[..., Any] | str | None = None,
        collate: Callable[..., Any] | str | None = None,
        weight: Callable[[Any], float] | str | None = None,
        metrics: Callable[[Any, Any], Mapping[str, float]] | str | None = None,
        optimizer: Callable[..., Any] | str | None = None,
        train_step: Callable[[Any, Any], Any] | str | None = None,
        lr_scheduler: Callable[..., Any] | str | None = None,
        output_dir: Path | str = RUNS_FOLDER,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.model = model
        self.outcome: RunOutcome | None = None
        train_dataset, collate, self._loader_options = _without_loader(train_dataset, collate, "train_dataset")
        val_dataset, collate, others = _without_loader(val_dataset, collate, "val_dataset")
        self._loader_options |= {"eval_batch_size": others["batch_size"]} if others else {}
        self._job_arguments: dict[str, Any] = {"train": train_dataset, "validation": val_dataset, "loss": loss}
        self._job_arguments |= {"collate": collate, "weight": weight, "metrics": metrics, "optimizer": optimizer}
        self._job_arguments |= {"train_step": train_step, "lr_scheduler": lr_scheduler}
        self._output_dir = Path(output_dir)
        self._listener = on_event
        self._on_event: Callable[[Event], None] = on_event or (lambda event: None)

    def fit(
        self,
        strategy: str | type[Strategy] | Strategy | Sequence[str | type[Strategy] | Strategy] = "auto",
        *,
        resume: Path | str = "",
        **options: Any,
    ) -> nn.Module:
        """Train and return the model with its new weights; ``options`` are those of a profile.

        Args:
            strategy: a name, a class (one of your own stands at the top level of its file), an instance, whose options
                are taken, or a list of these, which are used at once. ``auto`` is ``allreduce`` among workers of this
                machine, where links cost nothing, and what was measured to be fastest on several machines.
            resume: folder, id or beginning of the id of a run of such a trainer that did not come to its end. It goes
                on from its newest snapshot exactly as it was planned: with its strategy, options and members.

        Raises:
            BadInput: an unknown option or strategy, objects that cannot be used, or a run that cannot be resumed.
            MachinesNotReady: a machine cannot take part.
            RunFailed: the run failed; the message names the first cause.
            StoppedByUser: the user stopped it; where nothing catches it, the program ends with one line, no traceback.
        """
        if getattr(sys.modules["__main__"].__spec__, "name", "") == _WORKER:
            hint = 'put what calls fit() under: if __name__ == "__main__":'
            raise BadInput("a worker imports the script, which calls fit() again", hint)
        from profiles.files.resolve import profile_from_options
        from training.strategies.user_strategy import settings_for
        from training.tasks.custom import CustomJob
        from training.tasks.object_files import check_given, load_result, make_model

        name, strategy_options = settings_for(strategy)
        usual = {"task": "custom", "output_dir": self._output_dir, "strategy": name, **self._loader_options}
        usual |= self._settings | self._rate_options(options)
        chosen = {**usual, **strategy_options, **options}
        earlier = self._earlier(resume, name, options) if resume else None
        profile = earlier[1].profile if earlier else profile_from_options(self.profile_name, chosen)
        self._on_event = self._listener or RunNarrator(profile)
        job = CustomJob(self.model, **self._job_arguments)
        check_given(job)
        self._check(job)
        model = make_model(self.model, profile.training.seed)
        self.outcome = self._resume(*earlier, job) if earlier else self._run(profile, job)
        if self.outcome.status != "completed":
            error = failure_of(self.outcome)
            if isinstance(error, StoppedByUser):
                end_without_traceback()
            raise error
        load_result(model, self.outcome.run_dir / "model")
        self.model = model
        return model

    def _earlier(self, reference: Path | str, strategy: str, options: dict[str, Any]) -> tuple[Path, RunPlan]:
        """Return folder and plan of the run to resume.

        Raises:
            BadInput: no such run, one of another trainer, a completed one, one without a snapshot, or other options.
        """
        others = [name for name in options if name not in ("output_dir", *LENGTHS)]
        changes = [*(["strategy"] if strategy != "auto" else []), *others]
        if changes:
            message = f"a resumed run continues as planned and takes no other {', '.join(changes)}"
            raise BadInput(message, "leave it out, or start a new run")
        path = find_run(Path(options.get("output_dir", self._output_dir)), str(reference))
        plan = plan_to_resume(path, {name: options[name] for name in LENGTHS if name in options})
        if plan.profile.name != self.profile_name:
            message = f"run {plan.run_id} is of profile '{plan.profile.name}', not of a {type(self).__name__}"
            raise BadInput(message, f"resume it with: {program('distributed-train', '--resume', plan.run_id)}")
        return path, plan

    def _rate_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the learning rate that a schedule of the user's stands in for.

        Raises:
            BadInput: one of them is given beside it.
        """
        if self._job_arguments["lr_scheduler"] is None:
            return {}
        replaced = {"lr_schedule": "constant", "warmup_steps": 0}
        if unread := [name for name in (*replaced, "lr_decay_share") if name in options]:
            raise BadInput(f"lr_scheduler stands in for {unread[0]}", "give one of them", option=unread[0])
        return replaced

    @property
    def _settings(self) -> dict[str, Any]:
        """Options that the trainer was constructed with."""
        return {}

    @abstractmethod
    def _run(self, profile: Profile, job: CustomJob) -> RunOutcome:
        """Carry out a new run and return its outcome."""

    @abstractmethod
    def _resume(self, path: Path, plan: RunPlan, job: CustomJob) -> RunOutcome:
        """Resume the run in ``path`` and return its outcome."""

    def _check(self, job: CustomJob) -> None:
        """Raise BadInput for a job that can never work, before anything is made."""


class LocalTrainer(ObjectTrainer):
    """Train with several workers of this machine.

    Model and data sets travel to the workers by pickle, as with any ``multiprocessing`` child: define their classes at
    module level and guard the script with ``if __name__ == "__main__":``.

    A worker that is lost is not taken back: ``fit`` answers no requests, as a run of ``muster train --local`` does
    (``ask RUN add``), and on one machine what has ended a worker, such as a lack of memory, is likely to end it again.
    The others train on without it; where workers hold one model together, all end. ``fit(resume=...)`` starts all
    again. The workers of a :class:`~distributed.network_trainer.NetworkTrainer` come back by themselves.

    Args:
        model: as :class:`ObjectTrainer` takes it, and so are ``train_dataset``, ``val_dataset`` and ``settings``.
        workers: how many processes train together. A resumed run has as many as it began with, or, if they hold one
            model together (``layout = pipeline``, ``shard`` or ``tensor``), so many; ``fit(resume=...)`` may change
            that layout.
        simulate: if not 0, so many members train in one process that takes turns, with the same result.
        cluster: machines whose time a simulated run computes
            (``distributed.planning.simulated.Machines.read(Path("machines.json"))``).
    """

    profile_name = "local"

    def __init__(
        self,
        model: Any,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        workers: int = 2,
        simulate: int = 0,
        cluster: TimedMachines | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, train_dataset, val_dataset, **settings)
        self.workers = workers
        self.simulate = simulate
        self._cluster = cluster

    @property
    def _settings(self) -> dict[str, Any]:
        from training.tasks.custom import CustomJob
        from training.tasks.object_files import depends_on_rank

        job = CustomJob(self.model, **self._job_arguments)
        return {"workers": self.workers, **({"local_data": True} if depends_on_rank(job) else {})}

    def _earlier(self, reference: Path | str, strategy: str, options: dict[str, Any]) -> tuple[Path, RunPlan]:
        others, layout = {**options}, options.get("layout", "")
        others.pop("layout", None)
        path, plan = super()._earlier(reference, strategy, others)
        return path, with_workers(plan, self.workers, layout) if plan.is_staged or layout else plan

    def _run(self, profile: Profile, job: CustomJob) -> RunOutcome:
        if profile.run.cluster:
            raise BadInput("fit() takes no file of machines", f"{_CLUSTER}, or without")
        simulated = self.simulate or profile.run.simulate
        if self._cluster is not None and not simulated:
            raise BadInput("only a simulation has the time of other machines", _CLUSTER)
        plan = plan_local_run(profile, simulated or profile.run.workers, simulated=simulated > 0)
        if self._cluster is not None:
            plan = self._cluster.with_clock(plan)
        output = Path(profile.run.output_dir)
        run_folder = RunFolder.create(output, plan, _command())
        remember(output)
        return self._carry_out(run_folder, job)

    def _resume(self, path: Path, plan: RunPlan, job: CustomJob) -> RunOutcome:
        return self._carry_out(RunFolder.resume(path, plan, _command()), job)

    def _carry_out(self, folder: RunFolder, job: CustomJob) -> RunOutcome:
        def say(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        with folder, noted_failure(folder), stopped_by((signal.SIGINT,), say) as stop:
            write_objects(job, folder.secrets)
            requests = LocalRequests(self._on_event)
            run = RunController(folder.plan(), folder, requests, worker=_WORKER)
            try:
                run.start()
                stop.watch(run)
                requests.open(run)
                return run.wait()
            finally:
                for handle in run.members.workers.values():
                    handle.process.exit_code()  # nothing is left of them, where this process goes on


def _without_loader(data: Any, collate: Any, title: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the data set in a ``DataLoader``, its collate function unless another is given, and its options."""
    data_loading = sys.modules.get("torch.utils.data")
    if data_loading is None or not isinstance(data, data_loading.DataLoader):
        return data, collate, {}
    from training.tasks.object_files import parts_of_loader

    dataset, of_loader, options = parts_of_loader(data, title)
    return dataset, collate or of_loader, options


def failure_of(outcome: RunOutcome) -> MusterError:
    """Return the error that :meth:`ObjectTrainer.fit` raises, with a hint to resume if there is a snapshot."""
    hints = [outcome.hint] if outcome.hint else []
    if outcome.resumable and has_snapshots(outcome.run_dir):
        hints.append(f'resume with: fit(resume="{outcome.run_dir}")')
    return _ERRORS.get(outcome.exit_code, RunFailed)(outcome.message, "; ".join(hints))


def end_without_traceback() -> None:
    """Have an uncaught :class:`StoppedByUser` end the program with one line and exit code 130: it is no error of the
    script. Other exceptions go to the hook that was there before."""
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, StoppedByUser):
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
        previous(kind, error, trace)

    sys.excepthook = show


def _command() -> list[str]:
    """Return what started a run: the call, and the script, where there is one."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return [FIT, *([os.path.abspath(script)] if script else [])]


class _SessionPickler(pickle.Pickler):
    """Refuses what a notebook, a shell or standard input defines: no worker can import it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            hint = "put it into a .py file, and import it from there; the rest may stay"
            raise BadInput(f"{value.__qualname__} is defined in an interactive session: no worker finds it", hint)
        return NotImplemented


def write_objects(job: CustomJob, folder: Path) -> None:
    """Write the job for the run's workers. Storage that tensors share is written once, which plain pickle does not
    do."""
    import torch

    caller = multiprocessing.spawn.get_preparation_data("worker")
    del caller["authkey"]  # for connections that are not used
    main = sys.modules["__main__"]
    is_session = main.__spec__ is None and not Path(getattr(main, "__file__", None) or "<session>").is_file()
    if is_session:
        caller.pop("init_main_from_path", None)  # "<stdin>"
    pickling = SimpleNamespace(__name__="pickle", Pickler=_SessionPickler if is_session else pickle.Pickler)
    with explain_errors(folder, kind=RunFailed):
        with open(folder / CALLER, "wb", opener=private_file) as file:
            pickle.dump(caller, file)
        with open(folder / OBJECTS, "wb", opener=private_file) as file:
            try:
                torch.save(job, file, pickle_module=pickling)
            except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
                hint = (
                    "define its classes and functions at module level, and open files and locks where they are used; "
                )
                hint += "or give a function that makes the model"
                problem = " ".join(str(error).split())
                raise BadInput(f"the model or the data cannot reach the workers: {problem}", hint) from error
