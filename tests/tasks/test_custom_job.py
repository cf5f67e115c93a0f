"""Jobs of the user's own: how they are found, what they may return, every form of loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from profiles.errors import BadInput, RunFailed
from profiles.files.resolve import profile_from_options
from tests.tasks.tiny_tasks import ProfileMaker, custom_task, silent
from training.tasks.custom import CustomJob, CustomTask
from training.tasks.object_files import check_given, load_result

DATA = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6.0)[:, None])


class WithLoss(nn.Module):
    """Gives its loss in one of the known forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.mse_loss(self.linear(x), y)
        forms = {"scalar": loss, "dict": {"loss": loss}, "object": SimpleNamespace(loss=loss), "tuple": (loss, x)}
        return forms[self.form]


@pytest.mark.parametrize("form", ["scalar", "dict", "object", "tuple"])
def test_forward_that_gives_a_loss(form: str) -> None:
    task = custom_task(WithLoss(form), DATA)
    model = task.build_model()
    batch = task.collate([DATA[i] for i in range(4)], None)
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.shape == ()
    assert task.weight(batch) == 4
    assert any(weights.grad is not None for weights in model.parameters())


def test_loss_function_and_metrics() -> None:
    task = custom_task(nn.Linear(2, 1), DATA, DATA, nn.functional.mse_loss, lambda output, target: {"bias": 2.0})
    batch = task.collate([DATA[i] for i in range(3)], None)
    with torch.no_grad():
        sums = task.evaluate(task.build_model(), batch, generate=False)
    metrics = task.metrics({name: 2 * value for name, value in sums.items()})
    assert metrics == {"loss": pytest.approx(sums["loss_sum"] / 3), "bias": 2.0}


def test_a_metric_named_loss_does_not_replace_the_loss() -> None:
    task = custom_task(nn.Linear(2, 1), DATA, DATA, nn.functional.mse_loss, lambda output, target: {"loss": 2.0})
    sums = {"loss_sum": 3.0, "weight": 3.0, "metric_loss": 6.0}
    assert task.metrics(sums) == {"loss": 1.0, "metrics.loss": 2.0}


def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """A loss of two passes through one model."""
    near, far = model(batch[0]), model(-batch[0])
    return {"loss": (near - batch[1]).square().mean() + far.abs().mean(), "far": far}


def test_a_step_of_its_own_computes_the_loss_and_metrics_see_what_it_returned() -> None:
    def measure(output: Any, batch: Any) -> dict[str, float]:
        return {"far": float(output["far"].mean()), "samples": len(batch[0])}

    task = custom_task(nn.Linear(2, 1), DATA, DATA, train_step=contrast, metrics=measure)
    model, batch = task.build_model(), task.collate([DATA[i] for i in range(3)], None)
    task.loss(model, batch).backward()
    assert all(weights.grad is not None for weights in model.parameters())
    with torch.no_grad():
        sums = task.evaluate(model, batch, generate=False)
        assert sums["loss_sum"] == pytest.approx(3 * float(contrast(model, batch["data"])["loss"]))
    assert task.metrics(sums)["samples"] == 3


def test_a_step_of_its_own_without_a_loss_and_one_beside_a_loss_function_are_refused() -> None:
    task = custom_task(nn.Linear(2, 1), DATA, train_step=lambda model, batch: model(batch[0]))
    with pytest.raises(RunFailed, match=r"train_step gave a tensor of shape \(3, 1\) as loss"):
        task.loss(task.build_model(), task.collate([DATA[i] for i in range(3)], None))
    with pytest.raises(BadInput, match="loss and train_step, which both compute the loss"):
        custom_task(nn.Linear(2, 1), DATA, None, nn.functional.mse_loss, train_step=contrast)


def own_backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = model(batch[0]).mean()  # of which no second backward would fail
    loss.backward()
    return loss


def test_a_step_that_makes_the_gradients_itself_is_refused_in_training_and_evaluation() -> None:
    task = custom_task(nn.Linear(2, 1), DATA, train_step=own_backward)
    batch = task.collate([DATA[0]], None)
    with pytest.raises(RunFailed, match=r"train_step calls backward\(\)"):
        task.loss(task.build_model(), batch)
    with torch.no_grad(), pytest.raises(RunFailed, match="an evaluation makes none: .*torch.enable_grad"):
        task.evaluate(task.build_model(), batch, generate=False)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [(0.5, "gave float as loss, not a tensor .*item"), (torch.ones(1) * 1j, "gave a complex number as loss")],
)
def test_a_loss_that_nothing_can_be_learned_from_is_named(returned: Any, problem: str) -> None:
    task = custom_task(nn.Linear(2, 1), DATA, train_step=lambda model, batch: returned)
    with pytest.raises(RunFailed, match=problem):
        task.loss(task.build_model(), task.collate([DATA[0]], None))


@pytest.mark.parametrize(
    ("returned", "problem"),
    [(0.5, "gave float, not a mapping"), ({"a": torch.ones(2)}, r"a of shape \(2,\)"), ({"a": "b"}, "a of type str")],
)
def test_metrics_that_are_no_numbers_are_named(returned: Any, problem: str) -> None:
    task = custom_task(nn.Linear(2, 1), DATA, DATA, nn.functional.mse_loss, lambda output, target: returned)
    with torch.no_grad(), pytest.raises(RunFailed, match=problem):
        task.evaluate(task.build_model(), task.collate([DATA[0]], None), generate=False)


@pytest.mark.parametrize(
    ("part", "function", "problem"),
    [
        ("train_step", lambda model: 0, r"train_step is called as train_step\(model, batch\)"),
        ("metrics", lambda output: {}, r"metrics is called as metrics\(output, target\)"),
        ("optimizer", torch.optim.SGD([torch.ones(1)]), "optimizer is SGD, not a function .give its class"),
    ],
)
def test_functions_that_cannot_be_called_as_they_will_be_are_refused_at_once(
    part: str, function: Any, problem: str
) -> None:
    with pytest.raises(BadInput, match=f"the trainer: {problem}"):
        check_given(CustomJob(nn.Linear(2, 1), DATA, **{part: function}))


def test_mapping_samples_with_a_target() -> None:
    class Named(nn.Linear):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features)

    data = [{"features": x, "label": y} for x, y in (DATA[i] for i in range(6))]
    task = custom_task(Named(2, 1), data, loss=nn.functional.mse_loss)
    assert task.loss(task.build_model(), task.collate(data, None)).shape == ()


def test_weight_function_counts_what_the_loss_is_a_mean_over() -> None:
    task = custom_task(nn.Linear(2, 1), DATA, loss=nn.functional.mse_loss, weight=lambda data: float(data[0].numel()))
    assert task.weight(task.collate([DATA[0], DATA[1]], None)) == 4


@pytest.mark.parametrize(
    ("model", "data", "loss", "said"),
    [
        (nn.Linear(2, 3), [torch.ones(2)], None, r"a tensor of shape \(1, 3\) as loss"),
        (nn.Linear(2, 1), [torch.ones(2)], nn.functional.mse_loss, "samples have no target"),
        (nn.Linear(2, 1), [{"input": torch.ones(2)}], nn.functional.mse_loss, "but no target"),
    ],
)
def test_jobs_without_a_usable_loss(model: nn.Module, data: Any, loss: Any, said: str) -> None:
    task = custom_task(model, data, loss=loss)
    with pytest.raises(RunFailed, match=said):
        task.loss(task.build_model(), task.collate(data, None))


def test_built_models_share_no_weights() -> None:
    task = CustomTask(profile_from_options("own", {"task": "custom"}), lambda: CustomJob(nn.Linear(2, 1), DATA))
    task.prepare(silent)
    first, second = task.build_model(), task.build_model()
    assert first.weight.data_ptr() != second.weight.data_ptr()
    assert torch.equal(first.weight, second.weight)


def test_empty_data_set() -> None:
    with pytest.raises(BadInput, match="training data set is empty"):
        custom_task(nn.Linear(1, 1), [])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    model = Tied()
    custom_task(model, DATA).save(model, tmp_path)
    again = Tied()
    load_model(again, tmp_path / "model.safetensors")
    assert torch.equal(again.second.weight, model.first.weight)


def test_weights_that_lie_in_one_block_are_saved_and_read(tmp_path: Path) -> None:
    model = nn.GRU(2, 3)
    weights = list(model.parameters())
    block = torch.cat([weight.detach().flatten() for weight in weights])  # as cuDNN lays them
    for weight, piece in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
        weight.data = piece.view_as(weight)
    custom_task(model, DATA).save(model, tmp_path)
    load_model(again := nn.GRU(2, 3), tmp_path / "model.safetensors")
    assert all(map(torch.equal, again.parameters(), weights))
    before = [weight.clone() for weight in weights]
    block.zero_()
    load_result(model, tmp_path)
    assert all(map(torch.equal, before, weights))


@pytest.mark.parametrize("change", [{"weight": None}, {"more": torch.ones(1)}, {"bias": torch.ones(2)}])
def test_weights_of_another_model_are_refused(change: dict[str, Tensor | None], tmp_path: Path) -> None:
    values = {**nn.Linear(2, 1).state_dict(), **change}
    path = tmp_path / "model.safetensors"
    save_file({name: value for name, value in values.items() if value is not None}, path)
    with pytest.raises(BadInput, match=f"does not build this model again: .*{min(change)}"):
        load_result(nn.Linear(2, 1), tmp_path)


SOURCE = """
import torch
from torch import nn
from training.tasks.custom import CustomJob

DATA = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
MSE = nn.functional.mse_loss

def job(): return CustomJob(nn.Linear(2, 1), DATA, loss=MSE)
def three(profile): return nn.Linear(2, 1), DATA, None, MSE
def named(profile): return {"model": nn.Linear(2, profile.training.batch_size), "train": DATA, "loss": MSE}
def number(): return 3
def no_model(): return {"train": DATA}
def wrong_model(): return "model", DATA
def wrong_data(): return nn.Linear(2, 1), 5
def wrong_loss(): return nn.Linear(2, 1), DATA, None, "mse"
def fails():
    raise KeyError("oops")
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_job.py"
    path.write_text(SOURCE)
    return path


def task_of(make_profile: ProfileMaker, path: str, samples: int = 0) -> CustomTask:
    task = CustomTask(make_profile(task="custom", model_path=path, batch_size=5, max_train_samples=samples))
    task.prepare(silent)
    return task


@pytest.mark.parametrize("name", ["job", "three", "named"])
def test_factories(make_profile: ProfileMaker, job_file: Path, name: str) -> None:
    task = task_of(make_profile, f"{job_file}:{name}")
    assert task.build_model().out_features == (5 if name == "named" else 1)
    assert task.job.loss is nn.functional.mse_loss
    assert len(task.train) == 4


def test_limits_on_samples(make_profile: ProfileMaker, job_file: Path) -> None:
    task = task_of(make_profile, f"{job_file}:job", 3)
    assert len(task.train) == 3
    assert torch.equal(task.train[2][0], torch.ones(2))


def test_factory_of_a_module(make_profile: ProfileMaker, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(job_file.parent)
    assert len(task_of(make_profile, "my_job:job").train) == 4


def test_weights_come_from_the_seed(make_profile: ProfileMaker, job_file: Path) -> None:
    torch.manual_seed(1)
    first = task_of(make_profile, f"{job_file}:job")
    torch.manual_seed(2)
    second = task_of(make_profile, f"{job_file}:job")
    weights = first.build_model().weight
    assert torch.equal(weights, second.build_model().weight)
    assert torch.equal(weights, first.build_model().weight)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "returned int .*return a CustomJob"),
        ("no_model", "returned a mapping with train"),
        ("wrong_model", "the model is str, not a torch nn.Module"),
        ("wrong_data", "train is int, without __len__"),
        ("wrong_loss", "loss is str, not a function"),
        ("fails", r"fails failed: KeyError: 'oops' \(my_job.py, line 18\)"),
        ("absent", "no function 'absent'; it has: job, three"),
    ],
)
def test_factories_that_return_something_else(make_profile: ProfileMaker, job_file: Path, name: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        task_of(make_profile, f"{job_file}:{name}")


def test_modules_that_cannot_be_imported(make_profile: ProfileMaker, tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.py"
    faulty.write_text("import torch\nimport nothing_of_this_name\n")
    for path, said in (
        (f"{faulty}:build", r"ModuleNotFoundError: .*nothing_of_this_name.* \(faulty.py, line 2\)"),
        (f"{tmp_path}/none.py:build", "no such file"),
        ("no_module_of_this_name:build", "module no_module_of_this_name cannot be imported"),
    ):
        with pytest.raises(BadInput, match=said):
            task_of(make_profile, path)


def test_a_shown_sample_has_its_loss_and_a_target_that_is_a_whole_number() -> None:
    task = custom_task(nn.Linear(2, 1), DATA, DATA, nn.functional.mse_loss)
    model = task.build_model()
    with torch.no_grad():
        loss = float(nn.functional.mse_loss(model(DATA[3][0]), DATA[3][1]))
        assert task.sample_output(model, task.collate([DATA[3]], None)).loss == pytest.approx(loss)
    assert [task.caption(one) for one in (DATA[3], (DATA[3][0], 2.5), DATA[3][0])] == ["target 3", "", ""]
