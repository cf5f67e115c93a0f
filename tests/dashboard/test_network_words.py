from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import started, steps

from app.dashboard.reader import Picture
from app.dashboard.tabs.network import advice, link_map, none_yet, sums, sync_row, synchronisations
from app.dashboard.tabs.overview import sync_rows
from app.run_view.run_state import reduce_events
from app.run_view.tables.exchanges import exchanges
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link
from distributed.planning.documents.document import Candidate, Choice, Figures, Job, Planning, Reason, Workload
from profiles.files.resolve import profile_from_options
from tests.app.app_events import sync
from training.records.events import MemberEvent, PeerPath, RunEvent, SyncEvent, WaysEvent
from training.records.plan import RunPlan
from training.run.local_plan import plan_local_run


def way(strategy: str, speed_up: float, *members: str, samples: float = 0.0, steps: int = 100) -> Candidate:
    choice = Choice(strategy=strategy, codec="fp32", engine="mesh", members=members)
    return Candidate(
        choice=choice, useful_speed_up=speed_up, step=0.5, exchange=0.2, steps=steps, samples_per_second=samples
    )


def picture(chosen: int | None) -> Picture:
    job = Job(trainable=10, total=10, samples=100)
    ranking = (
        way("diloco", 2.0, "a", "b"),
        way("allreduce", 1.25, "a", "b", steps=160),
        way("allreduce", 1.0, "a", samples=12.0),
    )
    planning = Planning(job=job, ranking=ranking, chosen=chosen)
    return Picture(Path("run"), reduce_events([*started(), *steps(1, 9)]), planning=planning)


def plan_of(strategy: str) -> RunPlan:
    """Return the plan of a run of two members."""
    options = {"task": "custom", "model_path": "nowhere:build", "strategy": strategy}
    return plan_local_run(profile_from_options("x", options), 2)


def said(shown: Picture) -> str:
    return " ".join(line.plain for line in advice(shown))


def test_a_faster_way_is_named_with_its_predicted_gain() -> None:
    assert "a and b, merging in every step: the run would take 0:50 instead of 1:20" in said(picture(1))


def test_the_fastest_way_gets_no_advice() -> None:
    assert "no other way to train" in said(picture(0))


def test_without_a_prediction_there_is_no_advice() -> None:
    assert "no plan with predictions" in said(Picture(Path("run")))


def test_the_machine_alone_is_the_fastest_one_that_was_predicted() -> None:
    time = picture(0).time
    assert time is not None
    assert (time.alone, time.alone_rate) == ("a", 12.0)


def test_the_rate_of_a_synchronisation() -> None:
    (row,) = exchanges(reduce_events([sync(1, bytes_sent=1_000_000, bytes_received=2_500_000, seconds=0.2)]))
    assert row.mbit == pytest.approx(100.0)
    assert [row.mbit for row in exchanges(reduce_events([sync(1, seconds=0.0)]))] == [0.0]


def test_syncs_of_one_round_are_one_row() -> None:
    syncs = [SyncEvent(member=rank, time=9.0, step=9, round=1, bytes_sent=1, bytes_received=1, seconds=0.1, wait=0.0,
                       members=[0, 1]) for rank in (0, 1)]  # fmt: skip
    rows = exchanges(reduce_events([*started(), *syncs]))
    assert [(row.step, row.number, row.members) for row in rows] == [(9, 1, 2)]


def test_a_resumed_run_lists_the_rounds_before_and_those_that_it_repeats_once() -> None:
    restart = MemberEvent(member=0, status="started", name="a")
    rows = exchanges(reduce_events([sync(10), sync(20), sync(30), restart, sync(20, bytes_sent=7), sync(40)]))
    assert [row.number for row in rows] == [10, 20, 40]
    assert rows[1].sent == 7


def test_an_exchange_is_held_against_its_plan_without_the_wait_for_others() -> None:
    """The first to arrive waits 5 s for the last, which sees the transfer alone."""
    pair = [sync(9, member=rank, seconds=seconds, bytes_sent=10**6) for rank, seconds in ((0, 5.2), (1, 0.2))]
    (row,) = exchanges(reduce_events(pair))
    shown = replace(picture(0), state=reduce_events([*started(), *steps(1, 9), *pair]))
    cells = [cell.plain for cell in sync_row(row, shown).cells]
    assert cells[6:10] == ["5.2 s", "air", "5 s", "200 ms"] and cells[-1] == "100 %"  # the time is the sum
    lines = [line.plain for line in sums(shown)]
    assert "median synchronisation: 5.2 s, of it transfer 200 ms (200 ms planned), 40 Mbit/s" in lines
    assert "step of the slowest machine: 1 s (500 ms planned)" in lines


def test_an_exact_run_counts_its_exchanges_before_one_is_listed() -> None:
    """Those that compare the weights are listed: one in 50, and the last."""
    shown = replace(picture(0), plan=plan_of("allreduce"))
    assert next(iter(sums(shown))).plain.startswith("0 B sent, 0 B received by all, 9 synchronisations")
    assert none_yet(shown) == (
        "The machines synchronise in every step; one in 50 is listed here, the first at step 50."
    )
    short = replace(shown, state=reduce_events([*started(), RunEvent(status="running", total_steps=28)]))
    assert "the first when the run ends" in none_yet(short)
    assert synchronisations(replace(shown, plan=plan_of("diloco"))) == 0
    assert "step of the slowest machine: 1 s (500 ms planned)" in [line.plain for line in sums(shown)]


def test_an_exchange_while_a_machine_is_away_is_not_held_against_the_plan_of_all() -> None:
    """Without the slowest link it took a quarter of the planned time."""
    fewer = [
        sync(9, member=rank, seconds=0.1, bytes_sent=10**6).model_copy(update={"members": [rank]}) for rank in (0,)
    ]
    (row,) = exchanges(reduce_events(fewer))
    assert sync_row(row, picture(0)).cells[-1].plain == "-"


def test_an_exchange_in_which_a_machine_was_lost_is_not_held_against_its_plan() -> None:
    """All waited for the lost one, which says nothing of the network. Many times the plan is no percentage."""
    lost = MemberEvent(member=1, time=0.5, status="lost", message="silent for 5 s")
    (row,) = exchanges(reduce_events([lost, sync(9, member=0, seconds=8.0, bytes_sent=10**6)]))
    assert sync_row(row, picture(0)).cells[-1].plain == "a loss"
    (row,) = exchanges(reduce_events([sync(9, member=0, seconds=3.4, bytes_sent=10**6)]))
    assert sync_row(row, picture(0)).cells[-1].plain == "17x"


@pytest.mark.parametrize(("sent", "planned"), [(146, 0.2), (10**6, 0.001)])
def test_an_exchange_of_round_trips_is_not_held_against_its_plan(sent: int, planned: float) -> None:
    """146 bytes took 2295 % of their plan: that says nothing of the network."""
    (row,) = exchanges(reduce_events([sync(9, member=0, seconds=0.5, bytes_sent=sent)]))
    shown = picture(0)
    assert shown.planning is not None and shown.planned is not None
    ranking = (shown.planned.model_copy(update={"exchange": planned}),)
    shown = replace(shown, planning=shown.planning.model_copy(update={"ranking": ranking}))
    cells = [cell.plain for cell in sync_row(row, shown).cells]
    assert cells[-1] == "small" and "500 ms" in cells


def test_the_last_of_machines_whose_names_begin_alike_is_told_apart() -> None:
    names = ("whisper-trainer-attic1", "whisper-trainer-cellar")
    starts = [MemberEvent(member=rank, time=1.0, status="started", name=name, device="cpu") for rank, name in
              enumerate(names)]  # fmt: skip
    state = reduce_events([*starts, *(sync(9, member=rank, seconds=1.1 - rank, bytes_sent=10**6) for rank in (0, 1))])
    (row,) = exchanges(state)
    shown = [cell.plain for cell in sync_row(row, Picture(Path("run"), state)).cells]
    assert "whisp…cellar" in shown


def test_of_exchanges_in_every_step_all_are_counted_though_some_are_reported() -> None:
    shown = Picture(Path("run"), reduce_events([*started(), *(sync(n) for n in (50, 100, 150, 200))]))
    assert next(iter(sums(shown))).plain.partition("; ")[0].endswith("200 synchronisations (4 listed)")


def test_who_owns_less_than_the_others_is_said() -> None:
    shown = picture(0)
    assert shown.planning is not None
    slow = Reason.of("owns-less", "b", "link", percent=6, even=50)
    reasons = (Reason.of("group-wins", "diloco", members=2, useful=2, speed_up=2), slow)
    planned = replace(shown, planning=shown.planning.model_copy(update={"reasons": reasons}))
    lines = [line.plain for line in sums(planned)]
    assert lines[1:-1] == ["machine b merges 6 % of the weights instead of 50 %, because its link is slow"]


def on_a_map(width: int = 118, height: int = 40) -> str:
    links = (Link(source="studio", target="air", mbit=211, mbit_back=190, medium="wifi", air="wifi"),
             Link(source="studio", target="pc", mbit=941, mbit_back=938, medium="ethernet"))  # fmt: skip
    machines = tuple(ClusterMachine(name=name) for name in ("studio", "air", "pc"))
    figures = Figures(
        cluster=Cluster(machines=machines, links=links), workload=Workload(trainable=1, total=1, samples=1)
    )
    ways = WaysEvent(member=1, time=9.0, ways=(PeerPath(peer=2, name="pc", address="10.0.0.3", how="relayed"),))
    shown = Picture(Path("run"), reduce_events([*started(), ways]), figures=figures)
    return link_map(shown, width, height).plain


def test_the_map_has_what_was_measured_and_the_ways_that_are_taken() -> None:
    assert all(word in on_a_map() for word in ("studio", "air", "pc", " 190", " 938", " relayed ", "Wi-Fi", "cable"))


def test_in_a_low_terminal_there_is_no_map() -> None:
    assert not on_a_map(78, 19)


def test_events_and_network_say_the_same_of_a_synchronisation() -> None:
    said = [sync(1, member=0, seconds=0.035, bytes_sent=100), sync(1, member=1, seconds=0.124, bytes_sent=300)]
    ((_, row),) = sync_rows(Picture(Path("run"), reduce_events([*started(), *said])))
    assert row.cells[-1].plain == "round 1 at step 10: 2 machines, 124 ms, 300 B sent"
