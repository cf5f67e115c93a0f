"""Class ``tasks``: which requests this computer carries out with its own Muster, and in what form.

Nothing executable arrives. What starts is chosen here: a request names one of a few programs of this computer's own
Muster, and everything of it that could be code, or lead to code, is refused or replaced. Commands and programs are
refused before this is asked (:mod:`distributed.joining.lending.commands`). What is admitted runs in the box all the
same.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from distributed.agent import requests
from distributed.agent.requests import MachineRequest, PutFiles, Start
from distributed.checks.lending import plan_problem, tree_problem, without_starter
from distributed.preparation.code_sync import CODE_FOLDERS
from distributed.workers.agent_records import encoded
from training.records.bounded_fields import first_problem
from training.records.plan import RunPlan
from training.run.processes import PROCESS_DEFAULTS

PROGRAMS = ("training.workers.worker", "training.trial.short_run_start")
"""What may be started: a member of a run, and the short run that measures one."""
LONGEST_REQUEST = 64 << 20
_ANSWERED = frozenset(
    (
        *("ProbeMachine", "ReadHealth", "Listen", "Reach", "InspectData"),
        *("ListAddresses", "ListenForPeers", "MeasureLink", "MeasureTogether", "StopListening"),
        *("ListMissing", "PutFiles", "GetFiles", "Start", "Attach"),
        *("ListRemains", "ListSnapshots", "RemoveRun", "Forget"),
    )
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")
_HASH = re.compile(r"[0-9a-f]{64}")
_INPUT = re.compile(r"inputs/[a-z_]{1,40}")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_REPLACED = ("PYTHONPATH", "TOKENIZERS_PARALLELISM", "MUSTER_PROGRAM")
_MOST_THREADS, _LONGEST_LEASE = 4096, 7 * 24 * 3600.0


class Refused(Exception):
    """Why a request is not carried out here."""


class Admission:
    """Decides on the requests of a pool.

    Args:
        root: Muster's folder in the box.
        code: folder with this computer's own packages.
    """

    def __init__(self, root: PurePosixPath, code: str) -> None:
        self.root = root
        self.environment = {
            "PYTHONPATH": code,
            "PYTHONSAFEPATH": "1",  # no module is taken from the folder of a run
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        """Variables of the program that carries requests out, and of what it starts."""
        self._checks: Mapping[str, Callable[[Any], MachineRequest]] = {"PutFiles": self._files, "Start": self._start}

    def admit(self, read: Callable[[int], bytes]) -> MachineRequest:
        """Read a request, and return it as it is carried out here.

        Args:
            read: returns at most this many bytes of the input.

        Raises:
            Refused: it is not carried out.
            EOFError: the input ended.
        """
        left = LONGEST_REQUEST

        def bounded(size: int) -> bytes:
            nonlocal left
            left -= size
            if left < 0:
                raise ValueError("it is too long")
            return read(size)

        try:
            request = requests.read_request(bounded)
            name = type(request).__name__
            if name not in _ANSWERED:
                raise Refused(f"{name} brings or builds programs")
            self._check_names(request)
            return self._checks[name](request) if name in self._checks else request
        except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            raise Refused(f"a request that cannot be read ({error})") from None

    def _check_names(self, request: MachineRequest) -> None:
        """Check the fields that become paths or modules, whichever request has them."""
        fields = vars(request)
        for field in ("run", "rank", "name"):
            if field in fields and not _NAME.fullmatch(fields[field]):
                raise Refused(f"{field} {fields[field]!r:.80} is no name")
        for module in fields.get("modules", ()):
            if not _MODULE.fullmatch(module):
                raise Refused(f"{module!r:.80} is no package")

    def _files(self, request: PutFiles) -> PutFiles:
        for name, files in request.trees.items():
            if not _HASH.fullmatch(name):
                raise Refused(f"{name!r:.80} is no folder of files")
            if problem := tree_problem(files):
                raise Refused(problem)
        return request

    def _start(self, request: Start) -> Start:
        """Return the request with this computer's own program, code and variables."""
        return replace(
            request,
            argv=self._program(request),
            env={"PYTHONPATH": self.environment["PYTHONPATH"], **_threads(request.env)},
            defaults=PROCESS_DEFAULTS,
            files={"plan.json": encoded(_checked_plan(request.files).model_dump_json().encode())},
            links=self._links(request.links),
            lease=_seconds(request.lease),
            grace=_seconds(request.grace),
            unattended={"stop": "stop", "train": "train"}[request.unattended],
        )

    def _program(self, request: Start) -> Sequence[str]:
        options = ["--plan", "plan.json", "--rank", request.rank, "--run-dir", "{folder}", "--secrets", "secrets"]
        python, flag, module, *arguments = request.argv
        if (python, flag) != ("{python}", "-m") or module not in PROGRAMS or arguments != options:
            raise Refused(f"{' '.join(request.argv)!r:.120} is no member of a run")
        return [python, flag, module, *options]

    def _links(self, links: Mapping[str, str]) -> dict[str, str]:
        """Return the folders of data and weights; this computer's own code takes the place of what was sent."""
        kept = {}
        for name, target in links.items():
            folder, _, tree = target.rpartition("/")
            is_tree = _INPUT.fullmatch(name) and folder == f"{self.root}/trees" and _HASH.fullmatch(tree)
            if not is_tree or (name in CODE_FOLDERS and name != CODE_FOLDERS[0]):
                raise Refused(f"{name!r:.80} leads to {target!r:.120}")
            if name != CODE_FOLDERS[0]:
                kept[name] = target
        return kept


def _checked_plan(files: Mapping[str, str]) -> RunPlan:
    """Return the plan among the files of a member; it is the only one."""
    if set(files) != {"plan.json"}:
        raise Refused(f"files besides the plan: {', '.join(sorted(map(str, files)))[:200]}")
    try:
        plan = RunPlan.model_validate_json(base64.b64decode(files["plan.json"], validate=True))
    except ValidationError as error:
        raise Refused(f"a plan that its Muster does not know ({first_problem(error)})") from None
    if problem := plan_problem(plan):
        raise Refused(problem)
    return without_starter(plan)


def _threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a member may choose: its threads."""
    others = set(environment) - {*_THREADS, *_REPLACED}
    numbers = {name: int(environment[name]) for name in _THREADS if name in environment}
    if others or not all(0 < number <= _MOST_THREADS for number in numbers.values()):
        raise Refused(f"variables of others: {', '.join(sorted(others or numbers))[:200]}")
    return {name: str(number) for name, number in numbers.items()}


def _seconds(value: float) -> float:
    seconds = float(value)
    if not 0 <= seconds <= _LONGEST_LEASE:
        raise Refused(f"{value!r:.40} seconds")
    return seconds
