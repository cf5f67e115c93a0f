"""Adapters over a base in 8 or 4 bits. Skipped where bitsandbytes is not installed."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_speech import Prepared
from transformers import WhisperForConditionalGeneration

from profiles.errors import BadInput
from speech.whisper.model import unwrap
from speech.whisper.task import WhisperTask


def built(prepared: Prepared, **options: Any) -> tuple[WhisperTask, Any]:
    task = prepared(tuning="lora", lora_rank=2, **options)
    torch.manual_seed(0)
    return task, task.build_model()


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_without_the_library_it_is_refused(prepared: Prepared, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BadInput, match=f"{precision} needs bitsandbytes"):
        built(prepared, base_precision=precision)


@pytest.mark.parametrize(("precision", "kind", "near"), [("int8", torch.int8, 0.02), ("nf4", torch.uint8, 0.1)])
def test_only_adapters_are_trained_over_it(prepared: Prepared, precision: str, kind: torch.dtype, near: float) -> None:
    pytest.importorskip("bitsandbytes")
    task, model = built(prepared, base_precision=precision)
    _, usual = built(prepared)
    layer = unwrap(model).model.decoder.layers[0].fc1.base_layer
    assert (layer.weight.dtype, unwrap(model).proj_out.weight.dtype) == (kind, torch.float32)
    assert all(".lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    batch = task.collate([task.train[0], task.train[1]], [])
    with torch.no_grad():
        losses = [float(task.loss(one.eval(), copy.deepcopy(batch))) for one in (model, usual)]
    assert losses[0] == pytest.approx(losses[1], rel=near)
    task.loss(model.train(), batch).backward()
    assert any(bool(p.grad.any()) for name, p in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_adapters_are_merged_into_the_weights_as_they_were_read(
    prepared: Prepared, english_whisper: Path, tmp_path: Path, precision: str
) -> None:
    pytest.importorskip("bitsandbytes")
    task, model = built(prepared, base_precision=precision, lora_alpha=4)
    adapted = unwrap(model).model.decoder.layers[0].fc1
    with torch.no_grad():
        adapted.lora_B["default"].weight.normal_()
    task.save(model, tmp_path / "model")
    read: Any = WhisperForConditionalGeneration.from_pretrained
    before, after = read(english_whisper), read(tmp_path / "model")
    change = 2 * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    whole = before.model.decoder.layers[0].fc1.weight + change
    torch.testing.assert_close(after.model.decoder.layers[0].fc1.weight, whole)
    assert torch.equal(after.model.decoder.layers[0].fc2.weight, before.model.decoder.layers[0].fc2.weight)


def test_weights_stored_in_16_bits_never_lie_in_memory_as_a_whole(
    prepared: Prepared, english_whisper: Path, tmp_path: Path
) -> None:
    """Freed, they would stay the process's, and what is published in 16 bits is what needs 8."""
    pytest.importorskip("bitsandbytes")
    half = Path(shutil.copytree(english_whisper, tmp_path / "half"))
    read: Any = WhisperForConditionalGeneration.from_pretrained
    read(half).half().save_pretrained(half)
    task, model = built(prepared, model_path=half, base_precision="int8")
    assert next(task.wrapper.read_model().parameters()).dtype == torch.float16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.int8}
    task.save(model, tmp_path / "model")
    before, after = read(half, dtype=torch.float32), read(tmp_path / "model")
    assert all(torch.equal(one, other) for one, other in zip(before.parameters(), after.parameters(), strict=True))
    assert after.dtype == torch.float32
