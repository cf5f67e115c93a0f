"""Code and data on a far machine, with this one in its place."""

from __future__ import annotations

import io
import os
import socket
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from scripted_connection import far_machine

from distributed.agent import files as agent_files
from distributed.machine.link import MachineLink
from distributed.preparation import code_sync
from distributed.preparation.code_sync import MOST_FILES, Inputs, collect, launched_files, left_out, user_sources
from distributed.preparation.transfer import send_trees
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.installation import TOP
from training.run.local_plan import plan_local_run
from training.tasks.registry import forget, register


@pytest.fixture
def link(tmp_path: Path) -> MachineLink:
    return far_machine(tmp_path)


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    (project / "__pycache__").mkdir()
    for name in ("job.py", "helper.py", ".git/config.py", "__pycache__/old.py", "notes.txt"):
        (project / name).write_text(f"# {name}")
    options = {"task": "custom", "model_path": f"{project / 'job.py'}:build", "cache_dir": "/somewhere/here"}
    return collect(plan_local_run(profile_from_options("mine", options), 2))


def test_the_plan_names_what_is_there(inputs: Inputs) -> None:
    assert inputs.plan.profile.model.model_path == "inputs/user/job.py:build"
    assert inputs.plan.profile.data.cache_dir == ""
    assert sorted(inputs.trees["inputs/user"].files) == ["helper.py", "job.py"]
    assert "training/workers/worker.py" in inputs.trees["inputs/code"].files


def test_every_module_of_the_core_travels_whatever_its_folder_is_called(inputs: Inputs) -> None:
    modules = {str(path.relative_to(TOP)) for room in ("training", "speech") for path in (TOP / room).rglob("*.py")}
    assert {*modules, "speech/entry_points.txt"} <= inputs.trees["inputs/code"].files.keys()


def test_a_package_that_adds_a_task_travels_with_what_it_is_found_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, metadata = tmp_path / "their_task", tmp_path / "their_task-1.0.dist-info"
    for path, content in {
        package / "__init__.py": "",
        package / "points.csv": "1,2",
        metadata / "METADATA": "Metadata-Version: 2.1\nName: their-task\nVersion: 1.0\n",
        metadata / "entry_points.txt": "[muster.tasks]\ntheirs = their_task\n",
        metadata / "RECORD": "their_task-1.0.dist-info/METADATA,,\ntheir_task-1.0.dist-info/entry_points.txt,,\n",
    }.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(code_sync, "plugins", lambda group: tuple(Distribution.at(metadata).entry_points))
    register("theirs", "a task of a stranger", lambda profile: None)
    try:
        sent = collect(plan_local_run(profile_from_options("p", {"task": "theirs"}), 1)).trees["inputs/code"].files
    finally:
        forget("theirs")
    assert {"their_task/__init__.py", "their_task-1.0.dist-info/entry_points.txt", "training/lazy.py"} <= sent.keys()


def test_an_optimizer_of_ones_own_travels_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("rates.py", "beside.py", "notes.txt"):
        (tmp_path / "mine" / name).write_text(f"# {name}")
    options = {"task": "causal_lm", "model_path": "owner/name", "optimizer": f"{tmp_path}/mine/rates.py:build"}
    found = collect(plan_local_run(profile_from_options("text", options), 1))
    assert found.plan.profile.training.optimizer == "inputs/optimizer/rates.py:build"
    assert sorted(found.trees["inputs/optimizer"].files) == ["beside.py", "rates.py"]


def test_an_outer_optimizer_of_ones_own_travels_with_the_strategy_that_uses_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "outer.py").write_text("# outer.py")
    options = {"task": "causal_lm", "model_path": "owner/name", "strategy": "diloco"}
    options["diloco.outer_optimizer"] = f"{tmp_path}/mine/outer.py:signs"
    found = collect(plan_local_run(profile_from_options("text", options), 1))
    assert found.plan.profile.strategy.owned["diloco"].outer_optimizer == "inputs/outer/outer.py:signs"
    assert list(found.trees["inputs/outer"].files) == ["outer.py"]


def test_a_data_set_travels_as_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be")
    for path, there in ((tmp_path / "text.txt", "inputs/dataset/text.txt"), (tmp_path, "inputs/dataset")):
        options = {"task": "causal_lm", "model_path": "owner/name", "dataset_path": str(path)}
        found = collect(plan_local_run(profile_from_options("text", options), 1))
        assert found.plan.profile.data.dataset_path == there
        assert list(found.trees["inputs/dataset"].files) == ["text.txt"]
        assert "inputs/model" not in found.trees


def test_patches_travel_with_their_data_set(tmp_path: Path) -> None:
    table, patch = speech_table(tmp_path, "a.wav", "b.wav"), tmp_path / "patches" / "delete" / "mine.csv"
    patch.parent.mkdir(parents=True)
    patch.write_text("id\n1\n")
    (tmp_path / "b.wav").unlink()  # the patch leaves it out
    for path in (table, tmp_path):
        found = speech_inputs(path).trees["inputs/dataset"].files
        assert sorted(found) == ["a.wav", "any.csv", "patches/delete/mine.csv"]


def speech_table(folder: Path, *recordings: str) -> Path:
    for name in recordings:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    lines = [f"{number},{name},hello" for number, name in enumerate(recordings)]
    (folder / "any.csv").write_text("\n".join(["id,audio_path,text", *lines]) + "\n")
    return folder / "any.csv"


def speech_inputs(path: Path, **options: str) -> Inputs:
    options = {"model_path": "owner/name", "dataset_path": str(path), **options}
    return collect(plan_local_run(profile_from_options("speech", options), 1))


@pytest.mark.slow
def test_the_recordings_of_a_lone_table_travel_with_it_and_nothing_else(link: MachineLink, tmp_path: Path) -> None:
    data = tmp_path / "data"
    table = speech_table(data, "clips/a.wav", "clips/deep/../b.wav", "c.wav")
    (data / "clips" / "private.wav").write_text("not named")
    found = speech_inputs(table)
    tree = found.trees["inputs/dataset"]
    assert sorted(tree.files) == ["any.csv", "c.wav", "clips/a.wav", "clips/b.wav"]
    assert found.plan.profile.data.dataset_path == "inputs/dataset/any.csv"
    send_trees(link, found.trees.values())
    assert (tmp_path / "far" / "trees" / tree.name / "clips" / "a.wav").read_text() == "clips/a.wav"


def test_a_pseudo_table_travels_where_it_is_used(tmp_path: Path) -> None:
    table = speech_table(tmp_path, "a.wav")
    (tmp_path / "p.wav").write_text("p")
    (tmp_path / "pseudo.csv").write_text("id,audio_path,text\np,p.wav,guessed\n")
    assert sorted(speech_inputs(table).trees["inputs/dataset"].files) == ["a.wav", "any.csv"]
    used = speech_inputs(table, pseudo_share="0.5").trees["inputs/dataset"].files
    assert sorted(used) == ["a.wav", "any.csv", "p.wav", "pseudo.csv"]


@pytest.mark.parametrize(
    ("way", "said"), [("{data}/../far.wav", "an absolute path"), ("{data}/a.wav", "an absolute path"),
                      ("../far.wav", "outside of the table's folder"), ("../../etc/passwd", "is not there, nor")]
)  # fmt: skip
def test_recordings_that_cannot_travel_are_told_with_the_line(tmp_path: Path, way: str, said: str) -> None:
    data = tmp_path / "data"
    table = speech_table(data, "a.wav", "b.wav")
    (tmp_path / "far.wav").write_text("far")
    table.write_text(table.read_text().replace("b.wav", way.format(data=data)))
    with pytest.raises(BadInput, match=rf"any.csv, line 3.*{said}.*(relative to .*folder|mend such lines)"):
        speech_inputs(table)


def test_a_teacher_travels_once(tmp_path: Path) -> None:
    for name in ("teacher", "student"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    teacher, student = str(tmp_path / "teacher"), str(tmp_path / "student")

    def models(**options: str) -> tuple[list[str], tuple[str, str]]:
        found = collect(plan_local_run(profile_from_options("p", {"teacher_path": teacher, **options}), 1))
        return sorted(found.trees)[1:], (found.plan.profile.model.model_path, found.plan.profile.model.teacher_path)

    assert models() == (["inputs/model"], ("inputs/model", "inputs/model"))
    assert models(model_path=student) == (["inputs/model", "inputs/teacher"], ("inputs/model", "inputs/teacher"))


@pytest.mark.slow
def test_what_is_there_is_not_sent_again(link: MachineLink, inputs: Inputs, tmp_path: Path) -> None:
    assert send_trees(link, inputs.trees.values()) > 50
    assert send_trees(link, inputs.trees.values()) == 0
    (tmp_path / "project" / "helper.py").write_text("# changed")
    assert send_trees(link, collect_again(tmp_path).trees.values()) == 1
    tree = tmp_path / "far" / "trees" / collect_again(tmp_path).trees["inputs/user"].name
    assert (tree / "helper.py").read_text() == "# changed" and (tree / "job.py").read_text() == "# job.py"


def test_what_travels_with_a_package_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "pack/__init__.py",
        "pack/deep/a.py",
        "pack/.hidden/b.py",
        "pack/env/pyvenv.cfg",
        "pack/env/c.py",
        "d.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def names(module: str) -> list[str]:
        files, top = user_sources(module)
        return [str(path.relative_to(top)) for path in files]

    assert names("pack.deep.a") == ["pack/__init__.py", "pack/deep/a.py"]
    assert names("d") == names(f"{tmp_path}/d.py") == ["d.py", "pack/__init__.py", "pack/deep/a.py"]
    assert names("torch.nn") == names("training.data.sample_order") == names("json") == []


@pytest.mark.slow
def test_a_folder_full_of_python_is_refused(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 1):
        (tmp_path / f"file_{number}.py").write_text("")
    with pytest.raises(BadInput, match="more than 2000 Python files"):
        user_sources(f"{tmp_path}/file_0.py")
    with pytest.raises(BadInput, match="module nowhere_at_all.x: not found from"):
        user_sources("nowhere_at_all.x")


def collect_again(tmp_path: Path) -> Inputs:
    options = {"task": "custom", "model_path": f"{tmp_path / 'project' / 'job.py'}:build"}
    return collect(plan_local_run(profile_from_options("mine", options), 2))


def test_content_that_does_not_fit_its_hash_is_refused(tmp_path: Path) -> None:
    name = "0" * 64
    with pytest.raises(ValueError, match="damaged"):
        agent_files.store(tmp_path, name, io.BytesIO(b"something else"))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "ab", ""])
def test_a_blob_has_a_hash_for_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a content hash"):
        agent_files.blob_path(tmp_path, name)


def test_a_tree_stays_inside_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves its tree"):
        agent_files.build_tree(tmp_path, "t", {"../../outside": "0" * 64})


def test_what_is_no_file_stays_here_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to nothing, as trackers leave it, a named pipe, a socket; a link to a file is that file."""
    folder = tmp_path / "project"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "train.py").write_text("pass")
    (folder / "again.py").symlink_to("train.py")
    (folder / "checkpoints" / "last").symlink_to("step-900")
    (folder / "data").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("x.sock")
        (folder / ".hidden").symlink_to("nothing")
        assert [path.name for path in launched_files(folder)] == ["again.py", "train.py"]
        assert left_out(folder) == [
            "data (a link to a folder)",
            "pipe (a named pipe)",
            "x.sock (a socket)",
            "checkpoints/last (a link to nothing)",
        ]
