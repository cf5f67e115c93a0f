"""Keeps the messages that threads send on an SSH channel in order: none is sent after its CLOSE.

paramiko builds a channel's message under the channel's lock but sends it afterwards (paramiko issue 1115). If the
remote side closes in between, the end of a command's input is sent after the CLOSE, and OpenSSH ends the whole
connection for it ("Received ieof for nonexistent channel"). Threads that run short commands trigger this within
seconds.

The receiving thread replies to a CLOSE as well. During a key re-exchange it would wait, for half a minute, for messages
that only it can receive, and then give up the connection; so its replies are sent by another thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any, TypeVar

import paramiko

_CLOSE = 97
"""SSH_MSG_CHANNEL_CLOSE (RFC 4254, 9)."""
_PROHIBITED = 1
"""SSH_OPEN_ADMINISTRATIVELY_PROHIBITED (RFC 4254, 5.1)."""
_C = TypeVar("_C")


def ordered(channel: _C) -> _C:
    """Make a channel drop messages that its threads send after it is closed; returns the channel."""
    wrapped: Any = channel
    wrapped.transport = _Sender(wrapped.transport, wrapped)
    return channel


def open_session(transport: Any, timeout: float) -> Any:
    """Open a session within ``timeout`` seconds.

    Raises:
        paramiko.ChannelException: the server grants none.
        paramiko.SSHException: the connection is lost, or the time has passed; also EOFError and OSError.
    """
    begin = time.monotonic()
    try:
        return ordered(transport.open_session(timeout=timeout))
    except paramiko.ChannelException:
        raise
    except paramiko.SSHException as error:
        # Of two refusals at a time paramiko gives both reasons to one thread, and to the other an error without any.
        if transport.is_active() and time.monotonic() - begin < timeout:
            raise paramiko.ChannelException(_PROHIBITED, "no reason given") from error
        raise


class _Sender:
    """Stands in for a channel's transport."""

    def __init__(self, transport: Any, channel: Any) -> None:
        self._transport = transport
        self._channel = weakref.ref(channel)
        """A weak reference: a dropped channel is closed at once, not by the garbage collector under arbitrary locks."""
        self._send_lock = threading.Lock()
        """Not the channel's own lock, which the receiving thread takes for every message."""

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
        """Send once keys are agreed, unless the channel is closed; the lock is not held while waiting for them.

        Raises:
            EOFError: the connection is lost, or the key exchange did not end.
        """
        transport, channel = self._transport, self._channel()
        is_close = message.asbytes()[0] == _CLOSE
        end = time.monotonic() + transport.clear_to_send_timeout
        while transport.active:
            transport.clear_to_send.wait(0.1)
            with self._send_lock:
                if not is_close and (channel is None or channel.closed):
                    break
                with transport.clear_to_send_lock:
                    if transport.clear_to_send.is_set():
                        transport._send_message(message)
                        return
            if time.monotonic() > end:
                raise EOFError("new keys were not agreed on in time")
        if channel is not None:
            channel.event.set()  # wakes the thread that waits for the reply
