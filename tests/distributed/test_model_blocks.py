"""A machine of a divided model is sent the blocks that it holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink
from distributed.preparation import model_blocks
from distributed.preparation.code_sync import collect, folder_tree
from distributed.preparation.model_blocks import (
    BlockInputs,
    DividedModel,
    block_numbers,
    blocks_of_stages,
    blocks_to_measure,
)
from tests.layouts.families import architecture, config, plain_model
from tests.layouts.machine_folders import on_machines
from tests.layouts.staged_records import plan_of, tied_llama
from training.layouts.stages.pretrained_stage import stage_class
from training.layouts.stages.stage import Cut
from training.tasks.pretrained import read_weights
from training.tasks.registry import size_for

CUSTOM: dict[str, Any] = {"task": "custom", "model_path": "tests.layouts.deep_model:deep_job"}


def test_the_names_of_tensors_tell_their_blocks() -> None:
    llama = ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.experts.{n + 5}.up.weight" for n in range(3))]
    assert block_numbers(llama, 0, 3) == {name: number for number, name in enumerate(llama[1:])}
    assert block_numbers(llama, 0, 4) == {}
    assert block_numbers([*llama, *(f"vision.layers.{n}.weight" for n in range(3))], 0, 3) == {}
    encoder, decoder = ([f"model.{part}.layers.{n}.fc1.weight" for n in range(2)] for part in ("encoder", "decoder"))
    assert block_numbers([*decoder, *encoder, "model.encoder.conv1.weight"], 2, 4) == dict(
        zip(encoder + decoder, range(4))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shards"), [("neox", "50GB"), ("whisper", "30KB"), ("gemma2", "30KB")])
def test_a_stage_reads_the_same_weights_from_its_blocks(family: str, shards: str, tmp_path: Path) -> None:
    settings, whole = config(family), tmp_path / "whole"
    plain_model(settings).save_pretrained(whole, max_shard_size=shards)
    encoder = settings.encoder_layers if settings.is_encoder_decoder else 0
    divided = DividedModel(folder_tree(whole), encoder, 8, tmp_path / "blocks")
    bounds = (0, 3, 6, 8)
    for k in range(3):
        tree, folder = divided.tree(range(bounds[k], bounds[k + 1])), tmp_path / str(k)
        folder.mkdir()
        for name, blob in tree.files.items():
            shutil.copyfile(tree.sources[blob], folder / name)
        assert len([*folder.glob("model-block-*")]) == bounds[k + 1] - bounds[k]
        stage = stage_class(architecture(settings), Cut(bounds, k))
        stages = [read_weights(stage, str(path)).state_dict() for path in (folder, whole)]
        assert stages[0].keys() == stages[1].keys()
        assert all(torch.equal(weight, stages[1][name]) for name, weight in stages[0].items())


class Lacking(MachineLink):
    """A machine that lacks these trees."""

    def __init__(self, name: str, has: bool = False, **fields: Any) -> None:
        super().__init__(Machine(name=name, **fields), lambda: pytest.fail("nothing is dialled"), "10.0.0.1")
        self._has = has

    def ask(self, request: Any, payload: Any = (), timeout: float | None = 60.0) -> dict[str, Any]:
        return {"trees": [] if self._has else list(request.trees), "blobs": [], "begun": {}, "root": "/"}


def test_each_machine_is_sent_its_blocks_unless_it_has_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = on_machines(plan_of(3, **tied_llama(tmp_path, blocks=4, lines=5)), *"aba")
    inputs, block_inputs = collect(plan), BlockInputs(plan.profile, tmp_path / "blocks", blocks_of_stages(plan))
    assert block_inputs.of(Lacking("a"), inputs) is inputs  # it is small
    monkeypatch.setattr(model_blocks, "SMALLEST", 1)
    assert block_inputs.of(Lacking("a", has=True), inputs) is inputs
    assert block_inputs.of(Lacking("a", address="localhost"), inputs) is inputs
    sent = {name: block_inputs.of(Lacking(name), inputs).trees["inputs/model"].files for name in "ab"}
    blocks = {
        name: [int(file[12:17]) for file in sorted(files) if file.startswith("model-block")]
        for name, files in sent.items()
    }
    assert blocks == {"a": [0, 3], "b": [1, 2]}
    assert all(
        {"config.json", "model-rest.safetensors", "model.safetensors.index.json"} <= files.keys()
        for files in sent.values()
    )
    assert not any("model.safetensors" in files for files in sent.values())
    block_inputs.close()
    assert not (tmp_path / "blocks").exists()


def test_blocks_of_each_kind_are_measured(tmp_path: Path) -> None:
    plan = plan_of(2, **tied_llama(tmp_path, blocks=6, lines=5))
    blocks_on, size = blocks_to_measure(plan.profile), size_for(plan.profile)
    assert blocks_on is not None and size is not None
    assert blocks_on("a", size) == {0, 1, 5}
    assert blocks_to_measure(plan_of(1, **CUSTOM).profile) is None
