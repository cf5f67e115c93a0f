"""from_pretrained of a stage reads its own weights, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import modeling_utils

from tests.layouts.families import architecture, batch, config, loss, plain_model
from training.layouts.stages.cut import CutModel
from training.layouts.stages.pretrained_stage import build_stage, stage_class
from training.layouts.stages.probe import compare
from training.layouts.stages.stage import Cut
from training.tasks.pretrained import read_weights


class RecordedSlice:
    """A tensor of a file that notes when it is read."""

    def __init__(self, stored: Any, reads: list[int]) -> None:
        self._stored, self._reads = stored, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._stored[index]
        self._reads.append(tensor.nbytes)
        return tensor


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each tensor that transformers reads from a file."""
    sizes: list[int] = []

    class Recorded:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def get_slice(self, name: str) -> RecordedSlice:
            return RecordedSlice(self._file.get_slice(name), sizes)

    monkeypatch.setattr(modeling_utils, "safe_open", Recorded)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "neox", "whisper"])
def test_a_stage_reads_only_its_own_weights(family: str, tmp_path: Path, reads: list[int]) -> None:
    settings = config(family)
    model = plain_model(settings)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    reads.clear()
    for bounds in ((0, 8), (0, 3, 6, 8)):
        parts = []
        for k in range(len(bounds) - 1):
            module = read_weights(stage_class(architecture(settings), Cut(bounds, k)), str(tmp_path))
            assert sum(reads) == sum(weight.nbytes for weight in module.parameters())
            reads.clear()
            parts.append(CutModel(module.train(), loss))
        if len(bounds) == 2:
            [whole] = parts
    compare(whole, parts, batch(settings))


@pytest.mark.slow
def test_buffers_that_no_file_holds_are_those_of_the_whole_model(tmp_path: Path) -> None:
    settings = config("gemma2")
    plain_model(settings).save_pretrained(tmp_path)
    whole = architecture(settings).from_pretrained(tmp_path, dtype=torch.bfloat16)
    buffers = dict(whole.named_buffers())
    for k in range(3):
        stage = stage_class(architecture(settings), Cut((0, 3, 6, 8), k)).from_pretrained(
            tmp_path, dtype=torch.bfloat16
        )
        own = dict(stage.named_buffers())
        assert own.keys() <= buffers.keys()
        assert {
            name for name, tensor in own.items() if tensor.is_meta or not torch.equal(tensor, buffers[name])
        } == set()
        assert not any(weight.is_meta or weight.dtype != torch.bfloat16 for weight in stage.parameters())


@pytest.mark.slow
def test_what_other_stages_hold_is_never_made() -> None:
    settings = config("llama")
    settings.vocab_size = 2**31  # 250 GiB each for embedding and head
    stage = build_stage(architecture(settings), settings, Cut((0, 3, 6, 8), 1))
    assert {name.split(".")[2] for name, _ in stage.named_parameters()} == {"3", "4", "5"}
