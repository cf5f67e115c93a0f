"""The exchange with tensors of a CUDA device: the bits of the CPU, and NCCL itself."""

from __future__ import annotations

import pytest
import torch
from group_members import Members
from test_codec_bits import SPECIAL, from_bits

from training.exchange.codecs import codec_by_name, roundtrip

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
