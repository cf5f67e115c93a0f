"""Serialise a job's objects to files: how a script's model, data sets and functions reach other processes, unpickled.

Functions and classes are sent by name (``module:name``), weights and samples as safetensors, everything else as JSON::

    job.json            the parts, and the SHA-256 of every other file
    model.safetensors   weights of a model that its class rebuilds; or model/, a Hugging Face folder
    train.safetensors   samples of a data set, see :mod:`training.tasks.sample_file`; with train.json
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from profiles.errors import BadInput
from profiles.schema import Profile
from training.numerics.randomness import seed_everything
from training.records.run_files import sha256
from training.tasks.base import GroupPosition
from training.tasks.custom import CustomJob, check_data, check_functions
from training.tasks.outputs.weights_file import read_weights, write_weights
from training.tasks.own_code.streams import Sampled, is_stream
from training.tasks.sample_file import SampleFile, write_samples
from training.tasks.user_code import call_factory, find_factory, importable_name, takes_rank

INDEX = "job.json"
VERSION = 2
_FUNCTIONS = ("loss", "collate", "weight", "metrics", "optimizer", "train_step", "lr_scheduler")
"""Parts that are sent by name."""
_FACTORY_HINT = "give model as a function (or module:name) that takes nothing and returns it"
_PLAIN = (
    bool, int, float, complex, str, bytes, set, frozenset, type(None), type, torch.dtype, torch.Size, torch.device,
)  # fmt: skip
_BOOKKEEPING = frozenset(vars(nn.Module())) | {"name_or_path"}
_DEPTH = 4


def check_given(job: CustomJob) -> None:
    """Reject unusable data sets and functions, and a loss that is given twice; data created by functions are checked
    afterwards.

    Raises:
        BadInput: see :func:`training.tasks.custom.check_data` and :func:`training.tasks.custom.check_functions`.
    """
    check_functions(job, "the trainer", by_name=True)
    for data, title in ((job.train, "train_dataset"), (job.validation, "val_dataset")):
        if not _is_maker(data) and (data is not None or title == "train_dataset"):
            check_data(data, title)


def parts_of_loader(loader: DataLoader[Any], title: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return data set, collate function (``None``: torch's own) and options of a ``DataLoader``, whose batches every
    machine makes anew.

    Raises:
        BadInput: it draws samples in a way that cannot be kept.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    data: Any = loader.dataset
    if type(batches) is not BatchSampler or isinstance(sampler, DistributedSampler):
        kind = "makes no batches" if batches is None else f"draws its batches by {type(batches).__name__}"
        if isinstance(sampler, DistributedSampler):
            kind = "divides its samples by DistributedSampler"
        reason = f"{title} {kind}, and here every machine makes batches of its own part of all samples"
        raise BadInput(reason, "give its data set, or train in a loop of your own: muster.session()")
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    is_whole = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(data)
    if not (isinstance(data, IterableDataset) or type(sampler) is SequentialSampler or is_whole):
        data = Sampled(data, sampler)
    return data, collate, {"batch_size": loader.batch_size, "drop_last": loader.drop_last}


def depends_on_rank(job: CustomJob) -> bool:
    """Whether a data set is created by a function that takes ``rank`` or ``world_size``.

    Raises:
        BadInput: a function is not found.
    """
    return any(_is_maker(data) and takes_rank(_resolve(data, "data set")) for data in (job.train, job.validation))


def instantiate(job: CustomJob, seed: int, position: GroupPosition | None = None) -> CustomJob:
    """Replace functions by the objects they create. Each is called with a fresh seed, independent of the others.

    Args:
        position: rank and world size passed to functions that take them.

    Raises:
        BadInput: a function is not found, fails, or returns something unsuitable.
    """
    return CustomJob(
        make_model(job.model, seed),
        _make_data(job.train, "train_dataset", seed, position),
        None if job.validation is None else _make_data(job.validation, "val_dataset", seed, position),
        _resolve(job.loss, "loss"),
        collate=_resolve(job.collate, "collate"),
        weight=_resolve(job.weight, "weight"),
        metrics=_resolve(job.metrics, "metrics"),
        optimizer=_resolve(job.optimizer, "optimizer"),
        train_step=_resolve(job.train_step, "train_step"),
        lr_scheduler=_resolve(job.lr_scheduler, "lr_scheduler"),
    )


def _resolve(reference: Any, title: str) -> Any:
    return find_factory(reference, title) if isinstance(reference, str) else reference


def make_model(model: nn.Module | Callable[[], nn.Module] | str, seed: int) -> nn.Module:
    """Return the model, created from the seed if it is given as a function or its name.

    Raises:
        BadInput: the function is not found, fails, or returns no model.
    """
    if isinstance(model, nn.Module):
        return model
    returned = _call(model, "model", seed)
    if not isinstance(returned, nn.Module):
        raise BadInput(
            f"model: {_title(model)} returned {type(returned).__name__}, not a torch nn.Module", "return one"
        )
    return returned


def _make_data(data: Any, title: str, seed: int, position: GroupPosition | None = None) -> Any:
    dataset = _call(data, title, seed, position) if _is_maker(data) else data
    check_data(dataset, title)
    return dataset


def _is_maker(data: Any) -> bool:
    return isinstance(data, (str, type)) or (
        callable(data) and not hasattr(data, "__getitem__") and not is_stream(data)
    )


def _call(maker: Callable[..., Any] | str, title: str, seed: int, position: GroupPosition | None = None) -> Any:
    function = _resolve(maker, title)
    if not callable(function):
        raise BadInput(
            f"{title} is {type(function).__name__}", "give it itself, a function that returns it, or its name"
        )
    needed = [name for name in _required_parameters(function) if position is None or name not in GroupPosition._fields]
    if needed:
        raise BadInput(f"{title}: {_title(maker)} needs {', '.join(needed)}", "give a function that takes nothing")
    seed_everything(seed)
    return call_factory(function, f"{title}: {_title(maker)}", position=position)


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def _title(factory: Any) -> str:
    return factory if isinstance(factory, str) else getattr(factory, "__qualname__", type(factory).__name__)


def check_names(job: CustomJob) -> dict[str, str]:
    """Return the ``module:name`` of every part that is sent by name, without side effects.

    An ``nn.Module`` is named by its class; a data set that is an object has no entry.

    Raises:
        BadInput: a part cannot be named, or its module has no such name.
    """
    model = type(job.model) if isinstance(job.model, nn.Module) else job.model
    named = {"model": model} | {name: getattr(job, name) for name in _FUNCTIONS}
    for title, data in (("train_dataset", job.train), ("val_dataset", job.validation)):
        named[title] = data if _is_maker(data) else None
    return {title: _importable_name(reference, title) for title, reference in named.items() if reference is not None}


def _importable_name(reference: Any, title: str) -> str:
    if not isinstance(reference, str):
        return importable_name(reference, title)
    find_factory(reference, title)
    module, _, name = reference.rpartition(":")
    return f"{Path(module).stem}:{name}" if module.endswith(".py") else reference


def write_job(job: CustomJob, folder: Path) -> None:
    """Write the parts into an empty folder.

    Raises:
        BadInput: a part cannot be sent; the message names it and what to do.
        OSError: a file cannot be written.
    """
    names = check_names(job)
    functions = {name: names.get(name) for name in _FUNCTIONS}
    document: dict[str, Any] = {"version": VERSION, **functions}
    document["model"] = _write_model(job.model, names["model"], folder)
    for split, data in (("train", job.train), ("validation", job.validation)):
        title = "val_dataset" if split == "validation" else "train_dataset"
        if data is None or title in names:
            document[split] = names.get(title)
        elif is_stream(data):
            hint = "give a module-level function that returns it, which every machine calls"
            raise BadInput(f"{title} gives its samples one after the other, and is not sent to machines", hint)
        else:
            write_samples(_make_data(data, title, 0), folder / f"{split}.safetensors", title)
            document[split] = {"samples": f"{split}.safetensors"}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    document["files"] = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    (folder / INDEX).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _write_model(model: Any, name: str, folder: Path) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        return {"factory": name}
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    document = {"class": name, "frozen": frozen}
    if hasattr(model, "save_pretrained") and hasattr(type(model), "from_pretrained"):
        cast(Any, model).save_pretrained(str(folder / "model"))
        document["pretrained"] = "model"
    else:
        needed = _required_parameters(type(model))
        if needed:
            message = f"the class of the model, {type(model).__name__}, needs {', '.join(needed)}"
            raise BadInput(f"{message}: no other machine can build it again", _FACTORY_HINT)
        document["weights"] = "model.safetensors"
        write_weights(model, folder / "model.safetensors")
    # a model that was built with other arguments, or modified afterwards, differs from what its class rebuilds
    mismatch = first_difference(model, _read_model(document, folder), objects=not hasattr(model, "save_pretrained"))
    if mismatch:
        message = f"{type(model).__name__} does not build this model again on other machines: {mismatch}"
        raise BadInput(message, _FACTORY_HINT)
    return document


def build(profile: Profile) -> CustomJob:
    """Create the job in ``profile.data.dataset_path``, see :func:`read_job`; the factory of such custom tasks."""
    return instantiate(read_job(Path(profile.data.dataset_path)), profile.training.seed)


def read_job(folder: Path) -> CustomJob:
    """Read a job written by :func:`write_job`; nothing is unpickled.

    Raises:
        BadInput: a file is missing or has been modified, or a class or function cannot be imported.
    """
    try:
        document = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if document["version"] != VERSION:
            raise BadInput(f"{folder / INDEX}: version {document['version']} of the job", "start the run again")
        for name, expected_hash in document["files"].items():
            if sha256(folder / name) != expected_hash:
                raise BadInput(f"{folder / name}: not the file that was sent", "remove it and start the run again")
        datasets = (document["train"], document["validation"])
        train, validation = (
            SampleFile(folder / dataset["samples"]) if isinstance(dataset, dict) else dataset for dataset in datasets
        )
        functions = {name: document.get(name) for name in _FUNCTIONS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{folder}: not the files of a job ({error})", "start the run again") from None
    return CustomJob(_read_model(document["model"], folder), train, validation, **functions)


def _read_model(document: Mapping[str, Any], folder: Path) -> Any:
    if "factory" in document:
        return document["factory"]
    kind: Any = find_factory(document["class"])
    if "pretrained" in document:
        model = kind.from_pretrained(str(folder / document["pretrained"]))
    else:
        model = call_factory(kind, document["class"])
        load_weights(model, folder / document["weights"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in document["frozen"])
    return model


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into a model.

    Raises:
        BadInput: names or shapes do not fit.
    """
    try:
        read_weights(model, path)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise BadInput(f"{type(model).__name__} does not build this model again: {text:.300}", _FACTORY_HINT) from None


def load_result(model: nn.Module, folder: Path) -> None:
    """Load the weights of a run's saved model in ``folder`` into ``model``.

    Raises:
        BadInput: they do not fit.
    """
    if (folder / "config.json").is_file() and hasattr(type(model), "from_pretrained"):
        trained = cast(Any, type(model)).from_pretrained(str(folder))
        model.load_state_dict(trained.state_dict())
    else:
        load_weights(model, folder / "model.safetensors")


def first_difference(model: nn.Module, rebuilt: nn.Module, objects: bool) -> str:
    """Describe the first difference in structure, types, settings or values; empty if there is none.

    Args:
        objects: compare settings that are objects by their attributes, not only by type.
    """
    ours, theirs = (dict(m.named_modules()) for m in (model, rebuilt))
    if ours.keys() != theirs.keys():
        return f"its part {min(ours.keys() ^ theirs.keys())!r} is in one of the two only"
    for name, module in ours.items():
        if type(module) is not type(theirs[name]):
            return f"{name or 'model'} is {type(module).__name__}, and then {type(theirs[name]).__name__}"
        mismatch = _setting_difference(vars(module), vars(theirs[name]), objects, 0)
        if mismatch:
            return f"{name}.{mismatch}".lstrip(".")
    return _tensor_difference(model, rebuilt)


def _tensor_difference(model: nn.Module, rebuilt: nn.Module) -> str:
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(rebuilt, kind)())
        for name, value in getattr(model, kind)():
            rebuilt_value = theirs.pop(name, None)
            if rebuilt_value is None or value.dtype != rebuilt_value.dtype or value.shape != rebuilt_value.shape:
                return f"{name} has another shape or type"
            if not torch.equal(value.detach().cpu(), rebuilt_value.detach().cpu()) and not bool(value.isnan().any()):
                return f"{name} has other values"
        if theirs:
            return f"{min(theirs)} is in one of the two only"
    return ""


def _setting_difference(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], objects: bool, depth: int) -> str:
    for name in dict.fromkeys([*ours, *theirs]):
        if name in _BOOKKEEPING or (not objects and str(name).startswith("_")):
            continue
        if not _equal(ours.get(name, _equal), theirs.get(name, _equal), objects, depth):
            return f"{name} is {_short(ours.get(name))}, and then {_short(theirs.get(name))}"
    return ""


def _equal(left: Any, right: Any, objects: bool, depth: int) -> bool:
    """Whether two settings are equal; opaque objects are compared by type."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left.detach().cpu(), right.detach().cpu())
    if isinstance(left, _PLAIN):
        return bool(left == right) or (left != left and right != right)
    if inspect.isroutine(left):
        return getattr(left, "__qualname__", "") == getattr(right, "__qualname__", "")
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_equal(a, b, objects, depth) for a, b in zip(left, right))
    if not objects or depth > _DEPTH or isinstance(left, nn.Module):
        return True
    inside = [value if isinstance(value, Mapping) else getattr(value, "__dict__", {}) for value in (left, right)]
    return not _setting_difference(inside[0], inside[1], objects, depth + 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
