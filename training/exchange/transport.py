"""gRPC as both ends use it: channel options, method names, and TLS."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import grpc

from profiles.errors import BadInput
from training.exchange.certificates import HUB_NAME, read_credentials
from training.exchange.wire import MAX_MESSAGE_BYTES

SERVICE = "muster.Hub"
CONTROL = f"/{SERVICE}/Control"
BULK = f"/{SERVICE}/Bulk"

_COMMON: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16_384),
    # One frame a chunk instead of 64, and a window that keeps a 10 Gbit/s link busy at 5 ms.
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_min_read_chunk_size", 1 << 16),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
    ("grpc.http2.bdp_probe", 1),
    ("grpc.keepalive_time_ms", 10_000),
    # Who is frozen is lost within this, who is out of reach within the lease of group.py. Not less: where others take
    # the processors, an answer may be late.
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.ssl_target_name_override", HUB_NAME),
    # Channels with equal options share one TCP connection unless each keeps its own pool.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_COMMON,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


def server_credentials(directory: Path) -> Any:
    """Return gRPC server credentials that demand a certificate of the run's own authority."""
    own = read_credentials(directory)
    return grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, require_client_auth=True)


def open_channel(address: str, certificates: Path | None) -> Any:
    """Return a new channel, that is a new TCP connection, to ``host:port``.

    Raises:
        BadInput: unreadable certificates, or none for an address that is not this machine's own.
    """
    if certificates is None:
        require_loopback(address)
        return grpc.insecure_channel(_target(address), CHANNEL_OPTIONS)
    own = read_credentials(certificates)
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    return grpc.secure_channel(_target(address), credentials, CHANNEL_OPTIONS)


def require_loopback(address: str) -> None:
    """Raise ``BadInput`` unless ``host:port`` is a loopback address: only there may traffic go in clear."""
    literal = _literal(address)
    if literal is None or not literal.is_loopback:
        raise BadInput(f"{address}: without certificates only a loopback address is allowed", "issue certificates")


def _target(address: str) -> str:
    """Return gRPC's name for ``host:port``; for a literal address one that no resolver is asked about."""
    literal = _literal(address)
    return address if literal is None else f"ipv{literal.version}:{address}"


def _literal(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None
