"""Where the ranks of a launched script listen, and what they are told."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from profiles.errors import RunFailed
from profiles.schema import Profile
from training.records.launched_script import LaunchedScript
from training.records.plan import DevicePlan, MemberPlan, RunPlan
from training.script.script_start import backend_for
from training.workers.script_worker import environment, file_stamps, interface_variables
from training.workers.worker import Rendezvous, _unreached, listen_address

JOB = LaunchedScript(script="x.py")
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def on(*machines: str, addresses: Mapping[str, str] = ADDRESSES) -> RunPlan:
    """A plan with one rank on each of these machines."""
    members = tuple(
        MemberPlan(rank=rank, name=f"{machine}-{rank}", batch_size=1).on_device(
            machine=machine, addresses=(addresses[machine],)
        )
        for rank, machine in enumerate(machines)
    )
    return RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine="mesh", launch=JOB)


def test_a_rank_listens_where_ssh_reaches_its_machine_or_on_the_interface_that_was_named() -> None:
    member = on("b").members[0]
    assert listen_address(member.lead) == "10.0.0.2"
    own = [one.address for one in psutil.net_if_addrs()[LOOPBACK] if one.family == socket.AF_INET]
    assert listen_address(member.on_device(interface=LOOPBACK).lead) == own[0]


def test_an_interface_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(RunFailed, match=f"'nothere0'.*{LOOPBACK}"):
        listen_address(DevicePlan(interface="nothere0", addresses=("10.0.0.1",)))


def test_a_rank_is_told_the_store_and_the_relay(tmp_path: Path) -> None:
    told = environment(on("a", "b"), JOB, 1, Rendezvous("", "10.0.0.9:2", "127.0.0.1:1"), tmp_path)
    assert (told["MUSTER_STORE"], told["MUSTER_RELAY"]) == ("127.0.0.1:1", "10.0.0.9:2")
    assert (told["MUSTER_LISTEN"], told["MASTER_ADDR"], told["RANK"]) == ("10.0.0.2", "10.0.0.1", "1")


def test_the_interface_of_its_address_is_named_to_stock_torch_unless_a_person_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"GLOO_SOCKET_IFNAME": LOOPBACK, "TP_SOCKET_IFNAME": LOOPBACK}
    assert interface_variables("127.0.0.1", 1) == names
    assert interface_variables("127.0.0.1", 2) == {**names, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
    assert interface_variables("203.0.113.7", 2) == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    plan = on("a", "b", addresses=dict.fromkeys("ab", "127.0.0.1"))
    given = environment(plan, JOB, 1, Rendezvous("", store="127.0.0.1:1"), tmp_path)
    assert (given["GLOO_SOCKET_IFNAME"], given["TP_SOCKET_IFNAME"]) == ("mine0", LOOPBACK)


def test_only_plain_files_of_a_script_are_brought_back(tmp_path: Path) -> None:
    (tmp_path / "result.txt").write_text("7")
    (tmp_path / "last").symlink_to("result.txt")
    os.mkfifo(tmp_path / "pipe")
    assert list(file_stamps(tmp_path)) == ["result.txt"]


@pytest.mark.parametrize(
    ("said", "own_gpu", "given"),
    [
        ("nccl", True, "nccl"),
        ("cpu:gloo,cuda:nccl", True, "cpu:gloo,cuda:nccl"),
        (None, True, "cpu:gloo,cuda:nccl"),
        ("gloo", True, "muster"),
        ("nccl", False, "muster"),
        (None, False, "muster"),
        ("ucc", False, "ucc"),
    ],
)
def test_nccl_stays_on_one_machine_with_a_gpu_for_each_process(
    said: str | None, own_gpu: bool, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setenv("MUSTER_BACKEND", "auto")
    monkeypatch.setenv("MUSTER_NCCL", str(int(own_gpu)))
    assert backend_for(said) == given


@pytest.mark.parametrize(("machines", "visible", "told"), [("aa", "0,1", "1"), ("aa", "0", "0"), ("ab", "0,1", "0")])
def test_every_process_is_told_whether_each_of_its_machine_has_a_gpu(
    machines: str, visible: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given = [
        environment(on(*machines), JOB, rank, Rendezvous("", store="127.0.0.1:1"), tmp_path)["MUSTER_NCCL"]
        for rank in (0, 1)
    ]
    assert given == [told, told]


def test_who_cannot_reach_the_others_names_their_machine_and_what_to_do() -> None:
    plan = on("a", "b").model_copy(update={"coordinator": "a"})
    planned, elected, unnamed = (
        _unreached(*of, "no route", carrier)
        for *of, carrier in ((plan, 1, "10.0.0.1:4711", None), (plan, 1, "10.0.0.1:4711", 0), (on("b"), 0, "x:1", None))
    )
    assert planned.message.startswith(
        "b-1 cannot reach machine a, which holds the run together (no route); if that lasts"
    )
    assert "4711" not in planned.message and planned.unreached == "10.0.0.1:4711"
    assert "cannot reach a-0, which" in elected.message
    assert "cannot reach the computer that started the run, which" in unnamed.message
