"""Operations go on the links in their order, on whatever mesh and however many are begun there at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from coordinated_lab import Lab, cut, lab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.waiting import PATIENCE
from training.exchange.base import ExchangeError, ExchangeTimeout, JoiningState, MeanResult, Pending
from training.exchange.codecs import codec_by_name
from training.exchange.mean.mesh_member import MeshMember

pytestmark = pytest.mark.slow

FP32 = codec_by_name("fp32")
WHISPER_BASE = [2560, 1_048_576, 2048, 1_048_576, 788_992, 788_992, 525_824, 1_048_576]
GPT2 = [2304, 2_359_296, 3072, 2_359_296, 594_432, 1_769_472]
"""Elements of the gradient buckets with which a step begins: one of the weights is longer than a bucket may be."""
NO_RESCUE = {"standstill": 1000.0, "lease": 100.0}
"""What ends an operation that hangs comes too late to help."""


@pytest.mark.parametrize("engine", ["mesh", "nccl"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_begun_at_once_goes_in_the_order_in_which_others_begin_it(
    tmp_path: Path, size: int, engine: str
) -> None:
    with lab(tmp_path, size, engine=engine, **NO_RESCUE) as running:
        members = running.connect_all()
        donor = members[0]
        donor._state_server._after = 0  # as if it waited for a newcomer
        pending = [start_step(member, WHISPER_BASE[:4]) for member in members]
        with donor._changed:
            donor._state_server._after = None
            begun = donor._begin()
        for transfer in begun:
            transfer.submit()
        for results in zip(*pending):
            assert len({result.wait(PATIENCE).mean[0].item() for result in results}) == 1


def start_step(member: MeshMember, sizes: Sequence[int]) -> list[Pending[MeanResult]]:
    own = float(member.rank + 1)
    return [member.start_mean("bucket", torch.full((size,), own), 1.0, FP32) for size in sizes]


@dataclass(frozen=True)
class Course:
    """What happens in a run of three members."""

    sizes: list[int]
    kills: dict[int, int]
    """Before which operation a member is killed, by its rank; it comes back at once."""
    breaks: dict[int, int]
    """Before which operation a member's connections break."""


def train(member: MeshMember, course: Course, seen: list[tuple[int, MeanResult]]) -> None:
    """Do steps as gradients are averaged, all buckets of one under way at once; note number and result of each."""
    sizes, steps = course.sizes, 3
    for _ in range(member.operations // len(sizes), steps):
        if member.must_publish_state:
            member.publish_state(JoiningState({}, {}))
        pending: list[Pending[MeanResult]] = []
        for size in sizes:
            number = member.operations + 1
            if course.kills.get(member.rank) == number:
                seen.clear()  # who is gone may have had a result that the others made again without it
                return cut(member)
            if course.breaks.get(member.rank) == number and member.mesh is not None:
                member.mesh.end()
            pending += start_step(member, [size])
        first = member.operations - len(sizes) + 1
        seen += [(first + index, one.wait(PATIENCE)) for index, one in enumerate(pending)]


def live(running: Lab, course: Course, rank: int) -> list[tuple[int, MeanResult]]:
    """Be a member that is killed and comes back as a newcomer where others are left to let it in."""
    seen: list[tuple[int, MeanResult]] = []
    member = running.members[rank]
    train(member, course, seen)
    if rank in course.kills:
        try:
            member = running.connect(rank)
            member.fetch_state(PATIENCE)
        except ExchangeTimeout:
            raise
        except ExchangeError:  # the others were done before it was back
            return seen
        train(member, Course(course.sizes, {}, {}), seen)
    member.close()
    return seen


@st.composite
def courses(draw: st.DrawFn) -> Course:
    model = draw(st.sampled_from([WHISPER_BASE, GPT2]))
    start = draw(st.integers(0, len(model) - 3))
    sizes = draw(st.permutations(model[start : start + 4]))
    numbers = st.integers(1, 3 * len(sizes) - 1)
    kills = draw(st.dictionaries(st.sampled_from([1, 2]), numbers, min_size=1, max_size=1))
    return Course(sizes, kills, draw(st.dictionaries(st.integers(0, 2), numbers, max_size=1)))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(courses())
def test_kills_joins_and_breaks_hold_nobody_up_whatever_the_buckets_are(tmp_path: Path, course: Course) -> None:
    with lab(tmp_path, 3, **NO_RESCUE) as running, ThreadPoolExecutor(3) as pool:
        running.connect_all()
        seen = [one for part in pool.map(partial(live, running, course), range(3)) for one in part]
    for number in {number for number, _ in seen}:
        results = [result for one, result in seen if one == number]
        assert len({(one.mean[0].item(), one.mean[-1].item(), one.members) for one in results}) == 1
        expected = sum(rank + 1 for rank in results[0].members) / len(results[0].members)
        assert results[0].mean[0].item() == pytest.approx(expected)
