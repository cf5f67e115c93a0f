"""What threads send on an SSH channel goes out in order: nothing after its CLOSE.

paramiko makes a channel's message under the channel's lock and sends it after that (paramiko issue 1115). Where the far
side closes in between, the end of a command's input goes out after the CLOSE, and OpenSSH ends the whole connection for
it ("Received ieof for nonexistent channel"). Several threads that run short commands meet it within seconds.

The thread that receives answers a CLOSE as well. While new keys are agreed on it waited for what it alone could bring,
for half a minute, and then gave the connection up.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any, TypeVar

_CLOSE = 97
"""SSH_MSG_CHANNEL_CLOSE (RFC 4254, 9)."""
_C = TypeVar("_C")


def in_order(channel: _C) -> _C:
    """Let a channel drop what its threads would send once it is closed; returns the channel."""
    wrapped: Any = channel
    wrapped.transport = _Sender(wrapped.transport, wrapped)
    return channel


class _Sender:
    """What a channel takes for its transport."""

    def __init__(self, transport: Any, channel: Any) -> None:
        self._transport = transport
        self._channel = weakref.ref(channel)
        """No circle: who drops a channel closes it, and not whoever collects garbage, with what locks he may hold."""
        self._turn = threading.Lock()
        """Not the channel's own lock: who receives takes that for every message."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_user_message(self, message: Any) -> None:
        receives = threading.current_thread() is self._transport
        if receives and not self._transport.clear_to_send.is_set():
            threading.Thread(target=self._send_later, args=(message,), name="ssh-answer", daemon=True).start()
        else:
            self._send(message)

    def _send_later(self, message: Any) -> None:
        with contextlib.suppress(EOFError, OSError):  # the connection was lost meanwhile
            self._send(message)

    def _send(self, message: Any) -> None:
        """Send once there are keys, unless the channel is closed; the turn is not held while they are waited for.

        Raises:
            EOFError: the connection is lost, or they did not come.
        """
        transport, channel = self._transport, self._channel()
        is_close = message.asbytes()[0] == _CLOSE
        end = time.monotonic() + transport.clear_to_send_timeout
        while transport.active:
            transport.clear_to_send.wait(0.1)
            with self._turn:
                if not is_close and (channel is None or channel.closed):
                    break
                with transport.clear_to_send_lock:
                    if transport.clear_to_send.is_set():
                        transport._send_message(message)
                        return
            if time.monotonic() > end:
                raise EOFError("new keys were not agreed on in time")
        if channel is not None:
            channel.event.set()  # who waits for the answer to it waits no longer
