"""NoLoCo against its equations; who meets whom and what travels; late, unfit, idle, lonely and new members."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from small_models import Vectors, Watched, attached, in_a_group

from profiles.errors import RunFailed
from profiles.schema import StrategySettings
from tests.training.memory_exchange import Late, RoomExchange
from training.exchange.base import SoloExchange
from training.strategies.averaging import islands, shuffled
from training.strategies.costs import RunSpec, SyncSchedule
from training.strategies.noloco import NoLoCo, NoLoCoOptions
from training.strategies.registry import cost_model
from training.strategies.weights import flatten

H, ROUNDS, SEED, SIZE = 2, 3, 0, 128
PAPER = {"outer_lr": 0.7, "outer_momentum": 0.5, "gossip": 0.7}


def change(step: int, rank: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * step + rank))


def pairs(number: int, size: int) -> list[list[int]]:
    return islands(shuffled(range(size), SEED, number), 2)


def partner_of(rank: int, number: int, size: int) -> int | None:
    pair = next(one for one in pairs(number, size) if rank in one)
    return next((other for other in pair if other != rank), None)


def reference(size: int, alpha: float, beta: float, gamma: float, counts: list[float]) -> list[list[torch.Tensor]]:
    """Kolehmainen et al. 2025, the outer step of groups of two: every member's slow weights after each round."""
    phi, delta = [torch.zeros(SIZE) for _ in range(size)], [torch.zeros(SIZE) for _ in range(size)]
    after = []
    for number in range(ROUNDS):
        theta = [one.clone() for one in phi]
        for step, rank in itertools.product(range(number * H, (number + 1) * H), range(size)):
            theta[rank] += change(step, rank)
        outer = [old - new for old, new in zip(phi, theta)]
        following = list(phi)
        for group in pairs(number, size):
            mean_phi = sum(phi[j] for j in group) / len(group)
            mean_outer = sum(counts[j] * outer[j] for j in group) / sum(counts[j] for j in group)
            for i in group:
                delta[i] = alpha * delta[i] - beta * mean_outer - gamma * (phi[i] - mean_phi)
                following[i] = phi[i] + delta[i]
        phi = following
        after.append(list(phi))
    return after


class Training:
    """A member whose steps are given."""

    def __init__(self, exchange: Any, **own: Any) -> None:
        self.warnings: list[str] = []
        self.model, self.exchange = Vectors(), exchange
        more = {name: own.pop(name) for name in ("codec",) if name in own}
        own = {"sync_interval": H, **PAPER, **own}
        self.strategy = attached(NoLoCo, exchange, self.model, self.warnings, owned={"noloco": own}, **more)

    @torch.no_grad()
    def step(self, number: int, by: torch.Tensor | None = None, weight: float | None = None) -> Any:
        rank = self.exchange.rank
        self.strategy.begin_step(number, 1.0 + rank if weight is None else weight)
        moved = change(number, rank) if by is None else by
        self.model.first.add_(moved[:64])
        self.model.second.add_(moved[64:])
        return self.strategy.end_step()

    def weights(self) -> torch.Tensor:
        return flatten(self.model.parameters())


def trained(size: int, late: Late = lambda name: (), **own: Any) -> list[Any]:
    """Return by member its weights after each round, what it reported, and its warnings."""

    def body(exchange: RoomExchange) -> Any:
        member, after, reports = Training(exchange, **own), [], []
        for number in range(ROUNDS * H):
            if (report := member.step(number)) is not None:
                reports.append(report)
                after.append(member.weights())
        return after, reports, member.warnings

    return in_a_group(size, body, late)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "weighting"),
    [(0.5, 0.7, 0.7, "equal"), (0.5, 0.7, 0.7, "samples"), (0.3, 1.0, 1.2, "equal"), (0.0, 0.9, 0.0, "samples")],
)
def test_members_hold_what_the_paper_says(size: int, alpha: float, beta: float, gamma: float, weighting: str) -> None:
    own = {"outer_momentum": alpha, "outer_lr": beta, "gossip": gamma, "weighting": weighting}
    counts = [1.0 + rank if weighting == "samples" else 1.0 for rank in range(size)]
    expected = reference(size, alpha, beta, gamma, counts)
    for rank, (after, _, warnings) in enumerate(trained(size, **own)):
        assert len(after) == ROUNDS and warnings == []
        for number, found in enumerate(after):
            torch.testing.assert_close(found, expected[number][rank], rtol=1e-6, atol=1e-6)


def test_one_member_trains_as_without_a_strategy() -> None:
    plain = sum(change(number, 0) for number in range(5))
    for group in (False, True):

        def body(exchange: Any) -> torch.Tensor:
            member = Training(exchange)
            for number in range(5):
                member.step(number)
            member.strategy.finish()
            return member.weights()

        found = in_a_group(1, body)[0] if group else body(SoloExchange())
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)


# -------------------------------------------------------------------------------------------------- what travels


@pytest.mark.parametrize(("codec", "width"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_two_vectors_go_to_the_partner_and_a_greeting_to_all(codec: str, width: int) -> None:
    def body(exchange: RoomExchange) -> Any:
        watched = Watched(exchange)
        member = Training(watched, codec=codec)
        for number in range(ROUNDS * H):
            member.step(number)
        return watched.given

    for rank, given in enumerate(in_a_group(4, body)):
        met = [tuple(sorted(next(one for one in pairs(number, 4) if rank in one))) for number in range(ROUNDS)]
        assert given == [one for pair in met for one in (((), 0), (pair, width * SIZE), (pair, width * SIZE))]


def test_reports_tell_of_the_pair_and_how_far_its_slow_weights_were_from_their_mean() -> None:
    found = trained(3)
    expected = reference(3, 0.5, 0.7, 0.7, [1.0] * 3)
    for rank, (_, reports, _) in enumerate(found):
        for number, report in enumerate(reports):
            partner = partner_of(rank, number, 3)
            assert (report.round, report.weight_hash) == (number + 1, "")
            assert report.members == sorted({rank, partner} - {None})
            if partner is None or number == 0:
                assert report.drift == (None if partner is None else 0.0)
            else:
                apart = expected[number - 1][rank] - expected[number - 1][partner]
                assert report.drift == pytest.approx(float(apart.abs().max()) / 2, rel=1e-5)


def test_the_gossip_keeps_members_together() -> None:
    def apart(gossip: float) -> float:
        def body(exchange: RoomExchange) -> torch.Tensor:
            member = Training(exchange, gossip=gossip)
            for number in range(2 * H):
                member.step(number)
            for number in range(2 * H, 14 * H):
                member.step(number, by=torch.zeros(SIZE))
            return member.weights()

        return float(torch.stack(in_a_group(4, body)).std(0).max())

    assert apart(0.7) < 0.05 * apart(0.0)


# -------------------------------------------------------------------------------- late, unfit, idle, lonely members


def test_a_pair_of_which_one_is_late_makes_the_outer_step_apart() -> None:
    found = trained(2, lambda name: {1} if name.startswith("noloco/0/") else ())
    for rank, (after, _, warnings) in enumerate(found):
        own = 0.7 * sum(change(number, rank) for number in range(H))
        torch.testing.assert_close(after[0], own, rtol=1e-6, atol=1e-6)
        told = ["round 1: this machine came after the deadline and goes on without a partner"]
        assert warnings == (told if rank == 1 else [])


def test_weights_that_are_not_finite_are_left_out_and_the_third_time_ends_the_member() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(exchange, sync_interval=1)
        try:
            for number in range(3):
                by = torch.ones(SIZE)
                by[70] = torch.nan if exchange.rank == 1 else 1.0
                member.step(number, by=by)
                assert bool(member.weights().isfinite().all())
                if number == 0:
                    assert member.weights().tolist() == pytest.approx([0.7] * SIZE)
        except RunFailed as error:
            return member.warnings, str(error)
        return member.warnings, ""

    (quiet, _), (warnings, failure) = in_a_group(2, body)
    assert quiet == [] and "round 3: the weight second is not finite on this machine, 3 times in a row" in failure
    assert [line.split(" is not")[0] for line in warnings] == [f"round {n}: the weight second" for n in (1, 2)]


def test_who_had_no_samples_counts_for_nothing_and_takes_its_partners_change() -> None:
    def body(exchange: RoomExchange) -> torch.Tensor:
        member = Training(exchange, sync_interval=1)
        member.step(0, by=torch.full((SIZE,), 2.0), weight=float(exchange.rank))
        return member.weights()

    for found in in_a_group(2, body):
        assert found.tolist() == pytest.approx([1.4] * SIZE)


def test_where_nobody_had_samples_weights_stay_as_they_are() -> None:
    def body(exchange: RoomExchange) -> torch.Tensor:
        member = Training(exchange, sync_interval=1)
        member.step(0, by=torch.zeros(SIZE), weight=0.0)
        return member.weights()

    assert all(not found.any() for found in in_a_group(2, body))


def test_who_is_left_alone_trains_on_as_without_a_strategy() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(exchange)
        for number in range(2 * H):
            member.step(number)
        if exchange.rank == 1:
            return exchange.room.leave(1)
        before = member.weights()
        for number in range(2 * H, 4 * H):
            report = member.step(number)
        assert report.members == [0] and report.drift is None
        return member.weights() - before

    moved, _ = in_a_group(2, body)
    plain = sum(change(number, 0) for number in range(2 * H, 4 * H))
    torch.testing.assert_close(moved, plain, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------- evaluation and newcomers


def test_the_mean_of_all_is_evaluated_and_held_in_the_end() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(exchange)
        for number in range(H):
            member.step(number)
        own = member.weights()
        with member.strategy.consensus():
            seen = member.weights()
        assert torch.equal(member.weights(), own)
        with member.strategy.for_newcomer():
            assert torch.equal(member.weights(), own)
        report = member.strategy.finish()
        assert report is not None
        return own, seen, member.weights(), report

    found = in_a_group(4, body)
    mean = sum(own for own, *_ in found) / 4
    assert len({tuple(own.tolist()) for own, *_ in found}) == 2
    for own, seen, last, report in found:
        assert report.drift == float((own - seen).abs().max()) > 0
        torch.testing.assert_close(seen, mean)
        assert torch.equal(last, seen) and torch.equal(last, found[0][2])
        assert report.weight_hash == found[0][3].weight_hash and report.members == [0, 1, 2, 3]


def test_a_newcomer_gets_slow_weights_and_no_momentum() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(exchange)
        for number in range(H + 1):
            member.step(number)
        own, given = member.strategy.tensors(), member.strategy.newcomer_tensors()
        assert bool(own["momentum"].any()) and set(given) == {"slow"}
        fresh = Training(exchange)
        fresh.strategy.load(given, member.strategy.newcomer_state())
        assert torch.equal(fresh.strategy.tensors()["slow"], own["slow"])
        assert not fresh.strategy.tensors()["momentum"].any()
        assert fresh.strategy.state() == member.strategy.state() | {"weight": 0.0}

    in_a_group(2, body)


# --------------------------------------------------------------------------------------------------------- options


def test_a_gossip_that_drives_members_apart_is_refused() -> None:
    for own, most in (({}, 1.5), ({"outer_momentum": 0.9}, 0.38), ({"outer_momentum": 0.0}, 2.0)):
        NoLoCoOptions.model_validate(own | {"gossip": most - 0.01})
        with pytest.raises(ValueError, match="fly apart|less than 2"):
            NoLoCoOptions.model_validate(own | {"gossip": most})


def test_outer_rates_are_the_authors_from_scratch_and_a_plain_mean_for_a_trained_model() -> None:
    assert NoLoCoOptions().rates("scratch") == (0.7, 0.5) and NoLoCoOptions().rates("pretrained") == (1.0, 0.0)
    own = NoLoCoOptions(outer_lr=0.4, outer_momentum=0.2)
    assert own.rates("scratch") == own.rates("pretrained") == (0.4, 0.2)


def test_its_costs_are_two_vectors() -> None:
    settings = StrategySettings.model_validate({"strategy": "noloco", "owned": {"noloco": {"outer_lr": 0.4}}})
    costs = cost_model("noloco", settings)
    assert costs is not None and costs.elements(1000) == 2000
    run = RunSpec(1000, "scratch")
    assert SyncSchedule(50) in list(costs.sync_schedules(run)) and not list(costs.sync_schedules(RunSpec(10)))
    expected = {"noloco.sync_interval": 50, "noloco.outer_lr": 0.4, "noloco.outer_momentum": 0.5}
    assert costs.settings(run, SyncSchedule(50)) == expected | {"error_feedback": False}
    assert costs.learning(run, SyncSchedule(50), 4.0).sources == ("noloco",)


def test_a_plan_reckons_with_what_was_measured_of_a_fine_tune() -> None:
    costs = cost_model("noloco")
    assert costs is not None
    found = costs.learning(RunSpec(240, texts=True), SyncSchedule(24), 4.0)  # docs/reference/strategies.md: noloco / 10
    assert found.share == pytest.approx((1 + 3 * 0.22) / 4) and found.loss == pytest.approx(0.076, abs=0.003)
