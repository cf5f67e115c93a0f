"""The mean by owners: the same bits on all members and for every choice of shards, held to a reference of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_reference import contribution, stream_means
from test_mesh import PATIENCE, Group

from training.exchange.base import Contribution, MeanResult
from training.exchange.codecs import CHUNK_ELEMENTS, EncodedVector, chunk_bounds, codec_by_name, roundtrip
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.links.link import PeerLost
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.owners import OneRoundMean, OwnedMean, shard_bounds
from training.exchange.residuals import MeanEncoder, MeanResiduals

pytestmark = pytest.mark.slow

CODECS = ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.05"]
EQUAL = {0: 1.0, 1: 1.0, 2: 1.0}
SHARES = [EQUAL, {0: 0.0, 1: 1.0, 2: 0.0}, {0: 0.1, 1: 3.0, 2: 0.7}, None]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Mesh]]:
    folder: Path = tmp_path_factory.mktemp("certificates")
    issue_run_certificates(folder, "run", range(3), ["127.0.0.1"])
    group = Group(3, folder)
    yield group.form()
    group.close()


def values_of(rank: int, elements: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(10 * seed + rank + 1))


def means(
    three: list[Mesh],
    vectors: list[torch.Tensor],
    codec: str,
    weights: list[float],
    shards: dict[int, float] | None = EQUAL,
    flags: list[bytes] | None = None,
    stream: str = "",
    residuals: list[MeanResiduals] | None = None,
    encoded: Sequence[int] = (),
) -> list[MeanResult]:
    """By owners, or without shards in one round; the vectors of the ranks ``encoded`` come from devices."""
    kept = residuals or [MeanResiduals() for _ in three]
    own = [
        Contribution("name:1", vector.clone(), weight, codec_by_name(codec), flag, stream).checked()
        for vector, weight, flag in zip(vectors, weights, flags or [b""] * len(vectors))
    ]
    for rank in encoded:
        vector = EncodedVector(own[rank].codec, own[rank].elements, torch.device("cpu"))
        vector.write(0, vector.elements, vector.codec.encode(vectors[rank]))
        own[rank] = replace(own[rank], values=torch.empty(0), vector=vector)
    into = [None if one.vector is None else one.vector.empty_like() for one in own]
    if shards is None:
        shared = [OneRoundMean(mesh, one, left, mesh.members) for mesh, one, left in zip(three, own, kept)]
        number = three[0].started + 1
        for operation in [
            mesh.gather(one.message, one.buffers, one.note_received, None, number).submit()
            for mesh, one in zip(three, shared)
        ]:
            operation.wait(PATIENCE)
        return [_decoded(one.complete(one.outcome(), mean), mean) for one, mean in zip(shared, into)]
    reductions = [OwnedMean(mesh, one, left, shards) for mesh, one, left in zip(three, own, kept)]
    for operation in [mesh.reduce(reduction) for mesh, reduction in zip(three, reductions)]:
        operation.wait(PATIENCE)
    return [_decoded(one.complete(one.outcome(), mean), mean) for one, mean in zip(reductions, into)]


def _decoded(result: MeanResult, encoded: EncodedVector | None) -> MeanResult:
    return result if encoded is None else replace(result, mean=encoded.decode())


def reference(vectors: list[torch.Tensor], codec: str, weights: list[float]) -> torch.Tensor:
    """Chunk by chunk, with separate products and sums in rank order."""
    chosen, out = codec_by_name(codec), torch.empty_like(vectors[0])
    for start, stop in chunk_bounds(len(out)):
        total = torch.zeros(stop - start)
        first = True
        for vector, weight in zip(vectors, weights):
            if weight:
                term = chosen.decode(chosen.encode(vector[start:stop]), stop - start) * (weight / sum(weights))
                total = term if first else total + term
                first = False
        out[start:stop] = chosen.reply.decode(chosen.reply.encode(total), stop - start) if stop > start else total
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("elements", [1, 1000, CHUNK_ELEMENTS + 77, 700_003])
def test_bits_are_the_references_for_every_choice_of_shards(three: list[Mesh], codec: str, elements: int) -> None:
    vectors, weights = [values_of(rank, elements) for rank in range(3)], [1.0, 0.0, 2.5]
    right = reference(vectors, codec, weights)
    for shards in SHARES if elements <= CHUNK_ELEMENTS else SHARES[:-1]:  # what is longer never goes in one round
        for result in means(three, vectors, codec, weights, shards):
            assert torch.equal(result.mean, right)
            assert (result.weight, result.members, result.included) == (3.5, (0, 1, 2), True)


@pytest.mark.parametrize("codec", ["bf16", "mxfp4", "int8"])
@pytest.mark.parametrize("elements", [1, 1000, 700_003])
@pytest.mark.parametrize("stream", ["", "s"])
def test_what_a_device_has_encoded_gives_the_same_bits(
    three: list[Mesh], codec: str, elements: int, stream: str
) -> None:
    vectors, weights = [values_of(rank, elements) for rank in range(3)], [1.0, 0.5, 2.5]
    for shards in [SHARES[0]] if stream or elements > CHUNK_ELEMENTS else [SHARES[0], None]:
        plain = means(three, vectors, codec, weights, shards, stream=stream)
        for result in means(three, vectors, codec, weights, shards, stream=stream, encoded=(0, 2)):
            assert torch.equal(result.mean, plain[0].mean)
            assert (result.weight, result.members, result.included) == (4.0, (0, 1, 2), True)


@given(
    st.integers(0, 5000),
    st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6).filter(lambda shards: sum(shards) > 1e-3),
    st.sampled_from([1, 32, 300]),
)
def test_shards_are_whole_blocks_without_gaps(elements: int, shards: list[float], block: int) -> None:
    bounds = shard_bounds(elements, dict(enumerate(shards)), block)
    edges = [bounds[rank] for rank in sorted(bounds)]
    assert edges[0][0] == 0 and edges[-1][1] == elements
    assert all(one[1] == other[0] for one, other in itertools.pairwise(edges))
    assert all(start <= stop and (start % block == 0 or start == elements) for start, stop in edges)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_whoever_is_not_finite_is_left_out_and_named_to_all(three: list[Mesh], data: st.DataObject) -> None:
    elements = data.draw(st.sampled_from([5, 40_000]))
    bad = data.draw(st.sets(st.integers(0, 2)))
    vectors = [values_of(rank, elements) for rank in range(3)]
    for rank in bad:
        vectors[rank][data.draw(st.integers(0, elements - 1))] = float("nan")
    flags = [bytes([1 << rank]) for rank in range(3)]
    good = [rank for rank in range(3) if rank not in bad]
    shards = data.draw(st.sampled_from([EQUAL, None]))
    results = means(three, vectors, "fp32", [1.0, 2.0, 3.0], shards, flags)
    right = reference([vectors[rank] for rank in good], "fp32", [rank + 1.0 for rank in good]) if good else None
    for rank, result in enumerate(results):
        assert result.refused == tuple(sorted(bad))
        assert result.is_finite == (rank not in bad)
        assert result.flags == bytes([sum(1 << one for one in good)])
        assert result.weight == sum(one + 1.0 for one in good)
        if right is not None:
            assert torch.equal(result.mean, right)


def test_a_member_that_lies_about_its_numbers_is_left_out_by_the_owner(three: list[Mesh]) -> None:
    vectors = [values_of(rank, 90_000) for rank in range(3)]
    kept = [MeanResiduals() for _ in three]
    own = [Contribution("name:1", vector.clone(), 1.0, codec_by_name("fp32")).checked() for vector in vectors]
    reductions = [OwnedMean(mesh, own[r], kept[r], EQUAL) for r, mesh in enumerate(three)]
    own[2].values[5] = float("inf")  # in the shard of member 0, after it was looked at
    for operation in [mesh.reduce(reduction) for mesh, reduction in zip(three, reductions)]:
        operation.wait(PATIENCE)
    results = [reduction.complete(reduction.outcome()) for reduction in reductions]
    assert {result.refused for result in results} == {(2,)}
    assert all(torch.equal(results[0].mean, result.mean) and result.mean.isfinite().all() for result in results)
    assert results[2].left_out and not results[0].left_out


@pytest.mark.parametrize("codec", ["bf16", "mxfp4", "topk:0.05"])
def test_what_owners_lose_is_kept_for_the_next_mean_of_the_stream(three: list[Mesh], codec: str) -> None:
    kept = [MeanResiduals() for _ in three]
    for number, expected in enumerate(stream_means(codec, 70_000, 3, 4)):
        vectors = [contribution(rank, number, 70_000) for rank in range(3)]
        for result in means(three, vectors, codec, [1.0, 1.0, 1.0], stream="s", residuals=kept):
            assert torch.equal(result.mean, expected)


def test_what_an_owner_has_kept_follows_it_when_shards_change() -> None:
    kept, codec = MeanResiduals(), codec_by_name("bf16")
    values = values_of(0, 300)

    def settle(*pieces: tuple[int, int]) -> None:
        encoder = MeanEncoder(kept, "s", codec)
        for start, stop in pieces:
            encoder.encode(start, values[start:stop])
        encoder.settle()

    settle((0, 100), (100, 200))
    before = kept.between("s", 0, 300)
    assert before is not None and before[:200].abs().max() > 0 and not before[200:].any()
    settle((50, 250))
    total = values[50:250] + before[50:250]
    after = kept.between("s", 0, 300)
    assert after is not None and not after[:50].any()
    assert torch.equal(after[50:250], total - roundtrip(codec, total))


def test_a_member_at_another_exchange_is_found_out(three: list[Mesh], tmp_path: Path) -> None:
    issue_run_certificates(tmp_path, "run", range(2), ["127.0.0.1"])
    group = Group(2, tmp_path)
    meshes = group.form()
    vectors = [values_of(rank, 50_000) for rank in range(2)]
    operations = [
        mesh.reduce(
            OwnedMean(
                mesh,
                Contribution(f"name:{rank}", vectors[rank], 1.0, codec_by_name("fp32")).checked(),
                MeanResiduals(),
                {0: 1, 1: 1},
            )
        )
        for rank, mesh in enumerate(meshes)
    ]
    for one in operations:
        with pytest.raises(Exception, match="is at another exchange than the mean 'name:"):
            one.wait(PATIENCE)
    group.close()


def test_the_vector_that_was_given_is_not_touched(three: list[Mesh]) -> None:
    vectors = [values_of(rank, 100) for rank in range(3)]
    before = [vector.clone() for vector in vectors]
    means(three, vectors, "bf16", [1.0, 1.0, 1.0])
    assert all(torch.equal(vector, same) for vector, same in zip(vectors, before))
    assert torch.equal(roundtrip(codec_by_name("fp32"), before[0]), before[0])


def test_whose_contribution_cannot_be_is_named_on_whichever_link_that_is_found(three: list[Mesh]) -> None:
    own = Contribution("name:1", values_of(0, 90_000), 1.0, codec_by_name("fp32"))
    reduction = OwnedMean(three[0], own, MeanResiduals(), EQUAL)
    sizes = {1: 3, 2: len(reduction.contribution_buffer(2, 0))}
    reduction.contribution_buffer(1, 0)
    with pytest.raises(PeerLost, match="are too few") as raised:
        reduction.reduce_piece(0, sizes)
    assert raised.value.rank == 1
