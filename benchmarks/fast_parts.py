"""Processor time of what is done to every weight of an exchange, beside plain ways to do it and beside a copy.

    .venv/bin/python benchmarks/fast_parts.py [--million 2] [--turns 15] [--part mxfp4]

One thread's processor time in ms for a million weights, medians. All ways of a part and the copy take turns in one
process, so that what else a machine does changes their ratios little: medians of each turn's. Half a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.exchange.codecs import all_finite, chunk_bounds, codec_by_name
from training.strategies.parts.outer_optimizers import Nesterov
from training.strategies.weights import differences, weight_hash

Way = Callable[[], object]


def scaled(values: torch.Tensor, exponent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and scaled blocks of 32 by floating-point operations alone."""
    blocks = values.view(-1, 32)
    exponents = blocks.abs().amax(1).view(torch.int32) >> 23
    if int(exponents.max()) == 255:
        raise ValueError("not finite")
    scales = (exponents - exponent).clamp_(min=2)
    return scales.to(torch.uint8), blocks * ((254 - scales) << 23).view(torch.float32).unsqueeze(1)


def plain_mxfp4(values: torch.Tensor) -> torch.Tensor:
    """Encode as mxfp4 by truncating eighths and comparing what was cut off (the table has other bytes; same work)."""
    scales, blocks = scaled(values, 2)
    eighths = blocks.mul_(8.0)
    key = eighths.to(torch.int8)
    inexact = (eighths != key.to(torch.float32)).view(torch.int8)
    key.add_(key).add_(inexact)
    pairs = key.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF).view(-1)
    return torch.cat([scales, _TABLE.index_select(0, pairs)])


_TABLE = torch.arange(65_536).to(torch.uint8)


def plain_int8(values: torch.Tensor) -> torch.Tensor:
    """Encode as int8 by rounding."""
    scales, blocks = scaled(values, 6)
    return torch.cat([scales, blocks.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8).view(-1)])


def plain_int8_decoding(data: torch.Tensor, elements: int) -> torch.Tensor:
    """Decode int8, looking for the number that cannot be."""
    scales, packed = data[: elements // 32], data[elements // 32 :]
    if int(scales.min()) < 1 or int(scales.max()) > 248 or bool((packed == 0x80).any()):
        raise ValueError("impossible")
    numbers = packed.view(torch.int8).to(torch.float32).view(-1, 32)
    return numbers.mul_((scales.to(torch.int32) << 23).view(torch.float32).unsqueeze(1))


def plain_topk(values: torch.Tensor) -> torch.Tensor:
    """Select and sort the positions of the 3 % largest."""
    assert bool(torch.isfinite(values).all())
    return values.abs().topk(int(0.03 * values.numel()), sorted=False).indices.sort().values


def plain_nesterov(anchor: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor) -> None:
    """Do an outer step with whole vectors."""
    momentum.mul_(0.9).add_(mean)
    update = momentum * 0.9
    anchor.sub_(update.add_(mean).mul_(0.7))


def plain_differences(own: torch.Tensor, mean: torch.Tensor) -> float:
    """Compare whole vectors, with sums in fp64."""
    apart = own - mean
    for vector in (own, mean, apart):
        float(torch.linalg.vector_norm(vector)), float(vector.sum(dtype=torch.float64))
    return float(torch.linalg.vector_norm(apart, math.inf))


def each(way: Callable[..., object], chunks: list[tuple[object, ...]]) -> Callable[[], None]:
    """Return what goes through all chunks and drops what comes of them."""

    def through() -> None:
        for chunk in chunks:
            way(*chunk)

    return through


def parts(values: torch.Tensor) -> dict[str, list[Way]]:
    """Return the way that is used and, where there is another, the plain one, by the name of a part."""
    found: dict[str, list[Way]] = {}
    plain = {"mxfp4": plain_mxfp4, "int8": plain_int8, "topk:0.03": plain_topk}
    pieces = [values[start:stop] for start, stop in chunk_bounds(values.numel())]
    for name in ("bf16", "int8", "mxfp4", "topk:0.03"):
        codec = codec_by_name(name)
        coded = [(codec.encode(piece), piece.numel()) for piece in pieces]
        found[f"{name} encode"] = [each(way, [(p,) for p in pieces]) for way in (codec.encode, plain.get(name)) if way]
        ways = (codec.decode, plain_int8_decoding if name == "int8" else None)
        found[f"{name} decode"] = [each(way, coded) for way in ways if way]
    others, outer = (torch.randn_like(values), torch.randn_like(values)), Nesterov(0.7, 0.9)
    outer.attach(values)
    found["outer step"] = [
        lambda: outer.step(values, others[1], 1),
        lambda: plain_nesterov(values, *others),
    ]
    found["drift and correlation"] = [
        lambda: differences(values, others[1]),
        lambda: plain_differences(values, others[1]),
    ]
    array = values.numpy()
    found["weight hash"] = [lambda: weight_hash(values), lambda: hashlib.blake2b(array.data, digest_size=8).digest()]
    found["finite scan"] = [lambda: all_finite(values), lambda: bool(values.isfinite().all())]
    return found


def spent(way: Way) -> float:
    """Return the processor seconds of this thread."""
    start = time.thread_time()
    way()
    return time.thread_time() - start


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=2.0, help="weights")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--part", default="", help="only those with this in their name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(int(arguments.million * 1e6) // 32 * 32)
    print("| part | ms | of a copy | plain way, ms | plain / used | copy, ms |\n|---|" + " ---: |" * 5)
    for name, ways in parts(values).items():
        if arguments.part not in name:
            continue
        turns = [[spent(way) for way in (values.clone, *ways)] for _ in range(arguments.turns + 1)][1:]
        copy, used, *plain = (1e9 * statistics.median(column) / values.numel() for column in zip(*turns, strict=True))
        over = statistics.median(turn[1] / turn[0] for turn in turns)
        beside = f"{plain[0]:.2f} | {statistics.median(turn[2] / turn[1] for turn in turns):.1f}" if plain else "- | -"
        print(f"| {name} | {used:.2f} | {over:.1f} | {beside} | {copy:.2f} |", flush=True)


if __name__ == "__main__":
    main()
