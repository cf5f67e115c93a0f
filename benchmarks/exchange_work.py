"""Processor time that an exchange costs the hub and the members: what the planner takes for their speed.

    .venv/bin/python benchmarks/exchange_work.py [--members 2 3] [--megabytes 4 40]

Processor time of whole processes (Linux), so that a busy machine does not change it much. ``Mbit/s`` is payload, in and
out together, over processor seconds: the rate of a process that has a core of its own. A minute or two.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exchange_engines import Members, served


def processor_seconds(process: int) -> float:
    """Return the user and system time of a process so far (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children() -> list[int]:
    """Return this process's children."""
    return [int(child) for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def measure(engine: str, world: int, size: int, repeats: int) -> dict[str, float]:
    """Return processor seconds of one fp32 exchange of ``size`` bytes, for the hub and for the busiest member."""
    with tempfile.TemporaryDirectory() as folder, served(engine, world, size // 4, Path(folder)) as address:
        meeting_point = children()
        members = Members(engine, world, address, Path(folder), "fp32")
        own = [process for process in children() if process not in meeting_point]
        members.measure(size // 4, 1)
        before = {process: processor_seconds(process) for process in (*own, *meeting_point)}
        members.measure(size // 4, repeats)
        # `measure` makes one exchange more than it counts.
        spent = {process: (processor_seconds(process) - before[process]) / (repeats + 1) for process in before}
        members.close()
    hub = sum(spent[process] for process in meeting_point)
    return {"hub": hub, "member": max(spent[process] for process in own)}


def coding_ns(name: str, elements: int = 8_000_000) -> tuple[float, float]:
    """Return the nanoseconds of one core to encode and to decode a parameter, the best of three."""
    import torch

    from training.exchange.codecs import chunk_bounds, codec_by_name

    torch.set_num_threads(1)
    codec, values = codec_by_name(name), torch.randn(elements)
    encoding, decoding = [], []
    for _ in range(3):
        start = time.process_time()
        encoded = [(codec.encode_view(values[a:b]), b - a) for a, b in chunk_bounds(elements)]
        between = time.process_time()
        for data, count in encoded:
            codec.decode(data, count)
        encoding.append(between - start)
        decoding.append(time.process_time() - between)
    return 1e9 * min(encoding) / elements, 1e9 * min(decoding) / elements


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 40])
    arguments = parser.parse_args()
    print("| engine | members | payload | hub, s | hub, Mbit/s | member, s | member, Mbit/s |")
    print("|---|" + " ---: |" * 6)
    for world in arguments.members:
        for megabytes in arguments.megabytes:
            size = megabytes * 1_000_000
            for engine in ("hub", "torch"):
                found = measure(engine, world, size, max(4, 80 // megabytes))
                each = 2 * size if engine == "hub" else 4 * (world - 1) / world * size
                hub = f"{found['hub']:.3f} | {8e-6 * world * each / found['hub']:.0f}" if engine == "hub" else "- | -"
                member = f"{found['member']:.3f} | {8e-6 * each / found['member']:.0f}"
                print(f"| {engine} | {world} | {megabytes} MB | {hub} | {member} |", flush=True)
    print("\n| codec | encode, ns | decode, ns |\n|---| ---: | ---: |")
    for codec in ("fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.03"):
        encode, decode = coding_ns(codec)
        print(f"| {codec} | {encode:.2f} | {decode:.2f} |")


if __name__ == "__main__":
    main()
