"""Operations of some members only: islands side by side, pairs that change, and what a loss does to them."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from coordinated_lab import cut, lab

from tests.training.memory_exchange import RoomExchange, together
from training.exchange.base import ExchangeError
from training.exchange.codecs import codec_by_name
from training.exchange.coordinator_protocol import HeldResults
from training.exchange.mean.handover import holders_of_recomputed, plan_transfers
from training.exchange.mean.mesh_member import MeshMember

pytestmark = pytest.mark.slow

FP32 = codec_by_name("fp32")


def partners(rank: int, number: int) -> tuple[int, int]:
    """Another partner of four every round."""
    other = rank ^ (1 + number % 3)
    return min(rank, other), max(rank, other)


@pytest.mark.parametrize("elements", [3, 200_000])
def test_islands_and_pairs_average_side_by_side(tmp_path: Path, elements: int) -> None:
    with lab(tmp_path, 4) as running:
        members = running.connect_all()
        for number in range(4):
            pending = [
                m.start_mean("p", torch.full((elements,), float(m.rank)), 1.0, FP32, members=partners(m.rank, number))
                for m in members
            ]
            for member, one in zip(members, pending):
                group = partners(member.rank, number)
                result = one.wait(60)
                assert result.members == group and torch.equal(result.mean, torch.full((elements,), sum(group) / 2))
        gathered = [m.start_gather("g", b"%d" % m.rank, members=[m.rank % 2, m.rank % 2 + 2]) for m in members]
        assert [sorted(one.wait(60)) for one in gathered] == [[0, 2], [1, 3], [0, 2], [1, 3]]
        whole = [m.start_gather("w", b"") for m in members]
        assert all(sorted(one.wait(60)) == [0, 1, 2, 3] for one in whole) and members[0].members == (0, 1, 2, 3)


def test_a_loss_ends_the_operation_of_its_group_and_leaves_the_others_results(tmp_path: Path) -> None:
    with lab(tmp_path, 4, lease=100.0) as running:
        members = running.connect_all()
        island = [(0, 1), (0, 1), (2, 3), (2, 3)]
        one = [m.start_mean("x", torch.tensor([float(m.rank)]), 1.0, FP32, members=island[m.rank]) for m in members[:3]]
        assert [p.wait(60).mean.item() for p in one[:2]] == [0.5, 0.5]
        cut(members[3])
        assert one[2].wait(60).mean.item() == 2.0 and one[2].wait(60).members == (2,)
        whole = [m.start_mean("w", torch.tensor([float(m.rank)]), 1.0, FP32) for m in members[:3]]
        assert {(p.wait(60).mean.item(), p.wait(60).members) for p in whole} == {(1.0, (0, 1, 2))}


def test_who_is_in_no_group_of_its_own_is_refused(tmp_path: Path) -> None:
    with lab(tmp_path, 1) as running, pytest.raises(ValueError, match="none of"):
        running.connect_all()[0].start_gather("x", b"", members=[1, 2])


def test_members_of_one_process_average_in_groups_alike() -> None:
    def body(member: RoomExchange) -> list[float]:
        values = torch.tensor([float(member.rank)])
        return [member.mean("p", values, 1.0, FP32, members=partners(member.rank, n)).mean.item() for n in range(3)]

    found, _ = together(4, body)
    assert found == {rank: [sum(partners(rank, number)) / 2 for number in range(3)] for rank in range(4)}


def test_a_result_goes_to_its_group_alone() -> None:
    told = {
        0: HeldResults(full=5, dropped=0, results=((4, (), (0, 1, 2, 3)), (5, (0, 1), (0, 1)))),
        1: HeldResults(full=4, dropped=0, results=((4, (), (0, 1, 2, 3)),)),
        2: HeldResults(full=3, dropped=0, results=((5, (2, 3), (2, 3)),)),
        3: HeldResults(full=4, dropped=0, results=((4, (), (0, 1, 2, 3)), (5, (2, 3), (3,)))),
    }
    assert plan_transfers(told) == [(4, 0, 2), (5, 0, 1)]
    assert holders_of_recomputed(told) == {2}


@pytest.mark.parametrize(
    ("groups", "gone", "told"),
    [
        ([(0, 1), (1, 2), (0, 2)], {0, 1, 2}, r"ranks \d, \d for machine-\d, but ranks \d, \d for machine-\d"),
        ([(0, 1), (0, 1), (1, 2)], {2}, r"ranks 0, 1 for machine-1, but ranks 1, 2 for machine-2"),
        ([None, (1, 2), (1, 2)], {0}, r"all members for machine-0, but ranks 1, 2 for machine-1"),
        ([None, None, None, (0, 3)], {3}, r"all members for machine-0, but ranks 0, 3 for machine-3"),
    ],
)
@pytest.mark.parametrize("kind", ["gather", "small", "large"])
def test_who_is_at_odds_with_the_others_about_a_group_ends_and_hears_why(
    tmp_path: Path, groups: list[tuple[int, ...] | None], gone: set[int], told: str, kind: str
) -> None:
    with lab(tmp_path, len(groups)) as running:
        members = running.connect_all()
        for pending in [m.start_gather("before", b"") for m in members]:
            pending.wait(60)

        def failed(member: MeshMember, group: tuple[int, ...] | None) -> str:
            size = {"small": 9, "large": 200_000}.get(kind, 0)
            try:
                if size:
                    member.mean("x", torch.ones(size), 1.0, FP32, members=group)
                else:
                    member.gather("x", b"%d" % member.rank, members=group)
                member.gather("after", b"")  # a pair that agreed has its result
            except ExchangeError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(groups)) as pool:
            errors = dict(enumerate(pool.map(failed, members, groups)))
        assert {rank for rank, error in errors.items() if error} == gone, errors
        (error,) = {errors[rank] for rank in gone}
        assert re.fullmatch(f"dropped from the group: exchange 2 is of {told}: .*", error)
