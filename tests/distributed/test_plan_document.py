"""The plan document: what it says of a member is found by rank and machine, never by a position in another file."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_figures import job, joined, machine

from app.cli.machines.access import chosen
from app.cli.runs.ask import newcomer_of
from app.dashboard.dialogs.commands import Commands
from distributed.hosts.file import RUN_HOSTS, load_hosts, nearest_machine, save_hosts, typed_hosts, typed_machine
from distributed.hosts.past_logins import PastLogin, save_login
from distributed.hosts.schema import Hosts, Machine, requested_machine
from distributed.launcher import apply_planning, with_best_paths
from distributed.machine.link import HereConnection, MachineLink
from distributed.measuring.measure import MeasurementResult
from distributed.planning.documents.document import Candidate, Choice, Planning, Settings
from distributed.planning.planner import plan as plan_for
from distributed.planning.run_time import plan_stages_text
from distributed.preparation.prepare import updated_hosts
from distributed.run.run_machines import links_of, on_present, record_added_machine
from distributed.supervision import Supervisor
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from tests.distributed.test_preflight import SOUND
from training.records.plan import DevicePlan, MemberPlan, RunPlan, read_plan
from training.records.run_folder import RunFolder
from training.run.requests.request_book import take_requests

NAMES = st.sampled_from(["studio", "tower", "laptop", "pi"])
DEVICES = st.builds(
    DevicePlan,
    machine=NAMES,
    kind=st.sampled_from(["auto", "cpu", "cuda", "mps"]),
    index=st.integers(0, 7),
    threads=st.integers(0, 64),
    interface=st.sampled_from(["", "eth0"]),
    addresses=st.lists(st.sampled_from(["10.0.0.1", "fe80::1%en0"])).map(tuple),
    coordinator_address=st.sampled_from(["", "10.0.0.9"]),
    through_ssh=st.booleans(),
)


@st.composite
def plans(draw: st.DrawFn) -> RunPlan:
    devices = draw(st.lists(DEVICES, min_size=1, max_size=6))
    members = tuple(
        MemberPlan(
            rank=rank,
            name=f"{device.machine}:{rank}",
            batch_size=draw(st.integers(1, 64)),
            shard=draw(st.floats(0, 4)),
            devices=(device,),
        )
        for rank, device in enumerate(devices)
    )
    absent = tuple(draw(st.sets(st.integers(0, len(devices) - 1))))
    carrier = draw(st.sampled_from(["", *(device.machine for device in devices)]))
    return RunPlan(
        run_id="r", profile=Profile(name="p"), members=members, engine="mesh", coordinator=carrier, absent=absent
    )


def links(names: list[str]) -> list[MachineLink]:
    return [MachineLink(Machine(name=name), lambda: HereConnection("far"), "10.0.0.1") for name in names]


@given(plans())
def test_a_plan_is_read_as_it_was_written(plan: RunPlan) -> None:
    assert RunPlan.model_validate_json(plan.model_dump_json()) == plan


def fields(document: dict[str, Any]) -> list[dict[str, Any]]:
    member = document["members"][0]
    return [document, member, member["devices"][0]]


@pytest.mark.parametrize("level", range(3))
def test_a_field_that_no_plan_has_is_refused_and_named(level: int, tmp_path: Path) -> None:
    members = (MemberPlan(rank=0, name="a", batch_size=1),)
    document = RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine="mesh").model_dump(mode="json")
    fields(document)[level]["seat"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match="seat"):
        read_plan(tmp_path / "plan.json")


def test_a_field_that_no_device_has_is_not_taken() -> None:
    with pytest.raises(ValueError, match="adresses"):
        MemberPlan(rank=0, name="a", batch_size=1).on_device(adresses=("10.0.0.1",))


@pytest.mark.slow
@given(plans(), st.randoms())
def test_members_in_another_order_than_their_ranks_are_refused(plan: RunPlan, random: Any) -> None:
    document = plan.model_dump(mode="json")
    random.shuffle(document["members"])
    if [member["rank"] for member in document["members"]] == list(range(plan.world_size)):
        assert RunPlan.model_validate(document) == plan
    else:
        with pytest.raises(ValueError, match="ranks must be 0, 1, 2"):
            RunPlan.model_validate(document)


@given(plans(), st.permutations(["studio", "tower", "laptop", "pi"]), st.sets(NAMES))
def test_the_order_of_the_hosts_changes_nothing(plan: RunPlan, order: list[str], present: set[str]) -> None:
    found = links_of(plan, links(order))
    assert {name: link.name for name, link in found.items()} == {name: name for name in plan.machines}
    there = [(link, SOUND) for link in links(order) if link.name in present]
    assert on_present(plan, there) == on_present(plan, sorted(there, key=lambda ready: ready[0].name))
    assert all(plan.members[rank].machine not in present for rank in on_present(plan, there).absent)


@pytest.mark.parametrize("order", ["studio tower laptop pi", "pi laptop tower studio"])
def test_a_supervisor_finds_the_ranks_of_a_machine_whatever_the_order_of_the_hosts(order: str, tmp_path: Path) -> None:
    members = tuple(
        MemberPlan(rank=rank, name=f"m{rank}", batch_size=1).on_device(machine=machine)
        for rank, machine in enumerate(("tower", "studio", "tower"))
    )
    plan = RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine="mesh")
    with RunFolder.create(tmp_path, plan, ["test"], run_type="distributed") as folder:
        supervisor = Supervisor(folder, links(order.split()))
        assert [supervisor.ranks(machine) for machine in ("studio", "tower", "m2")] == [(1,), (0, 2), (2,)]
        with pytest.raises(BadInput, match="pi is not a machine of this run"):
            supervisor.ranks("pi")


def test_a_machine_that_is_not_in_the_plan_is_added_as_the_hosts_file_says_or_as_hosts_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = tuple(MemberPlan(rank=r, name=f"a:cuda:{r}", batch_size=1).on_device(machine="a") for r in range(2))
    plan = RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine="mesh")
    with RunFolder.create(tmp_path, plan, ["test"], run_type="distributed") as folder:
        assert newcomer_of(folder.path, "d") is None  # a run on this machine
        hosts = Hosts(machines=(Machine(name="d", address="10.0.0.4", user="ada"), Machine(name="a")))
        save_hosts(hosts, folder.path / RUN_HOSTS)
        assert newcomer_of(folder.path, "d") == hosts.machines[0]
        assert newcomer_of(folder.path, "a") is newcomer_of(folder.path, "a:cuda:1") is None
        assert newcomer_of(folder.path, "bob@e") == Machine(name="e", address="e", user="bob")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        save_login(PastLogin("larder", "10.9.9.11", "10.9.9.11", 22, "eve", "SHA256:l"))
        larder = newcomer_of(folder.path, "larder")
        assert larder == Machine(name="larder", address="10.9.9.11", user="eve") == typed_hosts("larder").machines[0]
        assert chosen(("larder", "bob@porch"), None, as_json=True).machines == (
            larder,
            Machine(name="bob@porch", address="porch", user="bob"),
        )
        meant = {name: nearest_machine(name) for name in ("lardr", "Larder", "10.9.9.12", "porch")}
        assert meant == {"lardr": "larder", "Larder": None, "10.9.9.12": None, "porch": None}
        commands = Commands(folder.path)
        assert commands.ask("add", 0.0, entry=typed_machine("larder")) == ""
        assert [requested_machine(request.entry or {}) for request in take_requests(folder.path)] == [larder]


def test_what_the_planner_chose_reaches_its_member_in_any_order_of_the_hosts() -> None:
    devices = (machine("a"), machine("b:cuda:0", 4, machine="b"), machine("b:cuda:1", 2, machine="b"))
    planning = plan_for(joined(devices, 10_000), job(1_000_000, strategy="allreduce"))
    a, b = links(["a", "b"])
    b.machine = b.machine.model_copy(update={"devices": ("cuda:0", "cuda:1"), "interface": "en7"})
    orders = [
        apply_planning(planning, Profile(name="p"), order).plan for order in permutations([(a, SOUND), (b, SOUND)])
    ]
    by_name = [{member.name: member.model_copy(update={"rank": 0}) for member in plan.members} for plan in orders]
    assert by_name[0] == by_name[1] and [plan.members[0].machine for plan in orders] == ["a", "b"]
    chosen = {name: (member.batch_size, member.lead.kind, member.lead.index) for name, member in by_name[0].items()}
    assert chosen == {"a": (14, "auto", 0), "b:cuda:0": (7, "cuda", 0), "b:cuda:1": (3, "cuda", 1)}


@pytest.mark.parametrize("order", ["abc", "bca"])
def test_a_divided_model_lies_on_the_machines_as_planned_in_any_order_of_the_hosts(order: str) -> None:
    names, blocks = ("c", "a", "b"), ((0, 3), (3, 4), (4, 9))
    choice = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=names, blocks=blocks)
    devices = tuple(DevicePlan(machine=name, blocks=ends, ahead=2) for name, ends in zip(names, blocks, strict=True))
    member = MemberPlan(rank=0, name="c+a+b", batch_size=8, devices=devices)
    settings = Settings(options={"layout": "pipeline"}, members=(member,), engine="mesh")
    planning = Planning(job=job(), ranking=(Candidate(choice=choice),), chosen=0, settings=settings)
    profile = profile_from_options("p", {"task": "custom", "model_path": "a:b"})
    plan = apply_planning(planning, profile, [(link, SOUND) for link in links([*order])]).plan
    (placed,) = plan.members
    assert [(d.machine, d.blocks, d.ahead) for d in placed.devices] == [
        ("c", (0, 3), 2),
        ("a", (3, 4), 2),
        ("b", (4, 9), 2),
    ]
    assert plan_stages_text(plan) == "The model is divided over c, a and b: layers 1-3, 4, 5-9"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_planners_document_and_the_plan_give_a_member_the_same_rank(order: str) -> None:
    planning = plan_for(joined((machine("a"), machine("b", 4)), 10_000), job(1_000_000, strategy="allreduce"))
    machines = [(link, SOUND) for link in links([*order])]
    assert planning.settings is not None
    settings = with_best_paths(planning.settings, MeasurementResult([*order]), machines)
    chosen = planning.model_copy(update={"settings": settings})
    plan = apply_planning(chosen, Profile(name="p"), machines).plan
    ranks = [(member.rank, member.name) for member in plan.members]
    assert ranks == [(member.rank, member.name) for member in settings.members] == [(0, order[0]), (1, order[1])]


@given(plans())
def test_where_the_coordinator_is_absent_it_is_here_and_nobody_dials_elsewhere(plan: RunPlan) -> None:
    present = plan.without_absent_coordinator("")
    if set(plan.ranks_on(plan.coordinator)) & set(plan.absent):
        assert present.coordinator == "" and not any(member.lead.coordinator_address for member in present.members)
    else:
        assert present is plan


def test_a_machine_that_joins_stands_in_the_runs_hosts_file_once(tmp_path: Path) -> None:
    save_hosts(Hosts(machines=(Machine(name="a", address="10.0.0.1"),)), tmp_path / RUN_HOSTS)
    for entry in (Machine(name="d"), Machine(name="d", user="ada"), Machine(name="10.0.0.1"), Machine(name="e")):
        record_added_machine(tmp_path, entry)
    assert [machine.name for machine in load_hosts(tmp_path / RUN_HOSTS).machines] == ["a", "d", "e"]


def test_a_hosts_file_says_how_to_log_in_and_a_run_writes_only_that() -> None:
    (link,) = links(["b"])
    link.machine, link.python = link.machine.model_copy(update={"found_at": "10.0.0.7"}), "~/env/bin/python"
    hosts = Hosts(machines=(Machine(name="a"), Machine(name="b")))
    reached = Machine(name="b", found_at="10.0.0.7", python="~/env/bin/python")
    assert updated_hosts(hosts, [link]).machines == (Machine(name="a"), reached)
