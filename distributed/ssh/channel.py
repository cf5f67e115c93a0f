"""Nothing is sent on an SSH channel after its CLOSE.

paramiko makes a channel's message under the channel's lock and sends it after that (paramiko issue 1115). Where the far
side closes in between, the end of a command's input goes out after the CLOSE, and OpenSSH ends the whole connection for
it ("Received ieof for nonexistent channel"). Several threads that run short commands meet it within seconds.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import paramiko

_CLOSE = 97
"""SSH_MSG_CHANNEL_CLOSE (RFC 4254, 9)."""
_C = TypeVar("_C")


def in_order(channel: _C) -> _C:
    """Let a channel drop what its threads would send once it is closed; returns the channel."""
    made: Any = channel
    made.transport = _Sender(made.transport, made)
    return channel


class _Sender:
    """What a channel takes for its transport."""

    def __init__(self, transport: Any, channel: Any) -> None:
        self._transport = transport
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_user_message(self, message: Any) -> None:
        """Send with the channel's lock held; but never wait for new keys with it, as what brings them may want it."""
        transport = self._transport
        if message.asbytes()[0] == _CLOSE:
            transport._send_user_message(message)
            return
        end = time.monotonic() + transport.clear_to_send_timeout
        while transport.active:
            transport.clear_to_send.wait(0.1)
            with self._channel.lock, transport.clear_to_send_lock:
                if self._channel.closed:
                    return
                if transport.clear_to_send.is_set():
                    transport._send_message(message)
                    return
            if time.monotonic() > end:
                raise paramiko.SSHException("new keys were not agreed on in time")
