"""Sessions that a server refuses."""

from __future__ import annotations

from typing import Any

import paramiko
import pytest

from distributed.ssh.channel import open_session


class RefusingTransport:
    def __init__(self, active: bool) -> None:
        self.is_active = lambda: active

    def open_session(self, timeout: float) -> Any:
        raise paramiko.SSHException("Unable to open channel.")


def test_a_refusal_whose_reason_another_thread_took_is_a_refusal() -> None:
    with pytest.raises(paramiko.ChannelException):
        open_session(RefusingTransport(active=True), 60.0)


@pytest.mark.parametrize(("active", "timeout"), [(False, 60.0), (True, 0.0)])
def test_a_loss_and_the_end_of_the_time_are_no_refusals(active: bool, timeout: float) -> None:
    with pytest.raises(paramiko.SSHException, match="Unable to open channel") as raised:
        open_session(RefusingTransport(active), timeout)
    assert not isinstance(raised.value, paramiko.ChannelException)
