"""A user-defined task: any ``nn.Module``, data sets, and optionally a loss and metrics.

A sample may be a tuple, a mapping or a tensor, and a batch is whatever ``collate`` returns. Without a loss function the
model is called with the batch (unpacked or as a whole, depending on the signature of its forward) and must return a
loss. With one the model is called with the inputs, and ``loss(output, target)`` with the target: the last element of a
tuple, or ``target``, ``targets``, ``label`` or ``labels`` of a mapping, a named tuple or an object. A job with a
``train_step`` computes the loss of a batch by itself.

``model_path`` names a function that takes the profile, or nothing, and returns a :class:`CustomJob`, a mapping of its
fields, or a tuple of them in order. With ``local_data = true`` it may also take ``rank`` and ``world_size``, and return
the data of one member.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, default_collate

from profiles.errors import BadInput, MusterError, RunFailed, where_it_failed
from profiles.schema import Profile
from training.hardware.device import move
from training.numerics.randomness import seed_everything
from training.tasks.base import Batch, GroupPosition, Progress, SizedDataset, StageMaker, Task
from training.tasks.data_files.splits import SPEAKER_COLUMNS
from training.tasks.outputs.model_call import (
    call_model,
    call_step,
    loss_of,
    metric_values,
    scalar_loss,
    split_target,
)
from training.tasks.outputs.weights_file import write_weights
from training.tasks.own_code.source_hash import source_hash
from training.tasks.own_code.streams import Stream, is_stream, read_all
from training.tasks.user_code import call_factory, find_factory, takes_rank


@dataclass(frozen=True)
class CustomJob:
    """Model, data sets and functions of a user-defined task, as returned by a factory.

    When passed to ``LocalTrainer``, its fields may also be functions that create them, or names (``module:name``).
    """

    model: Any
    """An ``nn.Module``."""
    train: Any
    """A map-style data set, or an iterable one, see :mod:`training.tasks.own_code.streams`."""
    validation: Any = None
    loss: Any = None
    """``loss(output, target)``: the scalar mean over the batch; ``None``: the model's forward returns it."""
    metrics: Callable[[Any, Any], Mapping[str, float]] | None = None
    """``metrics(output, target)``: means over the batch, by name. ``loss`` is recorded as ``metrics.loss``."""
    collate: Any = None
    """Collates a list of samples into a batch; ``None``: torch's ``default_collate``."""
    weight: Any = None
    """Number of items of a batch that its loss is a mean over; ``None``: samples. Needed for a per-token loss."""
    optimizer: Any = None
    """A class of optimizers, or a function that returns one: of the trained parameters, or of model and options, see
    :func:`training.optimization.optimizers.build_optimizer`; ``None``: as the options say."""
    train_step: Callable[[Any, Any], Any] | None = None
    """``train_step(model, batch)``: the loss of a batch, in a form that a model's forward may give it in; in place of
    ``loss``. Evaluations call it too, and ``metrics`` gets what it returned, and the batch."""
    lr_scheduler: Any = None
    """In place of the option ``lr_schedule``, see :class:`training.optimization.learning_rates.LearningRates`."""


class CustomTask(Task):
    """Task of a user-defined job, created by ``factory`` or by ``model_path = "module:factory"``."""

    name = "custom"

    def __init__(self, profile: Profile, factory: Callable[..., Any] | None = None) -> None:
        self.profile = profile
        self.path = profile.model.model_path
        self._factory = factory or find_factory(self.path)
        self.depends_on_rank = takes_rank(self._factory)
        self._built = False

    def prepare(self, progress: Progress) -> None:
        self.job, data, seed = self._make(), self.profile.data, self.profile.training.seed
        self.train = _first_samples(self.job.train, data.max_train_samples, seed)
        self.evaluation = {}
        if self.job.validation is not None:
            is_read = is_stream(self.job.validation)
            held = read_all(self.job.validation, seed, data.max_eval_samples) if is_read else self.job.validation
            self.evaluation["validation"] = _first_samples(held, data.max_eval_samples, seed)
        if len(self.train) == 0:
            raise BadInput("the training data set is empty", "return one with samples")
        self.code = {name: source_hash([part]) for name in _ARGUMENTS if (part := getattr(self.job, name)) is not None}
        self.code["model"] = source_hash({type(module) for module in self.job.model.modules()})

    def prepare_subset(self, progress: Progress, limit: int) -> int:
        self.prepare(progress)
        settings, unsized = self.profile.training, isinstance(self.train, Stream) and not self.train.length
        return settings.max_steps * settings.batch_size if unsized else len(self.train)

    def _make(self) -> CustomJob:
        seed_everything(self.profile.training.seed)  # the factory creates the weights: equal on every member
        if self.depends_on_rank and not self.profile.data.local_data and self.group_position.world_size > 1:
            message = f"{self.path} takes rank or world_size: its data would differ by worker"
            raise BadInput(message, "set local_data = true, or leave them out")
        return run_factory(self._factory, self.path, self.profile, self.group_position)

    @property
    def optimizer(self) -> Callable[..., Any] | None:  # type: ignore[override]  # it has no job before it is prepared
        return cast("Callable[..., Any] | None", self.job.optimizer)

    @property
    def lr_scheduler(self) -> Callable[..., Any] | None:  # type: ignore[override]  # as the optimizer
        return cast("Callable[..., Any] | None", self.job.lr_scheduler)

    def labels(self, of: Literal["label", "speaker"]) -> Sequence[str]:
        """Read labels from the samples, or classes from the data set's ``targets``, as in torchvision."""
        targets = getattr(self.train, "targets", None) if of == "label" else None
        if targets is not None and len(targets) == len(self.train):
            return [_label(target, index) for index, target in enumerate(targets)]
        look = _target_in if of == "label" else _speaker_in
        labels = []
        for index in range(len(self.train)):
            try:
                sample = self.train[index]
            except Exception:  # noqa: BLE001 - user code may raise anything; training on the sample reports it
                labels.append("")
            else:
                labels.append(_label(look(sample), index))
        return labels

    def build_model(self) -> nn.Module:
        if self._built:
            self.job = dataclasses.replace(self.job, model=self._make().model)
        self._built = True
        return cast(nn.Module, self.job.model)

    def build_stage(self, stages: StageMaker) -> nn.Module:
        if self.job.metrics is not None:
            raise BadInput("metrics of a job are not computed in stages", "leave them out, or set layout = replicate")
        batch, meta = self.collate([self.train[0]], None), torch.device("meta")
        return stages.cut(self.build_model(), lambda model: self.loss(model, move(batch, meta)))

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        """Return ``{"data": ..., "weight": ...}`` with the batch from the job's collate function."""
        data = self._collate_samples(list(samples))
        weight = float(len(samples)) if self.job.weight is None else float(self.job.weight(data))
        return {"data": data, "weight": weight}

    def _collate_samples(self, samples: list[Any]) -> Any:
        try:
            return (self.job.collate or default_collate)(samples)
        except MusterError:
            raise
        except Exception as error:  # the user's own code may raise anything
            hint = "repair it" if self.job.collate else "return samples of one shape, or a collate function for them"
            message = f"{len(samples)} samples cannot be put together to a batch: {where_it_failed(error)}"
            raise RunFailed(message, hint) from error

    def reader_copy(self) -> CustomTask:
        """Return a copy that only reads the data set and collates batches."""
        reader = copy.copy(self)
        functions = ("loss", "metrics", "optimizer", "train_step", "lr_scheduler")
        nothing = dict.fromkeys(("model", "train", "validation", *functions))
        reader.job = dataclasses.replace(self.job, **nothing)
        reader.evaluation, reader._factory = {}, CustomJob
        return reader

    def weight(self, batch: Batch) -> float:
        return float(batch["weight"])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._run(model, batch["data"])[0]

    def _run(self, model: nn.Module, data: Any) -> tuple[torch.Tensor, Any, Any]:
        """Return loss, output and target."""
        if self.job.train_step is not None:
            output = call_step(self.job.train_step, model, data)
            return loss_of(output, "train_step gave"), output, data
        if self.job.loss is None:
            output = call_model(model, data)
            return loss_of(output), output, data
        inputs, target = split_target(data)
        output = call_model(model, inputs)
        return scalar_loss(self.job.loss(output, target), "the loss function returned"), output, target

    def evaluate(self, model: nn.Module, batch: Batch, generate: bool) -> dict[str, float]:
        weight = self.weight(batch)
        loss, output, target = self._run(model, batch["data"])
        sums = {"loss_sum": float(loss) * weight, "weight": weight}
        if self.job.metrics is not None:
            means = metric_values(self.job.metrics(output, target))
            sums.update({f"metric_{name}": value * weight for name, value in means.items()})
        return sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        metrics = super().metrics(sums)
        for name, value in sums.items():
            if name.startswith("metric_") and sums.get("weight"):
                name = name.removeprefix("metric_")
                metrics[f"metrics.{name}" if name in metrics else name] = value / sums["weight"]
        return metrics

    def caption(self, sample: Any) -> str:
        try:
            return f"target {_label(_target_in(sample), 0)}"
        except BadInput:  # no target, or not an integer or a text
            return ""

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write with the model's ``save_pretrained`` if it has one, and ``model.safetensors`` unless that wrote it."""
        if hasattr(model, "save_pretrained"):
            cast(Any, model).save_pretrained(str(directory))
        if not (directory / "model.safetensors").exists():
            write_weights(model, directory / "model.safetensors")


def _first_samples(data: Any, count: int, seed: int) -> SizedDataset:
    """Return the first ``count`` samples; 0 means all. Those of a stream are the first of each pass."""
    if hasattr(data, "with_format") and _is_unformatted(data):  # lists of numbers would be collated number by number
        data = data.with_format("torch")
    if is_stream(data):
        return Stream(data, seed, count)
    return cast(SizedDataset, Subset(cast(Any, data), range(count))) if 0 < count < len(data) else data


def _is_unformatted(data: Any) -> bool:
    """Whether a data set of Hugging Face gives Python's own values."""
    kind = getattr(data, "_format_type", None) or getattr(data, "_formatting", None)
    return type(data).__module__.startswith("datasets.") and kind is None


def _target_in(sample: Any) -> Any:
    try:
        return split_target(sample)[1]
    except RunFailed as error:
        raise BadInput(str(error), "return (input, target) samples, or set split = global") from error


def _speaker_in(sample: Any) -> Any:
    for name in SPEAKER_COLUMNS:
        if isinstance(sample, Mapping) and name in sample:
            return sample[name]
        if hasattr(sample, name):
            return getattr(sample, name)
    hint = f"name it {' or '.join(SPEAKER_COLUMNS[:2])} in a mapping or an object, or set split = label"
    raise BadInput("samples do not say who speaks", hint)


def _label(value: Any, index: int) -> str:
    """Return a class label as text: it must be an integer or a string."""
    try:
        value = np.asarray(value).item()
        number = int(value) if not isinstance(value, str) else None
    except (TypeError, ValueError):
        number = value = None
    if value is None or (number is not None and number != value):
        message = f"sample {index} of the training data has no label to split by: not one whole number or a text"
        raise BadInput(message, "split = label and dirichlet need classes; set split = global")
    return str(value if number is None else number)


def run_factory(
    factory: Callable[..., Any], path: str, profile: Profile, position: GroupPosition | None = None
) -> CustomJob:
    """Call a factory with the arguments it accepts, and validate the result.

    Raises:
        BadInput: it raised, or did not return a model and data sets.
    """
    arguments = (profile,) if inspect.signature(factory).parameters.keys() - GroupPosition._fields else ()
    return _check(_as_job(call_factory(factory, path, *arguments, position=position), path), path)


def _as_job(returned: Any, path: str) -> CustomJob:
    if isinstance(returned, CustomJob):
        return returned
    names = [field.name for field in dataclasses.fields(CustomJob)]
    if isinstance(returned, tuple) and 2 <= len(returned) <= len(names):
        return CustomJob(*returned)
    if isinstance(returned, Mapping):
        unknown = [str(key) for key in returned if key not in names]
        if not unknown and {"model", "train"} <= returned.keys():
            return CustomJob(**returned)
        description = f"a mapping with {', '.join(map(str, returned))}"
    else:
        description = type(returned).__name__
    raise BadInput(f"{path} returned {description}", f"return a CustomJob, or a tuple or mapping of {', '.join(names)}")


def _check(job: CustomJob, path: str) -> CustomJob:
    if not isinstance(job.model, nn.Module):
        raise BadInput(f"{path}: the model is {type(job.model).__name__}, not a torch nn.Module", "return one")
    for name in ("train", "validation"):
        data = getattr(job, name)
        if data is not None or name == "train":
            check_data(data, f"{path}: {name}")
    check_functions(job, path or "the trainer")
    return job


_ARGUMENTS = {
    "loss": ("output", "target"), "metrics": ("output", "target"), "collate": ("samples",), "weight": ("batch",),
    "train_step": ("model", "batch"), "optimizer": (), "lr_scheduler": (),
}  # fmt: skip
"""What the functions of a job are called with; empty: it depends on the function."""
_INSTEAD = {
    "optimizer": "give its class, as torch.optim.AdamW, or a function of the trained parameters that returns it",
    "lr_scheduler": "give a function of an optimizer that returns it: functools.partial(StepLR, step_size=30)",
}


def check_functions(job: CustomJob, title: str, by_name: bool = False) -> None:
    """Reject functions that cannot be called as they will be, and a job that computes its loss in two ways.

    Args:
        by_name: whether texts name functions.

    Raises:
        BadInput: there is one.
    """
    if job.loss is not None and job.train_step is not None:
        raise BadInput(f"{title} has loss and train_step, which both compute the loss", "leave one of them out")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(job, name)
        if function is None or (by_name and isinstance(function, str)):
            continue
        if not callable(function):
            hint = _INSTEAD.get(name, "give a function or None")
            raise BadInput(f"{title}: {name} is {type(function).__name__}, not a function", hint)
        if arguments and not _takes(function, len(arguments)):
            call = f"{name}({', '.join(arguments)})"
            raise BadInput(f"{title}: {name} is called as {call}, and takes other arguments", f"define it as {call}")


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function takes so many positional arguments; true if its signature is unknown."""
    try:
        return bool(inspect.signature(function).bind(*range(count)))
    except TypeError:
        return False
    except ValueError:
        return True


def check_data(data: Any, title: str) -> None:
    """Reject what is no data set: neither map-style nor an iterable that can begin anew.

    Raises:
        BadInput: the hint says what to pass instead.
    """
    if isinstance(data, DataLoader):
        hint = "give its data set (loader.dataset), and its batch size and collate function as options of the run"
        raise BadInput(f"{title} is a DataLoader, and every machine makes batches of its own", hint)
    if isinstance(data, Mapping):
        raise BadInput(f"{title} is {type(data).__name__} of {', '.join(map(str, data))}", "give one of them")
    if hasattr(data, "__next__"):
        hint = "give an object whose __iter__ begins anew, as a class with def __iter__(self)"
        raise BadInput(f"{title} is {type(data).__name__}, which gives its samples only once", hint)
    if not is_stream(data) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        message = f"{title} is {type(data).__name__}, without __len__ and __getitem__"
        raise BadInput(message, "give a data set, or a function that returns one")
