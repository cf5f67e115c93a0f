"""Processor time that an exchange costs its members: what the planner takes for their speed.

    .venv/bin/python benchmarks/exchange_work.py [--members 2 3 4] [--megabytes 4 40]

Processor time of whole processes, so that a busy machine does not change it much. ``Mbit/s`` is payload, in and out
together, over the processor seconds that it takes a member more than the payload before, without the codec's: the rate
of a process that has a core of its own. The last lines are the constants of ``distributed/planning/cost_model.py``: the
median rate of the largest payload, and what an exchange of nothing takes the smallest group. A minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exchange_engines import Members, served

from distributed.planning.cost_model import codec_seconds

NOTHING = 4000
"""Bytes of an exchange whose time is that of the operation."""


def measure(world: int, sizes: list[int]) -> list[tuple[float, float]]:
    """Return seconds of one fp32 mean and processor seconds of each member, by bytes of the vector."""
    with tempfile.TemporaryDirectory() as folder, served("run", world, max(sizes) // 4, Path(folder)) as address:
        members = Members("run", world, address, Path(folder), "fp32")
        found = [members.measure(size // 4, max(5, 200_000_000 // max(size, 1_000_000))) for size in sizes]
        members.close()
    return [(wall, worked / world) for wall, worked, _ in found]


def coding_ns(name: str, elements: int = 8_000_000) -> tuple[float, float]:
    """Return the nanoseconds of one core to encode and to decode a parameter, the best of three."""
    import torch

    from training.exchange.codecs import chunk_bounds, codec_by_name

    torch.set_num_threads(1)
    codec, values = codec_by_name(name), torch.randn(elements)
    encoding, decoding = [], []
    for _ in range(3):
        start = time.process_time()
        encoded = [(codec.encode(values[a:b]), b - a) for a, b in chunk_bounds(elements)]
        between = time.process_time()
        for data, count in encoded:
            codec.decode(data, count)
        encoding.append(between - start)
        decoding.append(time.process_time() - between)
    return 1e9 * min(encoding) / elements, 1e9 * min(decoding) / elements


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 40])
    arguments = parser.parse_args()
    sizes = [NOTHING, *(1_000_000 * megabytes for megabytes in arguments.megabytes)]
    rates, operations = [], []
    before = (0.0, 0.0)
    print("| members | payload | seconds | member's processor, s | Mbit/s |\n|---|" + " ---: |" * 4)
    for world in arguments.members:
        for size, (wall, worked) in zip(sizes, measure(world, sizes), strict=True):
            now = (8e-6 * 4 * (world - 1) / world * size, worked - codec_seconds(size // 4, "fp32", 1 + 1 / world, 2))
            rate = (now[0] - before[0]) / max(1e-9, now[1] - before[1]) if size != NOTHING else 0.0
            print(f"| {world} | {size / 1e6:g} MB | {wall:.4f} | {worked:.4f} | {rate:.0f} |", flush=True)
            before = now
            if size == NOTHING:
                operations.append(wall)
            elif size == sizes[-1]:
                rates.append(rate)
    print("\n| codec | encode, ns | decode, ns |\n|---| ---: | ---: |")
    for codec in ("fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.03"):
        encode, decode = coding_ns(codec)
        print(f"| {codec} | {encode:.2f} | {decode:.2f} |")
    print(f'\nMEMBER_MBIT["mesh"] = {statistics.median(rates):.0f}\nOPERATION["mesh"] = {operations[0]:.4f}')


if __name__ == "__main__":
    main()
