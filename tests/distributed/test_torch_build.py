"""Which build of torch a machine without an NVIDIA card takes: never PyPI's, whatever can be reached."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from distributed.agent import environment_builder as builder
from distributed.agent.environment_builder import CPU_INDEX, Unbuildable
from distributed.agent.requests import BuildEnvironment

LOCK = "torch==2.13.0\nnumpy==2.4.1\n"
RECIPE = BuildEnvironment("recipe", ("torch", "numpy"), LOCK, hashed="", uv="uv", wheels="")
UNREACHED = ("the package index cannot be reached (no route)", "", True)


class Indexes:
    """Stands in for pip and uv: the indexes that can be reached, and what was asked of them."""

    def __init__(self, torch_index: bool, mirror: bool = False) -> None:
        self._torch_index, self._mirror = torch_index, mirror
        self.taken: list[str] = []

    def run(self, command: list[str], *_: object) -> None:
        words = [word for word in command if word.startswith("torch")]
        if CPU_INDEX in command and not self._torch_index:
            raise Unbuildable(*UNREACHED)
        if words == ["torch==2.13.0+cpu"] and not self._mirror:
            raise Unbuildable("a package is not available for this Python", "", False)
        self.taken += [f"{word} of {'PyTorch' if CPU_INDEX in command else 'mirror'}" for word in words]


def fill(folder: Path, monkeypatch: pytest.MonkeyPatch, indexes: Indexes, cuda: bool = False) -> None:
    monkeypatch.setattr(builder, "_run", indexes.run)
    monkeypatch.setattr(builder, "has_cuda", lambda: cuda)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    builder._fill(folder / "environment", folder, RECIPE)


@pytest.mark.parametrize(
    ("indexes", "cuda", "taken"),
    [
        (Indexes(torch_index=True), False, ["torch of PyTorch"]),
        (Indexes(torch_index=False, mirror=True), False, ["torch==2.13.0+cpu of mirror"]),
        (Indexes(torch_index=True), True, []),  # by the requirements, with CUDA
    ],
)
def test_the_build_is_the_right_one(
    indexes: Indexes, cuda: bool, taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, monkeypatch, indexes, cuda)
    assert indexes.taken == taken


def test_where_it_cannot_be_had_that_is_said_and_packages_can_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unbuildable, match="cannot be reached, and PyPI's build") as refused:
        fill(tmp_path, monkeypatch, Indexes(torch_index=False))
    assert refused.value.args[2] is True
