"""The time of simulated machines: what steps take, who is away, and that nothing of it depends on who asks."""

from __future__ import annotations

import pytest
import torch

from tests.training.turns import in_turns
from training.exchange.base import JoiningState
from training.exchange.codecs import codec_by_name
from training.simulated.baton import Baton
from training.simulated.clock import Absence, Cost, Timeline
from training.simulated.exchange import OtherMemberFailed, SimulatedExchange, SimulatedGroup


class Seconds:
    """A step takes as many seconds as there are members."""

    def __init__(self, absences: dict[int, Absence]) -> None:
        self.absences = absences

    def cost(self, members: tuple[int, ...], trainable: int, steps: int) -> Cost:
        return Cost(float(len(members)), dict.fromkeys(members, 1.0))


def course(seed: int, often: float = 1 / 20, away: float = 10.0) -> list[tuple[float, list[int], tuple[int, ...]]]:
    """Return time, losses and returns of 50 steps of four members, who meet after each."""
    timeline = Timeline(Seconds(dict.fromkeys(range(4), Absence(often, away))), range(4), 1, 50, seed)
    return [
        (moment.end, sorted(moment.lost), timeline.return_at(step)[1])
        for step in range(1, 51)
        if (moment := timeline.at(step))
    ]


def test_losses_follow_from_the_seed() -> None:
    assert course(1) == course(1) != course(2)


def test_who_is_lost_is_away_for_as_long_as_the_file_says() -> None:
    found = course(1)
    ends = [end for end, _, _ in found]
    lost = {rank: ends[at] for at, (_, ranks, _) in reversed(list(enumerate(found))) for rank in ranks}
    back = {rank: end for end, _, ranks in reversed(found) for rank in ranks}
    assert len(lost) > 1 and back.keys() <= lost.keys()
    assert all(6.0 <= back[rank] - lost[rank] <= 18.0 for rank in back)  # 10 s, and a step at both ends


def test_time_goes_on_where_an_earlier_attempt_ended_and_nobody_is_lost_without_a_word() -> None:
    timeline = Timeline(Seconds({}), range(3), 1, 100, step=40, seconds=500.0)
    assert [timeline.at(step).end for step in (41, 42)] == [503.0, 506.0] and not timeline.at(99).lost


def test_the_last_member_stays() -> None:
    timeline = Timeline(Seconds(dict.fromkeys(range(4), Absence(10.0, 1e6))), range(4), 1, 50)
    assert len([rank for step in range(1, 51) for rank in timeline.at(step).lost]) == 3


def test_a_loss_and_a_return_are_what_the_others_see_in_a_real_run() -> None:
    """Member 1 is lost before the second mean, and is let in after it with what the lowest one hands over."""
    baton, steps = Baton(torch.device("cpu")), [0, 0, 0]
    room = SimulatedGroup(3, baton, lambda rank: (steps[rank], 0, (1,) if steps[rank] == 2 else ()))

    def mean(exchange: SimulatedExchange) -> tuple[float, tuple[int, ...]]:
        steps[exchange.rank] += 1
        result = exchange.mean("m", torch.full((4,), float(exchange.rank**2)), 1.0, codec_by_name("fp32"))
        if exchange.must_publish_state:
            exchange.publish_state(JoiningState({"w": torch.ones(2)}, {"step": steps[exchange.rank]}))
        return float(result.mean[0]), result.members

    def trained(rank: int) -> list[tuple[float, tuple[int, ...]]]:
        exchange, found = SimulatedExchange(room, rank), []
        if rank == 1:
            found.append(mean(exchange))
            room.lose(rank)
            exchange = SimulatedExchange(room, rank)
            anchor = exchange.fetch_state()
            assert exchange.is_newcomer and torch.equal(anchor.tensors["w"], torch.ones(2))
            steps[rank] = anchor.state["step"]
        while steps[rank] < 3:
            found.append(mean(exchange))
        return found

    found = in_turns(room, baton, 3, trained)
    all_there, without = (pytest.approx(5 / 3), (0, 1, 2)), (2.0, (0, 2))
    assert found[0] == found[2] == [all_there, without, all_there] and found[1] == [all_there, all_there]


def test_who_is_away_at_the_end_hears_of_it() -> None:
    room = SimulatedGroup(2, baton := Baton(torch.device("cpu")))

    def trained(rank: int) -> object:
        if rank == 0:
            room.lose(rank)
        exchange = SimulatedExchange(room, rank)
        return exchange.gather("a", b"")

    away, _ = in_turns(room, baton, 2, trained)
    assert isinstance(away, OtherMemberFailed) and "ended while it was away" in str(away)
