"""A stranger in the room sends code to a machine that is lent for tasks alone, by every way that a request has."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest

from distributed.agent.requests import (
    Attach,
    BuildEnvironment,
    GetFiles,
    MachineRequest,
    ProbeMachine,
    PutFiles,
    Start,
    frame,
)
from distributed.checks.lending import plan_problem, tree_problem, without_starter
from distributed.joining.lending.admission import LONGEST_REQUEST, Admission, Refused
from distributed.workers.agent_records import AgentTimeouts, assigned, start_request
from profiles.files.resolve import profile_from_options
from training.records.launched_script import LaunchedScript
from training.records.plan import RunPlan
from training.run.local_plan import plan_local_run

ROOT = "/home/lent/.cache/muster"
TREE = f"trees/{'a' * 64}"
ADMISSION = Admission(PurePosixPath(ROOT), "/opt/muster")


def admitted(request: MachineRequest) -> MachineRequest:
    data = iter(frame(request))
    return ADMISSION.admit(lambda size: bytes(byte for _, byte in zip(range(size), data)))


def text_plan(**model: Any) -> RunPlan:
    """Return the plan of one member with a built-in task, changed in the settings of its model."""
    plan = plan_local_run(profile_from_options("p", {"task": "causal_lm"}), 1, on_this_machine=False)
    profile = plan.profile
    updates = {
        "model": profile.model.model_copy(update={"model_path": "inputs/model", **model}),
        "data": profile.data.model_copy(update={"dataset_path": "inputs/dataset/a.txt"}),
    }
    return plan.model_copy(update={"profile": profile.model_copy(update=updates)})


def start(plan: RunPlan | None = None, **changes: Any) -> Start:
    links = {"inputs/code": TREE, "inputs/model": TREE, "inputs/dataset": TREE}
    request = start_request(assigned(plan or text_plan(), links, 0, 1), AgentTimeouts(), ROOT)
    return replace(request, **changes)


def refusal(request: MachineRequest) -> str:
    with pytest.raises(Refused) as refused:
        admitted(request)
    return str(refused.value)


def test_a_member_of_a_run_starts_with_the_machines_own_code() -> None:
    plan = text_plan()
    request = admitted(start(plan, env={"PYTHONPATH": "/tmp/theirs", "OMP_NUM_THREADS": "2"}))
    assert isinstance(request, Start)
    assert dict(request.env) == {"PYTHONPATH": "/opt/muster", "OMP_NUM_THREADS": "2"}
    assert set(request.links) == {"inputs/model", "inputs/dataset"}
    assert RunPlan.model_validate_json(base64.b64decode(request.files["plan.json"])) == without_starter(plan)


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ["{python}", "-c", "print(1)"]},
        {"argv": ["/bin/sh", "-m", "training.workers.worker"]},
        {"argv": ["{python}", "-m", "training.workers.api_worker", "--plan", "plan.json"]},
        {"argv": [*start().argv, "--secrets", "inputs/model"]},
        {
            "argv": [
                "{python}",
                "-m",
                "training.exchange.group.coordinator_main",
                "--config",
                "secrets/coordinator.json",
            ]
        },
        {"env": {"LD_PRELOAD": "inputs/dataset/x.so"}},
        {"env": {"PYTHONSTARTUP": "x"}},
        {"env": {"OMP_NUM_THREADS": "1; rm -rf ~"}},
        {"links": {"inputs/user": f"{ROOT}/{TREE}"}},
        {"links": {"inputs/strategy": f"{ROOT}/{TREE}"}},
        {"links": {"inputs/model": "/home/ada"}},
        {"links": {"inputs/model": f"{ROOT}/trees/../../.."}},
        {"links": {"../../outside": f"{ROOT}/{TREE}"}},
        {"links": {"torch": f"{ROOT}/{TREE}"}},
        {"rank": "../0"},
        {"run": ".."},
        {"run": 7},
        {"lease": 1e12},
        {"unattended": "serve"},
        {"files": {}},
    ],
    ids=str,
)
def test_what_would_start_something_else_is_refused(changes: dict[str, Any]) -> None:
    assert refusal(start(**changes))


def test_no_file_besides_the_plan_comes_with_a_start() -> None:
    assert "sitecustomize.py" in refusal(start(files={**start().files, "sitecustomize.py": ""}))


@pytest.mark.parametrize(
    "path",
    [
        "model.py", "pytorch_model.bin", "optimizer.pt", "data.pkl", "weights.pth", "x.so", "x.dylib", "a.npy", "a.pyc",
        "../model.safetensors", "/etc/cron.d/a.txt", "sub/../../x.json", ".bashrc", "Makefile", "x.JSON/run.PY",
        "tokenizer.json\0.py",
    ],
)  # fmt: skip
def test_files_that_may_be_code_are_refused(path: str) -> None:
    assert tree_problem([path])
    assert "may be code" in refusal(PutFiles({"a" * 64: {path: "b" * 64}}, {}))


def test_data_and_weights_arrive() -> None:
    files = ("model.safetensors", "config.json", "tokenizer.json", "merges.txt", "train.csv", "clips/1.FLAC")
    request = PutFiles({"a" * 64: dict.fromkeys(files, "b" * 64)}, {})
    assert admitted(request) == request


def test_a_tree_is_named_by_its_hash() -> None:
    assert "no folder" in refusal(PutFiles({"../../bin": {"a.txt": "b" * 64}}, {}))


@pytest.mark.parametrize(
    "plan",
    [
        text_plan(task="custom", model_path="inputs/user/job.py:build"),
        text_plan(model_path="/home/ada/model"),
        text_plan(model_path="~/model"),
        text_plan(model_path="inputs/../../../model"),
        text_plan().model_copy(update={"launch": LaunchedScript(folder="inputs/user", script="x.py")}),
    ],
    ids=["custom", "absolute", "home", "parent", "launch"],
)
def test_plans_that_need_code_or_files_of_the_owner_are_refused(plan: RunPlan) -> None:
    assert plan_problem(plan)
    assert refusal(start(plan))


def test_files_of_the_starter_are_left_out() -> None:
    profile = text_plan().profile
    run = profile.run.model_copy(update={"hosts": "/home/ada/hosts.json", "output_dir": "/srv/runs"})
    plan = text_plan().model_copy(update={"profile": profile.model_copy(update={"run": run})})
    request = admitted(start(plan))
    assert isinstance(request, Start)
    document = base64.b64decode(request.files["plan.json"])
    assert b"/home/ada" not in document and b"/srv" not in document


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("training", {"optimizer": "inputs/optimizer/mine.py:Mine"}),
        ("strategy", {"strategy": "inputs/strategy/mine.py:Mine"}),
        ("data", {"local_data": True, "dataset_path": "Documents"}),
    ],
)
def test_code_in_an_option_is_refused(section: str, values: dict[str, Any]) -> None:
    profile = text_plan().profile
    changed = getattr(profile, section).model_copy(update=values)
    plan = text_plan().model_copy(update={"profile": profile.model_copy(update={section: changed})})
    assert plan_problem(plan)


def test_a_member_with_data_of_its_machine_is_refused() -> None:
    plan = text_plan()
    (member,) = plan.members
    plan = plan.model_copy(update={"members": (member.model_copy(update={"data": "/home/ada/letters"}),)})
    assert "local_data" in refusal(start(plan))


def test_environments_are_not_built() -> None:
    assert "builds programs" in refusal(BuildEnvironment("x", ["torch"], "", "", "", ""))


@pytest.mark.parametrize("request_", [GetFiles("run", "0", "../../.ssh"), Attach("run", "..", 0, 1.0)])
def test_names_lead_nowhere_else(request_: MachineRequest) -> None:
    assert "is no name" in refusal(request_)


def test_a_package_is_asked_for_by_its_name() -> None:
    assert "is no package" in refusal(ProbeMachine(["os;import x"]))
    assert admitted(ProbeMachine(["torch"])) == ProbeMachine(["torch"])


@pytest.mark.parametrize(
    "data",
    [b"99999999999\n", b"x\n", b"2\n{}", b"4\nnull", b"%d\n" % (LONGEST_REQUEST + 1), b'20\n["Nothing", {"a": 1}]'],
    ids=repr,
)
def test_garbage_and_floods_are_refused(data: bytes) -> None:
    def source() -> Iterator[int]:
        yield from data
        while True:
            yield 0

    endless = source()
    with pytest.raises(Refused):
        ADMISSION.admit(lambda size: bytes(next(endless) for _ in range(min(size, 1 << 10))))


def test_no_module_is_taken_from_the_folder_of_a_run() -> None:
    assert ADMISSION.environment["PYTHONSAFEPATH"] == "1" and ADMISSION.environment["HF_HUB_OFFLINE"] == "1"


def test_a_plan_with_two_meanings_is_written_anew() -> None:
    document = text_plan().model_dump_json()
    doubled = document[:-1] + ', "launch": null}'
    request = admitted(start(files={"plan.json": base64.b64encode(doubled.encode()).decode()}))
    assert isinstance(request, Start)
    assert base64.b64decode(request.files["plan.json"]).count(b'"launch"') == 1
    assert json.loads(base64.b64decode(request.files["plan.json"]))["launch"] is None
