from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.run_view.run_state import reduce_events
from app.run_view.timeline import FIRST, NEWEST, TimelineEntry, TimelineTrack, chronological, entry_text, timeline_entry
from training.records.events import (
    ErrorEvent,
    Event,
    MemberEvent,
    ProgressEvent,
    RequestEvent,
    RunEvent,
    StepEvent,
    WarningEvent,
)


def warning(at: float) -> TimelineEntry:
    return TimelineEntry(at, 0, "warning", f"at {at}")


@settings(max_examples=40)
@given(st.lists(st.integers(0, 500), max_size=400), st.randoms())
def test_any_order_keeps_the_same_ends(times: list[int], chance: random.Random) -> None:
    def kept(order: list[int]) -> TimelineTrack:
        track = TimelineTrack()
        for time in order:
            track = track.with_entry(warning(float(time)))
        return track

    shuffled = list(times)
    chance.shuffle(shuffled)
    assert kept(times) == kept(shuffled)
    assert len(kept(times).entries) == min(len(times), FIRST + NEWEST)
    assert list(kept(times).entries) == sorted(kept(times).entries)


def test_a_flood_of_warnings_hides_no_error() -> None:
    flood = [WarningEvent(time=float(n), message=str(n)) for n in range(1000)]
    state = reduce_events([ErrorEvent(member=0, time=5.0, message="the cause"), *flood])
    kept = chronological(state.timeline)
    assert [h.text for h in kept if h.kind == "error"] == ["the cause"]
    assert len(kept) == FIRST + NEWEST + 1


def lost_for_long() -> list[Event]:
    step = {"epoch": 0.0, "loss": 1.0, "learning_rate": 1.0, "samples": 1, "weight": 1.0, "compute": 1.0, "wait": 0.0}
    return [
        MemberEvent(member=1, time=1.0, status="started", name="b"),
        MemberEvent(member=1, time=9.0, status="lost", name="b", message="silent for 5 s"),
        MemberEvent(member=1, time=9.5, status="lost", name="b", message="at step 7"),
        StepEvent(member=1, time=12.0, step=7, transfer=0.0, **step),  # of a machine that was cut off and went on
        ProgressEvent(member=1, time=13.0, phase="bytes to b", done=1, total=9),
        MemberEvent(member=1, time=14.0, status="lost", name="b", message="exit code 1"),
        ErrorEvent(member=1, time=15.0, message="the coordinator dropped this member"),
        MemberEvent(member=1, time=16.0, status="left", name="b", message="stopped"),
    ]


def test_a_stop_is_said_once() -> None:
    stopped, empty = (RunEvent(time=9.0, status="cancelled", message=why) for why in ("stopped", "no step was taken"))
    assert [one.text for one in chronological(reduce_events([stopped]).timeline)] == ["the run was stopped"]
    told = [one.text for one in chronological(reduce_events([empty]).timeline)]
    assert told == ["the run was stopped: no step was taken"]


def test_a_lost_member_keeps_its_first_cause_until_it_is_back() -> None:
    state = reduce_events(lost_for_long())
    member = state.members[1]
    assert (member.status, member.message, member.since, member.times_lost) == ("lost", "silent for 5 s", 9.0, 1)
    assert [h.text for h in chronological(state.timeline) if h.kind == "lost"] == ["b lost: silent for 5 s"]


def test_a_member_that_joins_again_is_told_as_back() -> None:
    back = MemberEvent(member=1, time=20.0, status="joined", name="b", message="joins a running group")
    state = reduce_events([*lost_for_long(), back])
    assert [h.text for h in chronological(state.timeline) if h.kind == "back"] == ["b is back"]
    assert state.members[1].active
    lost = reduce_events([MemberEvent(member=1, time=30.0, status="lost", message="no power")], state).members[1]
    assert (lost.message, lost.times_lost) == ("no power", 2)


@pytest.mark.parametrize(("status", "returns"), [("left", []), ("lost", ["b is back"])])
def test_a_member_of_a_resumed_run_is_back_only_if_it_was_lost(
    status: Literal["left", "lost"], returns: list[str]
) -> None:
    def start(at: float) -> list[Event]:
        came: tuple[Literal["started", "joined", "ready"], ...] = ("started", "joined", "ready")
        return [RunEvent(time=at, status="starting")] + [
            MemberEvent(member=1, time=at + 1, status=one, name="b") for one in came
        ]

    end = [MemberEvent(member=1, time=9, status=status, name="b"), RunEvent(time=10, status="cancelled")]
    state = reduce_events([*start(0), *end, *start(20)])
    assert [entry.text for entry in chronological(state.timeline) if entry.kind == "back"] == returns


def test_that_a_machine_dials_in_vain_is_told_once_an_absence() -> None:
    """What it said while its cable was out arrives when it is back."""
    lost = MemberEvent(member=1, time=1.0, status="lost", name="b", message="silent for 5 s")
    back = MemberEvent(member=1, time=40.0, status="joined", name="b")
    vain = [
        WarningEvent(member=1, time=time, message="b: cannot reach it", unreached="10.0.0.1:9") for time in (8, 18, 28)
    ]
    shown = chronological(reduce_events([lost, back, *vain]).timeline)
    assert [entry.kind for entry in shown] == ["lost", "warning", "back"]


def test_the_answer_to_a_request_is_not_taken_back_by_its_acceptance() -> None:
    done = RequestEvent(time=2.0, request="1-a", action="snapshot", outcome="done")
    accepted = RequestEvent(time=1.0, request="1-a", action="snapshot", outcome="accepted")
    assert reduce_events([done, accepted]).requests["1-a"].outcome == "done"


def test_a_request_is_one_entry_with_its_outcome() -> None:
    accepted = RequestEvent(time=1.0, request="1-a", action="add", machine="b", outcome="accepted")
    refused = RequestEvent(time=2.0, request="1-a", action="add", machine="b", outcome="refused", message="no route")
    assert [entry.text for entry in reduce_events([accepted]).entries] == ["add b accepted"]
    assert [entry.text for entry in reduce_events([accepted, refused]).entries] == ["add b refused: no route"]


@pytest.mark.parametrize(
    ("name", "message", "text"),
    [
        ("a", "features cannot be read", "a: features cannot be read"),
        ("a", "a is lost (silent for 5 s); the others go on", "a is lost (silent for 5 s); the others go on"),
        ("a", "a: no space left", "a: no space left"),
        ("air", "the disk of air is full", "the disk of air is full"),
    ],
)
def test_a_warning_names_its_machine_once(name: str, message: str, text: str) -> None:
    entry = timeline_entry(WarningEvent(member=0, time=1.0, message=message), None)
    assert entry is not None and entry_text(entry, lambda rank: name) == text


def test_what_a_member_reports_of_the_run_is_told_without_its_name() -> None:
    entry = timeline_entry(RunEvent(member=0, time=1.0, status="running"), None)
    assert entry is not None and entry_text(entry, lambda rank: "pc") == "training is under way"
