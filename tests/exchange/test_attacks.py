"""Means of numbers at random of any size and number of members, and members that are not at the same operation."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from coordinated_lab import cut, lab, means

from training.exchange.base import ExchangeError, MeanResult, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name, roundtrip
from training.exchange.mean.mesh_member import MeshMember

pytestmark = pytest.mark.slow

FP32 = codec_by_name("fp32")
SIZES = [0, 1, 33, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 1_000_001]


def drawn(rank: int, elements: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(100 * seed + rank))


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("codec_name", ["fp32", "int8"])
def test_all_hold_the_bits_of_the_sum_in_rank_order(tmp_path: Path, members: int, codec_name: str) -> None:
    codec = codec_by_name(codec_name)
    with lab(tmp_path, members, elements=max(SIZES)) as running:
        there = running.connect_all()
        for elements in SIZES:
            vectors = [drawn(rank, elements) for rank in range(members)]
            found = means(there, "x", vectors, codec_name)
            terms = [(rank + 1.0, roundtrip(codec, vector)) for rank, vector in enumerate(vectors)]
            expected = roundtrip(codec.reply, weighted_mean(terms))
            assert all(torch.equal(one.mean, expected) and one.weight == sum(range(members + 1)) for one in found)


def test_operations_of_one_name_under_way_at_once_stay_apart(tmp_path: Path) -> None:
    with lab(tmp_path, 3) as running:
        there = running.connect_all()
        vectors = [[drawn(rank, 300_000, seed) for rank in range(3)] for seed in range(3)]
        pending = [[m.start_mean("x", v[m.rank], 1.0, FP32) for m in there] for v in vectors]
        for one, own in zip(reversed(pending), reversed(vectors)):
            expected = weighted_mean([(1.0, vector) for vector in own])
            assert all(torch.equal(result.wait(60).mean, expected) for result in one)


Answer = torch.Tensor | dict[int, bytes]
Work = Callable[[MeshMember], Answer]


def mean_of(elements: int, codec: str = "fp32", name: str = "x", flags: bytes = b"") -> Work:
    return lambda member: member.mean(name, drawn(member.rank, elements), 1.0, codec_by_name(codec), flags).mean


def gather_of(name: str) -> Work:
    return lambda member: member.gather(name, b"%d" % member.rank)


def each_does(folder: Path, works: list[Work], pauses: list[float]) -> tuple[list[Answer | str], list[Answer | str]]:
    """What every member has of its operation, or why it ended, and of one that all do after that."""

    def answers(member: MeshMember, work: Work) -> Answer | str:
        try:
            return work(member)
        except ExchangeError as error:
            return str(error)

    def both(member: MeshMember, work: Work, pause: float) -> tuple[Answer | str, Answer | str]:
        time.sleep(pause)  # members come at different times
        return answers(member, work), answers(member, mean_of(100, name="after"))

    with lab(folder, len(works)) as running, ThreadPoolExecutor(len(works)) as pool:
        found = list(pool.map(both, running.connect_all(), works, pauses))
    return [first for first, _ in found], [second for _, second in found]


def only_the_odd_one_ended(found: list[Answer | str], odd: int, elements: int, codec: str = "fp32") -> str:
    """Check that all but one have the mean of their own vectors; return why the one has ended."""
    honest = [rank for rank in range(len(found)) if rank != odd]
    assert {rank for rank, one in enumerate(found) if isinstance(one, str)} == {odd}, found
    own = codec_by_name(codec)
    terms = [(1.0, roundtrip(own, drawn(rank, elements))) for rank in honest]
    expected = roundtrip(own.reply, weighted_mean(terms))
    for rank in honest:
        mean = found[rank]
        assert isinstance(mean, torch.Tensor) and torch.equal(mean, expected)
    return str(found[odd])


def pauses_of(members: int, seed: int) -> list[float]:
    """Seconds for which each member is later than it could be; nobody is without a seed."""
    chance = random.Random(seed)
    return [chance.choice([0.0, 0.002, 0.02, 0.1, 0.4]) if seed else 0.0 for _ in range(members)]


@pytest.mark.parametrize(("lengths", "parity"), [((3, 4), 0), ((200_000, 200_001), 1), ((200_000, 3), 0), ((1, 0), 1)])
@pytest.mark.parametrize(("members", "odd"), [(n, odd) for n in (3, 4) for odd in range(n)])
def test_a_member_with_another_length_ends_and_the_others_go_on(
    tmp_path: Path, members: int, odd: int, lengths: tuple[int, int], parity: int
) -> None:
    """Each length and each odd one comes with members that are all there at once, and with some that are late."""
    seed = (odd + parity) % 2
    works = [mean_of(lengths[rank == odd]) for rank in range(members)]
    found, after = each_does(tmp_path, works, pauses_of(members, 97 * seed + members + odd if seed else 0))
    why = only_the_odd_one_ended(found, odd, lengths[0])
    only_the_odd_one_ended(after, odd, 100)
    told = {odd: f"{lengths[1]} numbers", (odd != 0) - 1: ""}
    assert re.fullmatch(r"dropped from the group: exchange 1 is .* for machine-\d, but .* for machine-\d: .*", why), why
    assert f"of {lengths[0]} numbers" in why and f"{told[odd]} as fp32 for machine-{odd}" in why


@pytest.mark.parametrize(
    ("elements", "usual", "other", "differs"),
    [
        (300, mean_of(300, "fp16"), mean_of(300, "bf16"), ("fp16 for machine", "bf16 for machine")),
        (200_000, mean_of(200_000, "fp16"), mean_of(200_000, "bf16"), ("fp16 for machine", "bf16 for machine")),
        (200_000, mean_of(200_000, "fp16"), mean_of(200_000, "fp16", "y"), ("'x:1'", "'y:1'")),
        (300, mean_of(300, "fp16"), mean_of(300, "fp16", flags=b"12"), ("fp16 for machine", "with 2 bytes of flags")),
        (300, mean_of(300, "fp16"), gather_of("x"), ("the mean 'x:1'", "the gather 'x:1'")),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_member_at_another_operation_ends_and_hears_what_differs(
    tmp_path: Path, elements: int, usual: Work, other: Work, differs: tuple[str, str], odd: int
) -> None:
    works = [other if rank == odd else usual for rank in range(3)]
    found, after = each_does(tmp_path, works, pauses_of(3, odd + 1))
    why = only_the_odd_one_ended(found, odd, elements, "fp16")
    only_the_odd_one_ended(after, odd, 100)
    assert all(one in why for one in differs) and len(why.splitlines()) == 1


@pytest.mark.parametrize("odd", range(3))
def test_gathers_of_other_names_are_not_taken_for_one_another(tmp_path: Path, odd: int) -> None:
    found, _ = each_does(tmp_path, [gather_of("y" if rank == odd else "x") for rank in range(3)], [0.0] * 3)
    honest = {rank: b"%d" % rank for rank in range(3) if rank != odd}
    assert [one for rank, one in enumerate(found) if rank != odd] == [honest, honest]
    assert "the gather 'x:1'" in str(found[odd]) and "the gather 'y:1'" in str(found[odd])


@pytest.mark.parametrize(("first", "second"), [(mean_of(3), mean_of(4)), (gather_of("x"), gather_of("y"))])
def test_two_members_at_odds_both_end_and_hear_what_differs(tmp_path: Path, first: Work, second: Work) -> None:
    found, _ = each_does(tmp_path, [first, second], [0.0, 0.05])
    assert found[0] == found[1] and re.fullmatch(r".* for machine-0, but .* for machine-1: .*", str(found[0]))


@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("leave", [MeshMember.close, cut])
@pytest.mark.parametrize("sizes", [(5, 70_000), (600_000, 5)])
def test_who_leaves_in_the_middle_of_two_means_costs_the_others_neither(
    tmp_path: Path, sizes: tuple[int, int], leave: Callable[[MeshMember], None], gone: int
) -> None:
    def work(member: MeshMember) -> list[MeanResult]:
        found = []
        for step in range(3):
            own = [drawn(member.rank, size, 2 * step + place) for place, size in enumerate(sizes)]
            pending = [member.start_mean("x", vector, 1.0, FP32) for vector in own]
            if member.rank == gone and step == 1:
                leave(member)
                break
            found += [one.wait(60) for one in pending]
        return found

    with lab(tmp_path, 3) as running, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, running.connect_all()))
    one, other = (results for rank, results in enumerate(found) if rank != gone)
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        terms = [(1.0, drawn(rank, sizes[number % 2], number)) for rank in mine.members]
        assert torch.equal(mine.mean, weighted_mean(terms)) and torch.equal(mine.mean, theirs.mean)
        assert mine.members == theirs.members and {0, 1, 2} - set(mine.members) <= {gone}
    assert len(one) == 6
