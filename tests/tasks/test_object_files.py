"""Jobs as files: they come back as they were, and nothing but what was written is taken."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from profiles.errors import BadInput
from tests.tasks.tiny_tasks import ProfileMaker
from training.tasks import custom, object_files, sample_file, user_code
from training.tasks.custom import CustomJob
from training.tasks.object_files import (
    build,
    instantiate,
    load_result,
    make_model,
    parts_of_loader,
    read_job,
    write_job,
)
from training.tasks.own_code.streams import Sampled

DATA = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))


class Net(nn.Module):
    def __init__(self, width: int = 3, act: Any = nn.functional.relu) -> None:
        super().__init__()
        self.table, self.options, self.settings = torch.zeros(2), {"rates": [0.1]}, SimpleNamespace(rates=[0.1])
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, 2)
        self.act = act
        self.register_buffer("scale", torch.ones(1), persistent=False)


def net() -> Net:
    return Net(5)


def data() -> TensorDataset:
    return DATA


def items(batch: Any) -> float:
    return 5.0


def hits(output: Any, target: Any) -> dict[str, float]:
    return {"hits": 1.0}


def number() -> int:
    return 3


@pytest.fixture
def written(tmp_path: Path) -> Path:
    model = Net()
    model.first.requires_grad_(False)
    functions: dict[str, Any] = {"weight": items, "metrics": hits, "optimizer": torch.optim.RAdam}
    write_job(CustomJob(model, DATA, data, nn.functional.cross_entropy, **functions), tmp_path)
    return tmp_path


def test_a_job_comes_back(written: Path, make_profile: ProfileMaker) -> None:
    job = build(make_profile(dataset_path=str(written)))
    assert isinstance(job.model, Net)
    assert (job.metrics.__name__, job.optimizer) == ("hits", torch.optim.RAdam)
    assert [name for name, p in job.model.named_parameters() if p.requires_grad] == ["second.weight", "second.bias"]
    assert len(job.train) == 4 and torch.equal(job.train[3][0], DATA[3][0])
    assert job.validation is DATA
    assert job.loss is nn.functional.cross_entropy and job.collate is None
    assert job.weight is items


def test_weights_come_back(tmp_path: Path) -> None:
    model = Net()
    write_job(CustomJob(model, data), tmp_path)
    again = read_job(tmp_path).model
    assert isinstance(again, Net) and torch.equal(again.first.weight, model.first.weight)


@pytest.mark.parametrize("name", ["model.safetensors", "train.safetensors", "train.json"])
def test_a_file_that_was_changed_is_refused(written: Path, name: str) -> None:
    path = written / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match=f"{name}: not the file that was sent"):
        read_job(written)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 9}', '{"version": 2, "files": 3}'])
def test_an_index_that_is_none_is_refused(written: Path, text: str) -> None:
    (written / "job.json").write_text(text)
    with pytest.raises(BadInput, match="not the files of a job|version 9"):
        read_job(written)


def test_a_file_that_is_missing_is_named(written: Path) -> None:
    (written / "train.json").unlink()
    with pytest.raises(BadInput, match=r"not the files of a job .*train.json"):
        read_job(written)


def changed(change: Any) -> nn.Module:
    model = Net()
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Net(act=nn.functional.gelu), "act is"),
        (changed(lambda m: m.scale.fill_(2.0)), "scale has other values"),
        (changed(lambda m: m.add_module("third", nn.Identity())), "'third' is in one of the two only"),
        (changed(lambda m: m.half()), "another shape or type"),
        (changed(lambda m: setattr(m, "second", nn.Bilinear(1, 1, 1))), "does not build this model again"),
        (changed(lambda m: setattr(m, "steps", 3)), "steps is 3"),
        (changed(lambda m: setattr(m, "table", torch.ones(2))), "table is"),
        (changed(lambda m: setattr(m, "options", {"rates": [0.3]})), "options is"),
        (changed(lambda m: setattr(m, "settings", SimpleNamespace(rates=[0.3]))), "settings is"),
        (nn.Sequential(nn.Linear(2, 2)), "does not build this model again"),
        (nn.Linear(2, 2), "needs in_features, out_features"),
    ],
)
def test_a_model_that_would_be_another_one_there_is_refused(tmp_path: Path, model: nn.Module, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        write_job(CustomJob(model, data), tmp_path)
    assert caught.value.hint.startswith("give model as a function")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (CustomJob(number, data), "model: number returned int, not a torch nn.Module"),
        (CustomJob(net, number), "train_dataset is int, without __len__"),
        (CustomJob(net, 3), "train_dataset is int, without __len__"),
        (CustomJob(net, data, loss="nowhere"), "loss 'nowhere' is not of the form module:factory"),
        (CustomJob(net, data, train_step="nowhere"), "train_step 'nowhere' is not of the form module:factory"),
    ],
)
def test_parts_that_are_something_else(parts: CustomJob, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        instantiate(parts, 1)


def test_every_part_is_made_from_the_seed() -> None:
    first = make_model(net, 1)
    assert isinstance(first, Net)
    torch.rand(1)
    again = instantiate(CustomJob(net, data), 1).model
    assert isinstance(again, Net) and torch.equal(first.first.weight, again.first.weight)


def test_a_transformers_model_travels_as_its_folder(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    write_job(CustomJob(model, data), tmp_path)
    assert json.loads((tmp_path / "job.json").read_text())["model"]["pretrained"] == "model"
    again: Any = read_job(tmp_path).model
    assert type(again) is GPT2LMHeadModel
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    fresh = GPT2LMHeadModel(model.config)
    load_result(fresh, tmp_path / "model")
    assert torch.equal(fresh.transformer.wte.weight, model.transformer.wte.weight)


def test_nothing_that_reads_a_job_can_unpickle() -> None:
    for module in (custom, object_files, sample_file, user_code):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        imported = {
            name
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        }
        assert not imported & {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
        assert not any(isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.load" for n in ast.walk(tree))


def test_of_a_loader_its_data_batch_size_and_collate_function_are_taken() -> None:
    loader = DataLoader(DATA, batch_size=3, shuffle=True, drop_last=True, collate_fn=items)
    assert parts_of_loader(loader, "x") == (DATA, items, {"batch_size": 3, "drop_last": True})
    assert parts_of_loader(DataLoader(DATA), "x")[1] is None, "torch's own"


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0, 2.0], 4),
        RandomSampler(DATA, replacement=True),
        RandomSampler(DATA, num_samples=2),
    ],
)
def test_a_sampler_of_its_own_is_taken(sampler: Any) -> None:
    data, collate, options = parts_of_loader(DataLoader(DATA, sampler=sampler), "train_dataset")
    assert (data, collate, options["batch_size"]) == (Sampled(DATA, sampler), None, 1)


def test_batches_of_its_own_are_refused_with_what_keeps_them() -> None:
    with pytest.raises(BadInput, match=r"train_dataset draws its batches by list.*muster\.session"):
        parts_of_loader(DataLoader(DATA, batch_sampler=[[0, 1]]), "train_dataset")
