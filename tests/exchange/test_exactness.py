"""Whatever breaks in the middle of operations, a result is everybody's, and the arithmetic of exactly its members."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from coordinated_lab import Lab, cut, lab
from stream_reference import contribution, stream_means

from tests.waiting import PATIENCE
from training.exchange.base import ExchangeError, MeanResult, Pending, weighted_mean
from training.exchange.codecs import codec_by_name, roundtrip

pytestmark = pytest.mark.slow

CODECS = ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.05"]


def reference(vectors: list[torch.Tensor], codec_name: str, members: tuple[int, ...]) -> torch.Tensor:
    codec = codec_by_name(codec_name)
    return roundtrip(codec.reply, weighted_mean([(rank + 1.0, roundtrip(codec, vectors[rank])) for rank in members]))


def gone_in_the_middle(running: Lab, chance: random.Random, codec_name: str, operations: int = 5) -> None:
    """Start operations, lose some members at any moment, and hold the survivors' results to the definition."""
    members = running.connect_all()
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    sizes = [chance.choice([1, 40, 5_000, 150_000]) for _ in range(operations)]
    vectors = [[torch.randn(size, generator=generator) for _ in members] for size in sizes]
    lost = chance.sample(range(len(members)), chance.randrange(1, len(members)))
    moments = sorted(chance.random() * 0.08 for _ in lost)

    def lose() -> None:
        begin = time.monotonic()
        for rank, moment in zip(lost, moments):
            time.sleep(max(0.0, begin + moment - time.monotonic()))
            cut(members[rank])

    killer = threading.Thread(target=lose)
    codec = codec_by_name(codec_name)
    pending: list[dict[int, Pending[MeanResult]]] = []
    killer.start()
    for number, size in enumerate(sizes):
        pending.append({})
        for member in members:
            own = vectors[number][member.rank]
            try:
                pending[-1][member.rank] = member.start_mean(f"x/{size}", own, member.rank + 1.0, codec)
            except ExchangeError:
                assert member.rank in lost
    alive = [member.rank for member in members if member.rank not in lost]
    for number, operation in enumerate(pending):
        results: list[MeanResult] = [operation[rank].wait(PATIENCE) for rank in alive]
        assert len({result.members for result in results}) == 1 and set(alive) <= set(results[0].members)
        expected = reference(vectors[number], codec_name, results[0].members)
        assert all(torch.equal(result.mean, expected) for result in results)
        assert all(result.included for result in results)
    killer.join()


@pytest.mark.parametrize("engine", ["mesh", "nccl"])
@pytest.mark.parametrize("seed", range(4))
def test_survivors_hold_the_same_bits(tmp_path: Path, seed: int, engine: str) -> None:
    chance = random.Random(seed)
    with lab(tmp_path, chance.choice([2, 3, 4]), lease=100.0, engine=engine) as running:
        gone_in_the_middle(running, chance, CODECS[seed % len(CODECS)])


@pytest.mark.parametrize("codec_name", ["int8", "mxfp4", "topk:0.05"])
def test_rounds_that_are_repeated_owe_no_more_and_no_less(tmp_path: Path, codec_name: str) -> None:
    """Connections break, nobody is lost: the stream is the one of a run in which nothing broke."""
    elements, rounds, chance = 90_040, 4, random.Random(1)
    expected, codec = stream_means(codec_name, elements, 3, rounds), codec_by_name(codec_name)
    with lab(tmp_path, 3, lease=100.0) as running:
        members = running.connect_all()
        for number in range(rounds):
            pending = [
                m.start_mean("s", contribution(m.rank, number, elements), 1.0, codec, stream="s") for m in members
            ]
            time.sleep(chance.random() * 0.01)
            mesh = members[chance.randrange(3)].mesh
            if mesh is not None:
                chance.choice(mesh.links()).cut()
            assert all(torch.equal(p.wait(PATIENCE).mean, expected[number]) for p in pending)
        assert running.coordinator.group.epoch > 1
