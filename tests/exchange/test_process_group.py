"""``torch.distributed`` over the mesh: stock ways of training in parallel have the losses of one process, or gloo's."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import parallel_cases
import pytest
import torch

from training.exchange.certificates import issue_run_certificates

pytestmark = pytest.mark.slow

multiprocessing.set_forkserver_preload(["torch", "parallel_cases"])


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        arguments = pipe.recv()
        try:
            pipe.send((True, parallel_cases.run(*arguments)))
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Members:
    """Four processes that carry out one case after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        issue_run_certificates(folder / "certificates", "run", range(4), ["127.0.0.1"])
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(4):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, case: str, backend: str, world: int) -> list[Any]:
        """Return what each member found."""
        self.send(case, backend, world)
        answers = []
        for pipe in self.pipes[:world]:
            assert pipe.poll(100), f"{case}: a member gave no answer"
            answers.append(pipe.recv())
        assert all(good for good, _ in answers), [told for good, told in answers if not good]
        return [found for _, found in answers]

    def send(self, case: str, backend: str, world: int) -> None:
        for rank, pipe in enumerate(self.pipes[:world]):
            pipe.send((case, backend, rank, world, str(self.folder), str(self.folder / "certificates")))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    made = Members(tmp_path_factory.mktemp("group"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def losses_of_one(members: Members) -> list[float]:
    found: list[float] = members.run("single", "gloo", 1)[0]
    return found


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("ddp", 2), ("ddp", 3), ("ddp", 4), ("hsdp", 4), ("tp", 2), ("tp", 4), ("tp_sp", 2), ("tp_sp", 4),
        ("gpipe", 3), ("one_f_one_b", 2), ("one_f_one_b", 3), ("interleaved", 2),
    ],
)  # fmt: skip
def test_it_has_the_losses_of_one_process(members: Members, losses_of_one: list[float], case: str, world: int) -> None:
    found = next(losses for losses in reversed(members.run(case, "muster", world)) if losses)
    assert found == pytest.approx(losses_of_one, abs=1e-6)


def test_fsdp2_has_the_losses_of_one_and_gloos_state_dict(members: Members, losses_of_one: list[float]) -> None:
    losses, state = members.run("fsdp2", "muster", 3)[0]
    assert losses == pytest.approx(losses_of_one, abs=1e-6)
    gloos = members.run("fsdp2", "gloo", 3)[0][1]
    for name in set(gloos) - {
        name for name in gloos if name.endswith(".k.bias")
    }:  # their gradients are zero but for rounding
        assert state[name] == pytest.approx(gloos[name], abs=1e-4)
    assert set(state) == set(gloos)


@pytest.mark.parametrize("case", ["fsdp2_bf16", "collectives"])
def test_it_does_what_gloo_does(members: Members, case: str) -> None:
    for ours, gloos in zip(members.run(case, "muster", 3), members.run(case, "gloo", 3)):
        assert len(ours) == len(gloos)
        for number, (one, other) in enumerate(zip(ours, gloos)):
            assert _flat(one) == pytest.approx(_flat(other), abs=1e-6), f"number {number}"


def _flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [x for one in value for x in _flat(one)] if isinstance(value, (list, tuple)) else [float(value)]


def test_memory_with_gaps_is_reduced_and_what_lies_between_stays(members: Members) -> None:
    whole, total, before = (torch.tensor(found) for found in members.run("strided", "muster", 2)[1])
    assert torch.allclose(whole[::2, 1:4], total[::2, 1:4])
    whole[::2, 1:4] = before[::2, 1:4]
    assert torch.equal(whole, before)


def test_a_member_that_ends_is_named_to_the_others(members: Members) -> None:
    """The last test here: a process is gone after it."""
    members.send("lost", "muster", 3)
    for pipe in members.pipes[:2]:
        assert pipe.poll(100)
        good, told = pipe.recv()
        assert not good and "the connection with rank 2 is lost" in told
