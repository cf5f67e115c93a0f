"""Which way each pair goes: in the list of what happened, on the Network tab, in ``runs show`` and in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from app.dashboard.reader import Picture
from app.dashboard.tabs.network import sums
from app.html_report.charts import charts_of
from app.html_report.evidence import read_evidence
from app.html_report.page import body
from app.run_view.pair_paths import pair_lines, route_text
from app.run_view.run_state import reduce_events
from app.run_view.timeline import chronological
from cli_typer import main
from tests.app.app_events import step
from tests.report.report_runs import write_run
from training.records.events import Event, MemberEvent, PeerPath, WaysEvent

NAMES = ("studio", "tower", "mini", "air")
How = Literal["dialled", "came", "relayed"]


def told(rank: int, at: float, *ways: tuple[int, How], over: str = "eth0") -> WaysEvent:
    def way(peer: int, how: How) -> PeerPath:
        direct = how != "relayed"
        return PeerPath(
            peer=peer, how=how, name=NAMES[peer], address=f"10.0.0.{peer}" if direct else "", interface=over
        )

    return WaysEvent(member=rank, time=at, ways=tuple(way(*one) for one in ways))


def met(machines: int) -> list[Event]:
    """All have met directly."""
    others = {rank: [peer for peer in range(machines) if peer != rank] for rank in range(machines)}
    hellos = [MemberEvent(member=rank, time=1, status="joined", name=NAMES[rank]) for rank in others]
    return [*hellos, *(told(rank, 2, *((peer, "dialled") for peer in peers)) for rank, peers in others.items())]


def lines(*events: Event) -> list[str]:
    state = reduce_events(events)
    return pair_lines(state.members, lambda rank: state.name(rank, {}))


def test_a_way_that_changes_is_an_event_and_the_first_ones_are_none() -> None:
    events = [*met(2), told(0, 3, (1, "relayed")), told(0, 4, (1, "relayed"))]
    happened = [(one.time, one.text) for one in chronological(reduce_events(events).timeline) if one.kind == "path"]
    assert happened == [(3, "studio to tower: now through the relay, before directly (10.0.0.1 over eth0)")]


def test_a_pair_is_told_with_who_dials_and_where() -> None:
    assert lines(*met(2)) == ["studio - tower: directly (10.0.0.1 over eth0)"]
    one_way = [*met(2), told(0, 3, (1, "came")), told(1, 3, (0, "dialled"))]
    assert lines(*one_way) == ["studio - tower: directly (10.0.0.1 over eth0), tower opens both connections"]
    mixed = [*met(2), told(1, 3, (0, "relayed"))]
    assert lines(*mixed) == ["studio - tower: directly (10.0.0.1 over eth0), back through the relay"]


def test_the_way_to_a_lost_machine_is_not_told() -> None:
    lost = MemberEvent(member=1, time=5, status="lost", name=NAMES[1], message="silent for 5 s")
    assert lines(*met(2), lost) == []


def test_of_many_pairs_those_that_are_not_direct_are_named() -> None:
    relayed = [told(0, 3, (3, "relayed")), told(3, 3, (0, "relayed"))]
    assert lines(*met(4), *relayed) == ["5 of 6 pairs connect directly", "studio - air: through the relay"]


def test_pairs_on_one_machine_need_no_word() -> None:
    near = PeerPath(peer=1, how="dialled", address="127.0.0.1", interface="lo")
    assert lines(*met(1), WaysEvent(member=0, ways=(near,))) == []


def test_the_network_tab_tells_it() -> None:
    state = reduce_events([*met(2), told(0, 3, (1, "relayed")), told(1, 3, (0, "relayed"))])
    assert "paths: studio - tower: through the relay" in [line.plain for line in sums(Picture(Path("run"), state))]


def test_a_way_that_loses_large_packets_is_shown_as_such() -> None:
    way = PeerPath(peer=1, how="dialled", address="10.0.0.2", interface="eth0", loses_large=True)
    assert route_text(way) == "directly (10.0.0.2 over eth0, in small packets: large ones are lost)"


def test_runs_show_and_the_report_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(
        tmp_path, [*met(2), told(1, 3, (0, "came")), *(step(n, member=r, bytes_sent=7) for n in (1, 2) for r in (0, 1))]
    )
    assert main(["runs", "show", str(run)]) == 0
    assert (
        "path      studio - tower: directly (10.0.0.1 over eth0), studio opens both connections"
        in capsys.readouterr().out
    )
    assert main(["runs", "show", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (way,) = document["state"]["members"][1]["ways"]
    assert (way["peer"], way["how"], way["address"], way["interface"]) == (0, "came", "10.0.0.0", "eth0")
    evidence = read_evidence(run)
    assert "<td>directly, opened by the other</td>" in body(evidence, charts_of(evidence))
