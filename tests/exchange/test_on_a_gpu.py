"""The exchange with tensors of a CUDA device: the bits of the CPU, and NCCL itself."""

from __future__ import annotations

import pytest
import torch
from group_members import Members
from test_codec_bits import SPECIAL, from_bits

from training.exchange.codecs import EncodedVector, chunk_bounds, codec_by_name, roundtrip
from training.exchange.staging import decoded_there, fetch
from training.strategies.parts.outer_optimizers import OuterOptions
from training.strategies.weights import weight_hash

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
GPU = torch.device("cuda", 0)
CODECS = ("fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.05", "topk2bit:0.03")


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("elements", [1, 37, 70_001])
def test_a_codec_has_the_cpus_bytes(name: str, elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    values = torch.randn(elements, generator=generator) * 10.0 ** torch.randint(-9, 9, (elements,), generator=generator)
    values[: len(SPECIAL)] = from_bits(SPECIAL)[:elements]
    codec = codec_by_name(name)
    assert torch.equal(codec.encode(values.to(GPU)), codec.encode(values))


@pytest.mark.parametrize("name", CODECS)
def test_what_the_others_decode_is_known_on_the_gpu(name: str) -> None:
    """Also where magnitudes are equal, as those of gradients in 16 bits are."""
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(1)).mul(8).round()
    codec = codec_by_name(name)
    there = roundtrip(codec, values.to(GPU))
    assert there.device == GPU and torch.equal(there.cpu(), roundtrip(codec, values))


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "mxfp4"])
@pytest.mark.parametrize("elements", [1, 70_001, 5_000_000])
def test_what_the_gpu_encodes_goes_to_the_wire_and_comes_back_as_it_is(name: str, elements: int) -> None:
    values, codec = torch.randn(elements, generator=torch.Generator().manual_seed(2)), codec_by_name(name)
    there = fetch(values.to(GPU), codec)
    assert isinstance(there, EncodedVector) and there.device == GPU
    for start, stop in chunk_bounds(elements):
        assert torch.equal(there.read(start, stop), codec.encode(values[start:stop]))
    assert torch.equal(decoded_there(there).cpu(), there.decode())


@pytest.mark.parametrize("optimizer", ["nesterov", "sgd", "adamw"])
def test_an_outer_step_has_the_cpus_bits(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(3)
    ends = []
    for device in (torch.device("cpu"), GPU):
        outer = OuterOptions(outer_optimizer=optimizer, outer_lr=0.7, outer_momentum=0.9).make_outer(3, "scratch")
        anchor = torch.randn(300_000, generator=generator.manual_seed(4)).to(device)
        outer.attach(anchor)
        for round_ in (1, 2, 3):
            outer.step(anchor, torch.randn(300_000, generator=generator.manual_seed(round_)).to(device), round_)
        ends.append((anchor.cpu(), weight_hash(anchor)))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


WAYS = ("ddp", "fsdp2", "fsdp2_bf16", "tp", "tp_sp", "gpipe", "one_f_one_b", "interleaved")


@pytest.mark.parametrize(("way", "ranks"), [*((way, 2) for way in WAYS), ("hsdp", 4)])
def test_stock_parallel_training_has_the_losses_of_one_process(members: Members, way: str, ranks: int) -> None:
    ours = members.run(f"parallel_cases:on_cuda:{way}", "muster", ranks)
    one = "single" if way != "fsdp2_bf16" else f"parallel_cases:single_bf16:{ranks}"
    of_one = members.run(one, "gloo", 1)[0]
    tolerance = 1e-2 if way == "fsdp2_bf16" else 1e-4
    assert any(ours) and all(not told or told == pytest.approx(of_one, abs=tolerance) for told in ours)


def test_fsdp2_gives_its_state_dict(members: Members) -> None:
    ours = members.run("parallel_cases:on_cuda:fsdp2_state", "muster", 2)[0]
    theirs = members.run("single_state", "gloo", 1)[0]
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name
