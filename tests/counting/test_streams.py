"""The stream that members share is safe in threads: else weights are compared before they are on the host."""

import threading

from tests.counting.streams import Stream

GRACE = 0.05
"""Seconds in which a wait that does not wait would end."""


def test_an_event_waits_for_a_copy_that_another_thread_lets_arrive() -> None:
    stream, begun, may_end = Stream(), threading.Event(), threading.Event()
    there: list[str] = []
    seen: list[list[str]] = []

    def copy() -> None:
        begun.set()
        may_end.wait()
        there.append("weights")

    def wait_for_all() -> None:
        stream.record_event().synchronize()
        seen.append(list(there))

    stream.copy(copy)
    first, second = threading.Thread(target=stream.arrive), threading.Thread(target=wait_for_all)
    first.start()
    begun.wait()
    second.start()
    second.join(GRACE)
    may_end.set()
    first.join()
    second.join()
    assert seen == [["weights"]]
