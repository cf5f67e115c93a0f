"""What a job may contain that trains on a machine which is lent for tasks alone: data and weights, and no code.

Both sides ask: who starts a run, before anything is sent, and the machine, which refuses by itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from distributed.preparation.code_sync import CODE_FOLDERS, Inputs, collect
from distributed.preparation.members import plan_run
from distributed.preparation.preflight import NotReady, Ready
from distributed.preparation.transfer import ask_missing
from distributed.ssh.errors import SshError
from profiles.errors import MusterError
from profiles.installation import DISTRIBUTION, plugins
from profiles.schema import Profile
from training.records.plan import RunPlan
from training.strategies.user_strategy import as_user_code
from training.tasks.registry import ENTRY_POINTS, load

FILES = frozenset(
    (
        *(".safetensors", ".json", ".jsonl", ".txt", ".csv", ".tsv", ".parquet", ".model", ".tiktoken", ".jinja"),
        *(".md", ".srt", ".vtt", ".trs", ".stm", ".textgrid", ".tg", ".xml", ".gz"),
        *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".aiff", ".aif", ".mp4", ".webm", ".wma", ".mkv"),
    )
)
"""Suffixes of data and weights; others may be read as programs, or hold pickles."""
_OUTSIDE = re.compile(r"^(/|~|\\|[A-Za-z]:[\\/])|(^|[\\/])\.\.([\\/]|$)|\.pyc?(:|$)|\0")
"""Texts that lead out of the folder of a run, or to Python code."""


HINT = "there, its owner can lend more: muster machines join --lend friend (programs of yours, in a box), or own"


def lending_problem(inputs: Inputs, missing: Collection[str]) -> str:
    """Return why a machine that is lent for tasks alone does not run a job; empty: it does.

    Args:
        missing: names of the trees that are not there. Muster's own code counts as there where its version is that of
            this computer.
    """
    problems = [plan_problem(inputs.plan)]
    for folder, tree in inputs.trees.items():
        if folder == CODE_FOLDERS[0]:
            differs = "its Muster has another version than this computer's, and takes none from here"
            problems.append(differs if tree.name in missing else "")
        else:
            problems.append("code of your own" if folder in CODE_FOLDERS else tree_problem(tree.files))
    return next(filter(None, problems), "")


def require_permitted(machines: Sequence[Ready], profile: Profile) -> None:
    """Check that the machines that are lent for tasks alone run a job, before anything is measured or sent.

    Raises:
        NotReady: some do not; one error each.
        SshError: one cannot be asked.
        BadInput: the job's files cannot be read.
    """
    lent = [link for link, _ in machines if link.runs_own_program]
    if not lent:
        return
    inputs, problems = collect(plan_run(profile, machines)), list[MusterError]()
    for link in lent:
        missing = ask_missing(link, [tree.name for tree in inputs.trees.values()], [])
        if problem := lending_problem(inputs, missing.trees):
            problems.append(SshError(link.name, f"it is lent for tasks alone: {problem}", HINT))
    if problems:
        raise NotReady(problems)


def tree_problem(files: Iterable[str]) -> str:
    """Return why files cannot be sent, by their relative paths; empty: all are data and weights."""
    for path in files:
        name = path.rpartition("/")[2].lower()
        suffix = name[name.rfind(".") :] if "." in name else ""
        if _OUTSIDE.search(path) or name.startswith(".") or suffix not in FILES:
            return f"{path!r:.120} may be code: only data and weights arrive there (safetensors, JSON, tables, sound)"
    return ""


def plan_problem(plan: RunPlan) -> str:
    """Return why a plan needs more than built-in tasks with data and weights; empty: it does not."""
    if plan.launch is not None or plan.clock is not None:
        return "the run starts a script"
    profile = plan.profile
    load()
    if profile.model.trait == "own code":
        return f"task {profile.model.task} is code of your own"
    if profile.model.trait not in ("speech", "texts"):
        return f"task {profile.model.task} is none of those that are trained there: Whisper, and language models"
    for point in plugins(ENTRY_POINTS):
        if point.name == profile.model.task and point.dist is not None and point.dist.name != DISTRIBUTION:
            return f"task {profile.model.task} is code of the package {point.dist.name}"
    if profile.training.user_optimizer:
        return "the optimizer is code of your own"
    if profile.strategy.user_code or as_user_code(profile.strategy).user_strategy:
        return "the strategy has code of your own"
    if profile.data.local_data or any(member.data for member in plan.all_members):
        return "the data are files of that machine (local_data)"
    used = without_starter(plan).model_dump(mode="json", exclude={"members", "added"})
    for name, text in _texts(used, ""):
        if _OUTSIDE.search(text):
            return f"{name} = {text!r:.80} leads out of the folder of the run"
    return ""


def without_starter(plan: RunPlan) -> RunPlan:
    """Return a plan without the files of the computer that starts its run, which no member uses."""
    run = plan.profile.run.model_copy(update={"output_dir": "", "hosts": "", "cluster": ""})
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"run": run})})


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield all texts of a document with the name of their field."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, name)
