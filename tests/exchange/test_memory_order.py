"""An operation waits for those that use its memory, and for no others."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import until
from training.exchange.torch_backend.memory_order import MemoryInUse, Use, any_in_common, overlap, span

SPANS = st.lists(
    st.builds(lambda device, start, size: (device, start, start + size), st.sampled_from(["cpu", "mps"]),
              st.integers(0, 30), st.integers(0, 8)), max_size=5,
)  # fmt: skip


def cells(spans: list[tuple[str, int, int]]) -> list[set[tuple[str, int]]]:
    return [{(device, cell) for cell in range(start, stop)} for device, start, stop in spans]


@given(SPANS, SPANS)
def test_overlap_is_what_single_bytes_say(
    spans: list[tuple[str, int, int]], others: list[tuple[str, int, int]]
) -> None:
    sets, other_sets = cells(spans), cells(others)
    assert overlap(spans, others) == any(one & other for one in sets for other in other_sets)
    pairs = [(one, other) for number, one in enumerate(sets) for other in sets[:number]]
    assert any_in_common(spans) == any(one & other for one, other in pairs)


def test_a_span_reaches_to_the_last_element() -> None:
    whole = torch.zeros(6, 4)
    start = whole.data_ptr()
    assert span(whole[::2, 1:3]) == ("cpu", start + 4, start + 4 * (4 * 4 + 3))
    _, begin, end = span(whole[:0])
    assert begin == end


class Begun:
    """Something under way until it is told to end."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waited_for = threading.Event()

    def wait_for_end(self) -> None:
        self.waited_for.set()
        self.over.wait()


A, B = torch.zeros(4), torch.zeros(4)


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (Use.of([], [A]), Use.of([], [A]), True),
        (Use.of([], [A]), Use.of([A[3:]], [B]), True),
        (Use.of([A], [B]), Use.of([], [A[:1]]), True),
        (Use.of([A], [B]), Use.of([A], []), False),
        (Use.of([], [A[:2]]), Use.of([], [A[2:]]), False),
        (Use.of([], [A], between_two=True), Use.of([A], [], between_two=True), False),
        (Use.of([], [A], between_two=True), Use.of([], [A]), True),
    ],
)
def test_who_waits_for_whom(first: Use, second: Use, waits: bool) -> None:
    memory, earlier = MemoryInUse(), Begun()
    memory.enter(earlier, first)
    thread = threading.Thread(target=memory.wait_for_others, args=(second,))
    thread.start()
    if waits:
        until(earlier.waited_for.is_set)
        assert thread.is_alive()
        memory.leave(earlier)
        earlier.over.set()
    thread.join(20)
    assert not thread.is_alive() and earlier.waited_for.is_set() == waits
