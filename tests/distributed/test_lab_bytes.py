"""Runs of three hosts to their model, and what one synchronisation costs at each host's network interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.lab.network import Traffic
from training.exchange.codecs import codec_by_name
from training.records.events import SyncEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]

HOSTS = ("a", "b", "c")
WIDTH = 700
MODEL = f"nn.Sequential(nn.Linear(2, {WIDTH}), nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, 2))"
ELEMENTS = 3 * WIDTH + (WIDTH + 1) * WIDTH + 2 * WIDTH + 2
FIRST, LAST = 3, 9
CONSTANT = 8_000
"""Bytes in either direction besides: events of a step over SSH, heartbeats, acknowledgements, or 3 % of it."""


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab(*HOSTS)


def traffic_of_one(lab: Lab, muster: Muster, run_id: str) -> list[Traffic]:
    """Return each host's bytes for one synchronisation, the mean of some, all hosts being still before and after."""
    muster.until_step(run_id, FIRST, members=3)
    before = [host.traffic() for host in lab]
    muster.let_pass(LAST)
    muster.until_step(run_id, LAST, members=3)
    moved = [host.traffic() - then for host, then in zip(lab, before)]
    return [Traffic(one.received // (LAST - FIRST), one.sent // (LAST - FIRST)) for one in moved]


@pytest.mark.parametrize(("engine", "codec"), [("mesh", "mxfp4"), ("nccl", "fp32")])
def test_as_many_bytes_as_theory_says_and_nothing_is_left(lab: Lab, tmp_path: Path, engine: str, codec: str) -> None:
    muster = Muster(tmp_path, lab.hosts_file, gate=lab.folder / "gate", model=MODEL)
    muster.let_pass(FIRST)
    strategy = ["--strategy", "diloco", "--sync-interval", "1"]
    run_id = muster.detach("--max-steps", str(LAST + 1), "--engine", engine, "--codec", codec, *strategy)
    measured = traffic_of_one(lab, muster, run_id)
    muster.let_pass(LAST + 1)
    assert muster.wait_for_end(run_id).returncode == 0
    payload = codec_by_name(codec).max_encoded_bytes(ELEMENTS)
    theory = 2 * (len(HOSTS) - 1) / len(HOSTS) * payload
    for host in measured:
        assert host.sent == pytest.approx(theory, rel=0.03, abs=CONSTANT)
        assert host.received == pytest.approx(theory, rel=0.03, abs=CONSTANT)
    syncs = [event for event in muster.events(run_id) if isinstance(event, SyncEvent)]
    assert all(event.bytes_sent == pytest.approx(theory, rel=0.01) for event in syncs)
    folder = muster.folder_of(run_id)
    assert (folder / "model" / "model.safetensors").stat().st_size > 0
    assert [ours(host) for host in lab] == [[], [], []]
    assert not list(folder.glob("secrets")) and not list(lab["a"].files.glob(".cache/muster/runs/*"))
