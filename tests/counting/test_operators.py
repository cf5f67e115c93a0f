"""Threads find torch's operators made: who makes one while another thread uses it ends the process."""

import pytest
import torch

from tests.counting.operators import look_up_operators


@pytest.mark.slow
def test_no_thread_makes_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up_operators()
    monkeypatch.delattr(torch._ops, "OpOverload")
    assert torch.ops.aten._foreach_copy_.default.overloadpacket is torch.ops.aten._foreach_copy_
