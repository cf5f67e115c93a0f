"""Links of known rates, and the whole way from this machine alone to a plan."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.machine.link import link_to
from distributed.measuring.link_figures import PairFigures, Probe, measure_interfaces, measure_links, probing
from distributed.planning.reasons import IN_USE
from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab

pytestmark = pytest.mark.timeout(240)
STEADY = 0.05
"""Seconds of a step, nearly all of them waited: its time is known soon, whoever else computes here."""
TRIES = 3
"""A processor that others use makes a fast link look slow, never fast."""


def measured_in(progress: str) -> list[str]:
    """Return the names of the machines that ran the task."""
    match = re.search(r"measuring (.*) with a few steps", progress)
    return match[1].split(", ") if match else []


@contextlib.contextmanager
def probed(lab: Lab) -> Iterator[dict[str, Probe]]:
    hosts = lab.hosts()
    links = [link_to(machine, hosts) for machine in hosts.machines]
    try:
        with probing(links) as probes:
            yield probes
    finally:
        for link in links:
            link.close()


def measured(lab: Lab) -> PairFigures:
    with probed(lab) as probes:
        (found,) = measure_links(probes, lambda pair: None)
        return found


@contextlib.contextmanager
def traffic(address: str, mbit: float) -> Iterator[None]:
    """Send datagrams to a host at a steady rate."""
    stop, datagram = threading.Event(), bytes(1400)

    def send() -> None:
        begin, sent = time.monotonic(), 0
        with socket.socket(type=socket.SOCK_DGRAM) as out:
            while not stop.wait(0.001):
                while sent * 8e-6 < mbit * (time.monotonic() - begin):
                    with contextlib.suppress(OSError):
                        out.sendto(datagram, (address, 9))
                    sent += len(datagram)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("mbit", [20, 1000])
def test_a_link_is_measured_as_it_is_shaped(make_lab: MakeLab, mbit: float) -> None:
    lab = make_lab("a", "b")
    lab["b"].set_rate(mbit)
    found = measured(lab)
    for _ in range(TRIES - 1):
        if min(found.link.mbit, found.link.mbit_back) < 0.92 * mbit:
            found = measured(lab)
    assert max(found.link.mbit, found.link.mbit_back) < 1.08 * mbit
    if min(found.link.mbit, found.link.mbit_back) < 0.92 * mbit and os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip(f"others use the processors (load {os.getloadavg()[0]:.1f}), which carry {mbit} Mbit/s only alone")
    assert min(found.link.mbit, found.link.mbit_back) > 0.92 * mbit
    assert not found.busy
    assert [host.pids("listaddresses") for host in lab] == [[], []]


@pytest.mark.lab
@pytest.mark.slow
def test_a_busy_link_is_noticed(make_lab: MakeLab) -> None:
    lab = make_lab("a", "b")
    lab["b"].set_rate(100)
    with traffic(lab["b"].address, 30):
        assert measured(lab).busy


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.slow
def test_a_fast_machine_has_more_than_any_of_its_links(make_lab: MakeLab) -> None:
    lab = make_lab("fast", "b", "c", "d")
    lab["fast"].set_rate(1000)
    for name in "bcd":
        lab[name].set_rate(100)
    with probed(lab) as probes:
        pairs = measure_links(probes, lambda pair: None)
        found = {one.machine: one.each_way for one in measure_interfaces(probes, pairs, lambda line: None).figures}
    assert max(one.link.mbit for one in pairs) < 110
    assert found["fast"] > 200
    assert max(found.get(name, 0.0) for name in "bcd") < 110


@pytest.mark.slow
def test_without_hosts_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    muster = Muster(tmp_path, tmp_path / "none.json", pause=STEADY)
    options = {"task": "custom", "model_path": f"{muster.job}:build", "batch_size": "8", "threads": "1"}
    task = ["nanogpt", *(word for key, value in options.items() for word in ("--set", f"{key}={value}"))]
    plan = muster.run("plan", *task, "--json")
    assert plan.returncode == 0, plan.stderr
    document = json.loads(plan.stdout)
    assert [one["choice"]["members"] for one in document["ranking"]] == [["this machine"]]
    assert document["ranking"][0]["step"] >= STEADY
    again = muster.run("measure", *task)
    assert measured_in(again.stderr) == [r["subject"] for r in document["reasons"] if r["code"] == IN_USE]
    assert again.stdout.splitlines()[1].startswith("this machine")
