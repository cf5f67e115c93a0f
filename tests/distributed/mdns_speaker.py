"""Speaks multicast DNS inside a lab's host: ``mdns_speaker.py serve NAME ADDRESS``, ``... share SLOT ADDRESS`` or
``... flood COUNT ADDRESS``.

``serve`` announces what a Mac with Remote Login does, until its stdin ends, and then says good-bye; ``share`` what a
computer that shares a code with this number does. ``flood`` sends crafted announcements of COUNT names, some of them
broken, and says how many.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
import zlib

from zeroconf import ServiceInfo, Zeroconf

GROUP = ("224.0.0.251", 5353)


SSH = ("_ssh._tcp.local.", "_sftp-ssh._tcp.local.")
SHARE = ("_muster-join._tcp.local.",)


def serve(name: str, address: str, services: tuple[str, ...] = SSH, port: int = 22, slot: str = "") -> None:
    zeroconf = Zeroconf(interfaces=[address])
    properties = {"slot": slot} if slot else {}
    for service in services:
        info = ServiceInfo(
            service, f"{name}.{service}", port=port, server=f"{name}.local.", parsed_addresses=[address],
            properties=properties,
        )  # fmt: skip
        zeroconf.register_service(info, cooperating_responders=True)
    print("ready", flush=True)
    sys.stdin.read()
    zeroconf.close()


def encoded(name: str) -> bytes:
    labels = [label.encode() for label in name.split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def record(name: str, kind: int, data: bytes, ttl: int = 4500) -> bytes:
    return encoded(name) + struct.pack(">HHIH", kind, 1, ttl, len(data)) + data


def response(records: list[bytes]) -> bytes:
    return struct.pack(">6H", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


def announcement(instance: str, address: str, txt: bytes = b"\0", port: int = 22) -> bytes:
    """One whole announcement of an SSH server, as bytes on the wire."""
    service, host = "_ssh._tcp.local", f"host-{zlib.crc32(instance.encode())}.local"
    full = f"{instance}.{service}"
    return response([
        record(service, 12, encoded(full)),
        record(full, 33, struct.pack(">3H", 0, 0, port) + encoded(host)),
        record(full, 16, txt),
        record(host, 1, socket.inet_aton(address)),
    ])  # fmt: skip


def flood(count: int, address: str) -> None:
    dice = random.Random(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
        speaker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        speaker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        speaker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        speaker.bind(("", 5353))
        speaker.sendto(announcement("\x1b[31mevil\x07", address, b"\xff" * 1200), GROUP)
        for number in range(count):
            packet = announcement(f"machine-{number}", f"198.18.200.{number % 250 + 1}", b"\x20" * 800)
            if number % 10 == 0:
                broken = bytearray(packet)
                for _ in range(8):
                    broken[dice.randrange(len(broken))] = dice.randrange(256)
                packet = bytes(broken)
            speaker.sendto(packet, GROUP)
    print("sent", count, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3])
    elif sys.argv[1] == "share":
        serve("stranger", sys.argv[3], SHARE, 7799, sys.argv[2])
    else:
        flood(int(sys.argv[2]), sys.argv[3])
