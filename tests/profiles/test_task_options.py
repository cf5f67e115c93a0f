"""Options that only some tasks read: declared truly, and refused where a person has set them for another task."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.declarations import owners
from profiles.errors import BadInput
from profiles.files.resolve import load_profile, profile_from_options
from profiles.options import OptionSpec, options

TASKS = tuple(owners("model"))
ROOT = Path(__file__).parents[2]
MODULES = {
    "whisper": (
        "speech/whisper/task",
        "speech/whisper/model",
        "speech/whisper/distillation",
        "training/tasks/pretrained",
        "speech/data/speech_clips",
        "speech/data/speech_dataset",
    ),
    "causal_lm": ("training/tasks/text/causal_lm", "training/tasks/pretrained", "training/tasks/text/texts"),
    "hf": ("training/tasks/hf/hf_task", "training/tasks/hf/rows"),
    "custom": ("training/tasks/custom", "training/tasks/user_code", "training/tasks/object_files"),
}
LIMITED = [spec for spec in options() if spec.tasks and not spec.owner]


def attributes(task: str) -> set[str]:
    """Names that the modules of a task read of anything."""
    trees = [ast.parse((ROOT / f"{module}.py").read_text()) for module in MODULES[task]]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_reads_what_is_declared_and_nothing_else(task: str) -> None:
    read = attributes(task)
    assert {spec.name for spec in LIMITED if task in spec.tasks} == {spec.name for spec in LIMITED if spec.name in read}


def another(spec: OptionSpec) -> str:
    """A value that is not the default."""
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    if spec.type == "flag":
        return "false" if spec.default == "true" else "true"
    return {"number": "0.25", "integer": "3"}.get(spec.type, "full" if spec.name == "window" else "q_proj")


@given(st.sampled_from(LIMITED), st.sampled_from(TASKS))
def test_only_what_is_set_and_not_read_is_refused(spec: OptionSpec, task: str) -> None:
    profile_from_options("p", {"task": task, spec.name: spec.default})
    if spec.is_read_by(task):
        adapters = {"tuning": "lora"} if spec.name == "base_precision" else {}
        profile_from_options("p", {"task": task, spec.name: another(spec), **adapters})
        return
    with pytest.raises(BadInput, match=rf"{spec.name} = .*: task = {task} does not read it, only {spec.tasks[0]}"):
        profile_from_options("p", {"task": task, spec.name: another(spec)})


CONFIG = """
[DEFAULT]
long_audio = skip
[group:g]
gradient_checkpointing = true
[profile:own]
task = custom
model_path = a.b:c
language = en
[profile:inherits]
group = g
task = custom
model_path = a.b:c
[profile:whisper]
language = en
dataset_path = nowhere
model_path = owner/name
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.ini").write_text(CONFIG)
    return tmp_path / "config.ini"


def test_what_is_inherited_may_be_meant_for_others(config: Path) -> None:
    assert load_profile("inherits", {}, config).profile.model.gradient_checkpointing
    with pytest.raises(BadInput, match=r"\[profile:own\] language = \"en\": task = custom does not read it"):
        load_profile("own", {}, config)


def test_who_changes_the_task_is_not_blamed_for_the_profile(config: Path) -> None:
    custom = {"task": "custom", "model_path": "a.b:c"}
    assert load_profile("whisper", custom, config).profile.model.task == "custom"
    with pytest.raises(BadInput, match='command line tuning = "lora": task = custom does not read it'):
        load_profile("whisper", {**custom, "tuning": "lora"}, config)
