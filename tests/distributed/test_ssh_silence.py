"""When a connection counts as silent."""

from __future__ import annotations

from distributed.ssh.forward import Silence


def after(*looks: tuple[float, float]) -> float:
    """Return the seconds of silence after looks; each has a time, and when something was heard last."""
    silence = Silence(0.25)
    for now, heard in looks:
        silence.update(now, heard)
    return silence.seconds


def test_silence_counts_until_something_is_heard() -> None:
    silent = [(0.25 * number, 1.0) for number in range(4, 45)]
    assert after(*silent) == 10.0
    assert after(*silent, (11.25, 11.2)) == 0.0


def test_the_time_in_which_this_computer_slept_is_nobodys_silence() -> None:
    assert after((1.0, 1.0), (1.25, 1.0), (60.0, 1.0)) == 0.75
