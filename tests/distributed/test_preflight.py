"""What makes a machine unfit, from what it says of itself."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed.agent.files import load_problem, start_loading
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.planning.memory.fitting import MemoryBudget
from distributed.preparation import preflight
from distributed.preparation.dial_back import DialBack
from distributed.preparation.members import plan_run
from distributed.preparation.preflight import Facts, NotReady, Readiness, ready
from distributed.ssh.errors import SshError
from profiles.errors import BadInput, ExitCode
from profiles.files.resolve import profile_from_options
from training.tasks.inputs.model_size import BlockSize, sum_of_blocks

SOUND = Facts((3, 11, 7), "2.13.0+cpu", (), 0.1, 10**11, True, "/home/a", "Linux", 0, "eth0", "SHA256:a")


def link(name: str, **fields: Any) -> MachineLink:
    return MachineLink(Machine(name=name, **fields), lambda: HereConnection(name))


class Told(MachineLink):
    """A machine that says this of itself."""

    def __init__(self, machine: Machine, facts: Facts) -> None:
        connection = HereConnection(machine.name)
        connection.fingerprint = facts.fingerprint
        super().__init__(machine, lambda: connection)
        self._facts = facts

    def probe(self, modules: object, dial: str = "") -> dict[str, Any]:
        return {**vars(self._facts), "time": time.time() + self._facts.clock_ahead}


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
def test_a_machine_that_cannot_dial_this_computer_goes_through_ssh(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if not answers:  # as a proxy does that takes connections and passes nothing on
            dead_end = f"127.0.0.1 {silent.getsockname()[1]}"
            monkeypatch.setattr(DialBack, "address_for", lambda *_: dead_end)
        machine = Machine(name="a", address="far", python=sys.executable, be_polite=answers)
        hosts = Hosts(machines=(machine,))
        (a,) = preflight.check(hosts, dial=lambda *_: MachineLink(machine, lambda: HereConnection("a"), "127.0.0.1"))
    assert a.problem is None and a.facts is not None and a.facts.dials_here is answers
    (member,) = plan_run(
        profile_from_options("p", {"task": "custom", "model_path": "a.b:c"}), [(a.link, a.facts)]
    ).members
    assert member.lead.through_ssh is not answers and member.lead.be_polite is answers


def test_what_is_asked_again_goes_over_the_same_connection() -> None:
    machine, dialled = Machine(name="a", address="a", python="python3"), []

    def dial(reachable: Machine, *_: object) -> MachineLink:
        link = Told(reachable, replace(SOUND, missing=() if dialled else ("torch",)))
        link._dial = lambda: dialled.append(reachable.name) or HereConnection("a")  # type: ignore[func-returns-value]  # append
        return link

    before = preflight.check(Hosts(machines=(machine,)), dial=dial)
    assert before[0].problem is not None
    (after,) = preflight.check(Hosts(machines=(machine,)), dial=dial, previous=before)
    assert after.problem is None and dialled == ["a"]


def problems(*facts: Facts) -> list[str]:
    """Return the lines about machines a, b, c with these facts."""
    said = dict(zip("abc", facts))
    hosts = Hosts(machines=tuple(Machine(name=name, address=name, python="python3") for name in said))
    found = preflight.check(hosts, dial=lambda machine, *_: Told(machine, said[machine.name]))
    return [one.problem.message for one in found if one.problem is not None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": (3, 9, 2)}, "a: python3 is Python 3.9.2, needed is 3.10 or newer"),
        ({"missing": ("torch", "numpy")}, "a: python3 has no torch, numpy"),
        ({"clock_ahead": 300.0}, "a: its clock is 5 min ahead of this machine's"),
        ({"clock_ahead": -300.0}, "a: its clock is 5 min behind this machine's"),
        ({"free": 5_000_000}, "a: its disk is full: 5.0 MB free at /home/a, needed are 200 MB"),
        ({"free_files": 3}, "a: its disk has no more files to give: 3 inodes free at /home/a"),
        ({"unloadable": "torch: OSError: no"}, "a: python3 cannot load torch: OSError: no"),
        ({"writable": False}, "a: /home/a cannot be written there"),
    ],
)
def test_one_line_says_what_is_wrong(change: dict[str, Any], said: str) -> None:
    assert problems(replace(SOUND, **change)) == [said]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("OSError: /x/libtorch_global_deps.so: failed to map segment from shared object", "mounted noexec"),
        ("killed by signal 4", "another processor"),
        ("ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found", "older than the packages"),
        ("ImportError: libgomp.so.1: cannot open shared object file", "import torch"),
    ],
)
def test_the_loader_s_words_tell_what_to_do(words: str, hint: str) -> None:
    facts = replace(SOUND, unloadable=f"torch: {words}")
    (one,) = preflight.check(Hosts(machines=(Machine(name="a"),)), dial=lambda machine, *_: Told(machine, facts))
    assert one.problem is not None and hint in one.problem.hint


@pytest.mark.slow
def test_a_package_that_cannot_be_loaded_is_found_by_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("sound", ""),
        ("broken", "raise ImportError('libx.so: no such file')"),
        ("dead", "import os\nos.abort()"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('its own words')")
    (tmp_path / "torch" / "lib" / "libtorch_python.so").write_text("no library")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MUSTER_TESTS_COLD", "1")  # packages of this test, not those that are loaded already
    said = [load_problem(start_loading(["sound", *more])) for more in ([], ["broken"], ["dead"], ["torch"])]
    assert said == [
        "",
        "broken: ImportError: libx.so: no such file",
        "dead: killed by signal 6",
        "torch: OSError: its own words",
    ]


def test_what_to_do_is_said_of_several_machines_too() -> None:
    """Once where it is the same."""
    found = [SshError(name, "first contact", "accept it with --trust-new") for name in "ab"]
    both = NotReady([*found, SshError("c", "no answer", "is it on?")])
    assert both.message == "a, b: first contact; c: no answer"
    assert both.hint == "accept it with --trust-new; is it on?"
    assert (
        NotReady([SshError("c", "no answer", "is it on?")], "add --allow-missing").hint
        == "is it on? add --allow-missing"
    )


def test_two_entries_of_one_machine() -> None:
    assert problems(SOUND, SOUND) == ["b: is the same machine as a (host key SHA256:a)"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_clones_with_one_host_key_are_told_apart(place: int) -> None:
    """By host name, number of the system, or boot."""
    identity = ["pi", "0f3a", "boot 1"]
    first = replace(SOUND, identity=tuple(identity))
    identity[place] = "another"
    second = replace(SOUND, identity=tuple(identity))
    assert problems(first, second) == []
    assert problems(first, second, first) == ["c: is the same machine as a (host key SHA256:a)"]


def test_figures_of_clones_are_kept_apart() -> None:
    first, second = (replace(SOUND, identity=(name, "0f3a", "boot 1")) for name in ("a", "b"))
    said = {"a": first, "b": second}
    hosts = Hosts(machines=tuple(Machine(name=name) for name in said))
    found = preflight.check(hosts, dial=lambda machine, *_: Told(machine, said[machine.name]))
    assert [one.facts.machine_key for one in found if one.facts] == ["SHA256:a of a", "SHA256:a of b"]
    assert first.machine_key == "SHA256:a"


def test_the_odd_version_of_torch_out() -> None:
    others = [replace(SOUND, fingerprint=key) for key in ("b", "c")]
    (line,) = problems(replace(SOUND, torch="2.6.0"), *others)
    assert line == "a: has torch 2.6.0, but b, c have 2.13.0"


def test_builds_of_one_version_fit_together() -> None:
    assert problems(SOUND, replace(SOUND, torch="2.13.0+cu130", fingerprint="b")) == []


def test_not_ready_carries_every_problem() -> None:
    causes = {"c": "is off", "a": "is off", "b": "is asleep"}
    bad = [Readiness(link(name), problem=preflight.SshError(name, cause, "")) for name, cause in causes.items()]
    with pytest.raises(NotReady) as caught:
        ready(bad)
    assert caught.value.exit_code == ExitCode.NOT_READY
    assert caught.value.message == "a, c: is off; b: is asleep"


@pytest.mark.slow
def test_this_machine_is_ready_without_ssh(tmp_path: Path) -> None:
    here = Machine(name="here", address="localhost", python=sys.executable, project_path=str(tmp_path))
    (one,) = preflight.check(Hosts(machines=(here,)))
    assert one.problem is None
    assert one.facts is not None and one.facts.python == sys.version_info[:3]
    assert abs(one.facts.clock_ahead) < 5


def test_a_missing_python_is_said() -> None:
    (one,) = preflight.check(Hosts(machines=(Machine(name="here", address="localhost", python="/no/bin/python"),)))
    assert one.problem is not None and one.problem.message.startswith("here: no Python there: /no/bin/python")


@pytest.mark.parametrize(
    "said", ["7", "[]", "{}", json.dumps({"time": "noon"}), json.dumps({"time": 1.0, "python": 3}), '{"time": NaN}']
)
def test_nonsense_is_a_problem_of_its_machine(said: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\nprintf '%s' '{said}'\n")
    python.chmod(0o755)
    (one,) = preflight.check(Hosts(machines=(Machine(name="odd", address="localhost", python=str(python)),)))
    assert one.problem is not None
    assert one.problem.message.startswith("odd: ") and "cannot be read" in one.problem.message


def engine(facts: Facts, **options: str) -> str:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c", **options})
    machines = [(link("a"), facts), (link("b", devices=("cuda:0", "cuda:1")), facts)]
    return plan_run(profile, machines).engine


def test_the_engine_is_torch_only_where_it_is_asked_for() -> None:
    cuda = replace(SOUND, torch="2.13.0+cu130", gpus=2)
    assert engine(cuda) == "mesh"  # nccl would be faster, and its traffic could be read on the network
    assert engine(SOUND) == "mesh"
    assert engine(cuda, engine="mesh") == "mesh"
    assert engine(cuda, device="cpu") == "mesh"
    assert engine(SOUND, engine="nccl") == "nccl"


def test_devices_of_one_machine_use_torch_over_loopback() -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c"})
    box = (link("b", devices=("cuda:0", "cuda:1"), interface="en7"), replace(SOUND, torch="2.13.0+cu130", gpus=2))
    plan = plan_run(profile, [box])
    assert plan.engine == "nccl" and [member.lead.interface for member in plan.members] == ["", ""]


def test_members_on_gpus_have_their_memory_and_what_they_compute_in() -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c"})
    tower = replace(SOUND, torch="2.13.0+cu130", gpus=1, gpu_memory=8 * 2**30, gpu_bf16=True)
    rooms = preflight.memory_budgets(profile, [(link("tower"), tower), (link("laptop"), replace(SOUND, memory=2**34))])
    assert rooms == [MemoryBudget("tower", 8 * 2**30, "cuda", bf16=True), MemoryBudget("laptop", 2**34)]


def test_a_device_that_is_listed_twice_has_two_members_of_different_names() -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c"})
    members = plan_run(profile, [(link("b", devices=("cpu", "cuda:0", "cpu", "cpu")), SOUND)]).members
    assert [member.name for member in members] == ["b:cpu", "b:cuda:0", "b:cpu-2", "b:cpu-3"]
    assert [member.lead.kind for member in members] == ["cpu", "cuda", "cpu", "cpu"]


def test_shards_are_for_the_devices_of_one_machine() -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c", "layout": "shard"})
    tower = link("b", devices=("cuda:0", "cuda:1")), replace(SOUND, torch="2.13.0+cu130", gpus=2)
    plan = plan_run(profile, [tower])
    assert [process.name for process in plan.processes] == ["b-shard-1", "b-shard-2"] and plan.engine == "mesh"
    with pytest.raises(BadInput, match="layout = shard is for the devices of one machine, not for a, b: each step"):
        plan_run(profile, [(link("a"), SOUND), tower])


@pytest.mark.parametrize(("mbit", "is_taken"), [(9400.0, True), (940.0, False)])
def test_shards_lie_on_machines_with_direct_fast_links(mbit: float, is_taken: bool) -> None:
    machines = [(link("a"), SOUND), (link("b"), replace(SOUND, address="10.0.0.5"))]
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c", "layout": "shard"})
    if not is_taken:
        with pytest.raises(BadInput, match="slowest link carries 940 Mbit/s .*a cable of 10 Gbit/s"):
            plan_run(profile, machines, link_mbit=lambda: mbit)
        return
    plan = plan_run(profile, machines, link_mbit=lambda: mbit)
    assert [device.addresses for device in plan.members[0].devices][1] == ("10.0.0.5",)
    tensor = profile.model_copy(update={"run": profile.run.model_copy(update={"layout": "tensor"})})
    with pytest.raises(BadInput, match="layout = tensor is for the devices of one machine"):
        plan_run(tensor, machines, link_mbit=lambda: mbit)


def test_slices_of_matrices_are_refused_over_machines_with_what_they_would_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = sum_of_blocks([BlockSize(10**6, 10**6, 10**6, 10**6, boundary=10**6)] * 10, outputs=0, evaluation=0)
    monkeypatch.setattr("distributed.preparation.members.size_for", lambda profile: size)
    options = {"task": "custom", "model_path": "a.b:c", "layout": "tensor", "batch_size": 2}
    profile = profile_from_options("p", options)
    # 4 sums for each of 10 layers, of which a device sends what it has once: 4 x 10 x 2 samples x 10^6 x 4 bytes
    with pytest.raises(BadInput, match=r"not for a, b: .* all activations of each layer, 320 MB from each machine, "):
        plan_run(profile, [(link("a"), SOUND), (link("b"), SOUND)])


def test_the_devices_of_all_machines_are_a_pipeline() -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c", "layout": "pipeline"})
    tower = replace(SOUND, torch="2.13.0+cu130", gpus=2, address="10.0.0.5", dials_here=False)
    machines = [(link("a"), replace(SOUND, address="10.0.0.4")), (link("b", devices=("cuda:0", "cuda:1")), tower)]
    plan = plan_run(profile, machines)
    (member,) = plan.members
    assert (member.name, member.batch_size, plan.engine) == ("a+b", profile.training.batch_size, "mesh")
    assert [(d.machine, d.kind, d.index, d.addresses, d.through_ssh) for d in member.devices] == [
        ("a", "auto", 0, ("10.0.0.4",), False),
        ("b", "cuda", 0, ("10.0.0.5",), True),
        ("b", "cuda", 1, ("10.0.0.5",), True),
    ]
    assert [process.name for process in plan.processes] == ["a-stage-1", "b-stage-2", "b-stage-3"]
    assert (plan.machines, plan.ranks_on("b"), plan.has_coordinator) == (("a", "b"), (0,), False)
    assert plan_run(profile, machines[1:]).engine == "mesh"  # which carries the devices of a pipeline


def test_every_device_is_a_member() -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c", "engine": "nccl"})
    machines = [(link("a"), SOUND), (link("b", devices=("cuda:0", "cuda:1"), interface="en7"), SOUND)]
    members = plan_run(profile, machines).members
    assert [member.name for member in members] == ["a", "b:cuda:0", "b:cuda:1"]
    assert [(member.lead.kind, member.lead.index) for member in members] == [("auto", 0), ("cuda", 0), ("cuda", 1)]
    assert [member.lead.interface for member in members] == ["eth0", "en7", "en7"]
