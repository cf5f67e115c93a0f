"""A job of objects as files: how model, data sets and functions of a script reach other processes without pickle.

Functions and classes travel by name (``module:name``), weights and samples as safetensors, all else as JSON::

    job.json            what each part is, and the SHA-256 of every other file
    model.safetensors   weights of a model that its class builds again; or model/, a Hugging Face folder
    train.safetensors   samples of a data set, see :mod:`training.tasks.sample_file`; with train.json
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import Profile
from training.randomness import seed_everything
from training.run_files import sha256
from training.tasks.base import Place
from training.tasks.custom import CustomJob, check_data
from training.tasks.sample_file import SampleFile, write_samples
from training.tasks.user_code import call_factory, find_factory, name_of, takes_place

INDEX = "job.json"
VERSION = 2
_AGAIN = "give model as a function (or module:name) that takes nothing and returns it"
_PLAIN = (
    bool, int, float, complex, str, bytes, set, frozenset, type(None), type, torch.dtype, torch.Size, torch.device,
)  # fmt: skip
_BOOKKEEPING = frozenset(vars(nn.Module())) | {"name_or_path"}
_DEPTH = 4


def check_given(job: CustomJob) -> None:
    """Refuse data sets that can never be trained on; those that functions make are looked at where they are made.

    Raises:
        BadInput: see :func:`training.tasks.custom.check_data`.
    """
    for data, what in ((job.train, "train_dataset"), (job.validation, "val_dataset")):
        if not _is_maker(data) and (data is not None or what == "train_dataset"):
            check_data(data, what)


def asks_place(job: CustomJob) -> bool:
    """Whether a data set is made by a function that takes ``rank`` or ``world_size``.

    Raises:
        BadInput: a function is not found.
    """
    return any(_is_maker(data) and takes_place(_found(data, "data set")) for data in (job.train, job.validation))


def made(job: CustomJob, seed: int, place: Place | None = None) -> CustomJob:
    """Call what is a function. Every part is made from the seed anew, so that it does not depend on the others.

    Args:
        place: the member whose data are made, where functions may ask for it.

    Raises:
        BadInput: a function is not found, fails, or gives something else.
    """
    return CustomJob(
        make_model(job.model, seed),
        _made_data(job.train, "train_dataset", seed, place),
        None if job.validation is None else _made_data(job.validation, "val_dataset", seed, place),
        _found(job.loss, "loss"),
        collate=_found(job.collate, "collate"),
    )


def _found(part: Any, what: str) -> Any:
    return find_factory(part, what) if isinstance(part, str) else part


def make_model(model: nn.Module | Callable[[], nn.Module] | str, seed: int) -> nn.Module:
    """Return the model, made from the seed where it is given as a function or its name.

    Raises:
        BadInput: the function is not found, fails, or gives no model.
    """
    if isinstance(model, nn.Module):
        return model
    made = _call(model, "model", seed)
    if not isinstance(made, nn.Module):
        raise BadInput(f"model: {_title(model)} returned {type(made).__name__}, not a torch nn.Module", "return one")
    return made


def _made_data(data: Any, what: str, seed: int, place: Place | None = None) -> Any:
    made = _call(data, what, seed, place) if _is_maker(data) else data
    check_data(made, what)
    return made


def _is_maker(data: Any) -> bool:
    return isinstance(data, (str, type)) or (callable(data) and not hasattr(data, "__getitem__"))


def _call(maker: Callable[..., Any] | str, what: str, seed: int, place: Place | None = None) -> Any:
    function = _found(maker, what)
    if not callable(function):
        raise BadInput(
            f"{what} is {type(function).__name__}", "give it itself, a function that returns it, or its name"
        )
    needed = [name for name in _needed(function) if place is None or name not in Place._fields]
    if needed:
        raise BadInput(f"{what}: {_title(maker)} needs {', '.join(needed)}", "give a function that takes nothing")
    seed_everything(seed)
    return call_factory(function, f"{what}: {_title(maker)}", place=place)


def _needed(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def _title(part: Any) -> str:
    return part if isinstance(part, str) else getattr(part, "__qualname__", type(part).__name__)


def check_names(job: CustomJob) -> dict[str, str]:
    """Return the ``module:name`` of every part that travels by name; writes and starts nothing.

    An ``nn.Module`` counts by its class; a data set that is an object has no entry.

    Raises:
        BadInput: a part cannot be named, or its module has no such name.
    """
    model = type(job.model) if isinstance(job.model, nn.Module) else job.model
    named = {"model": model, "loss": job.loss, "collate": job.collate}
    for what, data in (("train_dataset", job.train), ("val_dataset", job.validation)):
        named[what] = data if _is_maker(data) else None
    return {what: _named(part, what) for what, part in named.items() if part is not None}


def _named(part: Any, what: str) -> str:
    if not isinstance(part, str):
        return name_of(part, what)
    find_factory(part, what)
    module, _, name = part.rpartition(":")
    return f"{Path(module).stem}:{name}" if module.endswith(".py") else part


def write_job(job: CustomJob, folder: Path) -> None:
    """Write the parts into an empty folder.

    Raises:
        BadInput: a part cannot travel; the message names it and the way out.
        OSError: a file cannot be written.
    """
    names = check_names(job)
    document: dict[str, Any] = {"version": VERSION, "loss": names.get("loss"), "collate": names.get("collate")}
    document["model"] = _write_model(job.model, names["model"], folder)
    for split, data in (("train", job.train), ("validation", job.validation)):
        what = "val_dataset" if split == "validation" else "train_dataset"
        if data is None or what in names:
            document[split] = names.get(what)
        else:
            write_samples(_made_data(data, what, 0), folder / f"{split}.safetensors", what)
            document[split] = {"samples": f"{split}.safetensors"}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    document["files"] = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    (folder / INDEX).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _write_model(model: Any, name: str, folder: Path) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        return {"factory": name}
    document = {"class": name, "frozen": [own for own, p in model.named_parameters() if not p.requires_grad]}
    if hasattr(model, "save_pretrained") and hasattr(type(model), "from_pretrained"):
        cast(Any, model).save_pretrained(str(folder / "model"))
        document["pretrained"] = "model"
    else:
        needed = _needed(type(model))
        if needed:
            message = f"the class of the model, {type(model).__name__}, needs {', '.join(needed)}"
            raise BadInput(f"{message}: no other machine can build it again", _AGAIN)
        document["weights"] = "model.safetensors"
        safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    # a model that was built with other arguments, or changed afterwards, is not the one that its class gives again
    found = difference(model, _read_model(document, folder), objects=not hasattr(model, "save_pretrained"))
    if found:
        message = f"{type(model).__name__} does not build this model again on other machines: {found}"
        raise BadInput(message, _AGAIN)
    return document


def build(profile: Profile) -> CustomJob:
    """Factory of the custom task for a job in ``profile.data.dataset_path``, see :func:`read_job`."""
    return made(read_job(Path(profile.data.dataset_path)), profile.training.seed)


def read_job(folder: Path) -> CustomJob:
    """Return the parts that :func:`write_job` has written; nothing is unpickled.

    Raises:
        BadInput: a file is missing or is not what was written, or a class or function cannot be imported.
    """
    try:
        document = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if document["version"] != VERSION:
            raise BadInput(f"{folder / INDEX}: version {document['version']} of the job", "start the run again")
        for name, wanted in document["files"].items():
            if sha256(folder / name) != wanted:
                raise BadInput(f"{folder / name}: not the file that was sent", "remove it and start the run again")
        parts = (document["train"], document["validation"])
        train, validation = (SampleFile(folder / part["samples"]) if isinstance(part, dict) else part for part in parts)
        loss, collate = document["loss"], document["collate"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{folder}: not the files of a job ({error})", "start the run again") from None
    return CustomJob(_read_model(document["model"], folder), train, validation, loss, collate=collate)


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
        safetensors.torch.load_model(model, path)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise BadInput(f"{type(model).__name__} does not build this model again: {text:.300}", _AGAIN) from None


def load_result(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of the model that a run has left in ``folder``.

    Raises:
        BadInput: they do not fit.
    """
    if (folder / "config.json").is_file() and hasattr(type(model), "from_pretrained"):
        trained = cast(Any, type(model)).from_pretrained(str(folder))
        model.load_state_dict(trained.state_dict())
    else:
        load_weights(model, folder / "model.safetensors")


def difference(model: nn.Module, again: nn.Module, objects: bool) -> str:
    """Return in words the first difference in structure, types, settings or values; empty where there is none.

    Args:
        objects: look into objects that are settings too; else these count by their type.
    """
    ours, theirs = (dict(m.named_modules()) for m in (model, again))
    if ours.keys() != theirs.keys():
        return f"its part {min(ours.keys() ^ theirs.keys())!r} is in one of the two only"
    for name, module in ours.items():
        if type(module) is not type(theirs[name]):
            return f"{name or 'model'} is {type(module).__name__}, and then {type(theirs[name]).__name__}"
        found = _setting_difference(vars(module), vars(theirs[name]), objects, 0)
        if found:
            return f"{name}.{found}".lstrip(".")
    return _tensor_difference(model, again)


def _tensor_difference(model: nn.Module, again: nn.Module) -> str:
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(again, kind)())
        for name, value in getattr(model, kind)():
            other = theirs.pop(name, None)
            if other is None or value.dtype != other.dtype or value.shape != other.shape:
                return f"{name} has another shape or type"
            if not torch.equal(value.detach().cpu(), other.detach().cpu()) and not bool(value.isnan().any()):
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


def _equal(one: Any, other: Any, objects: bool, depth: int) -> bool:
    """Whether two settings are alike; what cannot be looked into counts by its type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one.detach().cpu(), other.detach().cpu())
    if isinstance(one, _PLAIN):
        return bool(one == other) or (one != one and other != other)
    if inspect.isroutine(one):
        return getattr(one, "__qualname__", "") == getattr(other, "__qualname__", "")
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b, objects, depth) for a, b in zip(one, other))
    if not objects or depth > _DEPTH or isinstance(one, nn.Module):
        return True
    inside = [value if isinstance(value, Mapping) else getattr(value, "__dict__", {}) for value in (one, other)]
    return not _setting_difference(inside[0], inside[1], objects, depth + 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
