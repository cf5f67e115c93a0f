"""Jobs whose modules have the names of Muster's packages, and jobs that import what lies beside them."""

from __future__ import annotations

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from profiles.errors import BadInput
from training.tasks.name_clashes import refuse_clash
from training.tasks.user_code import find_factory


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__", "/", 1) + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "hidden"),
    [
        ({"job": "from app import model", "app": ""}, "app.py"),
        ({"job": "import training.net", "training__net": ""}, "training"),
        ({"job": "def build():\n    from profiles import x", "profiles__/__init__": ""}, "profiles"),
        ({"job": "import helper", "helper": "from distributed import x", "distributed": ""}, "distributed.py"),
        (
            {
                "job": "from tools import a",
                "tools__/__init__": "",
                "tools__a": "from . import b",
                "tools__b": "import app",
                "app": "",
            },
            "app.py",
        ),
    ],
)
def test_a_module_that_muster_would_hide_is_named(tmp_path: Path, files: dict[str, str], hidden: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(BadInput) as caught:
        refuse_clash(str(tmp_path / "job.py"), "model_path")
    problem = f"{tmp_path / hidden} has the name of a package of Muster, which is imported in its place"
    assert (caught.value.message, caught.value.option) == (f"model_path: {problem}", "model_path")


@pytest.mark.parametrize(
    "files",
    [
        {"job": "import torch", "app": "", "training__net": ""},
        {"job": "from training.strategies.base import Strategy", "training__data": ""},
        {"job": "import helper", "helper": "not python ("},
    ],
)
def test_what_nobody_imports_is_no_clash(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, **files)
    refuse_clash(str(tmp_path / "job.py"), "model_path")


def test_a_module_of_the_current_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, training__job="", mine__job="")
    monkeypatch.chdir(tmp_path)
    refuse_clash("mine.job", "model_path")
    with pytest.raises(BadInput, match="training has the name of a package"):
        find_factory("training.job:build")


def test_a_job_imports_a_module_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, job_with_neighbour="from neighbour_of_job import build", neighbour_of_job="def build(): return 3")
    assert find_factory(str(tmp_path / "job_with_neighbour.py:build"))() == 3


def test_members_that_are_threads_can_read_a_job_at_the_same_time(tmp_path: Path) -> None:
    """Python 3.11 ends with a SystemError where threads change while they build syntax trees (cpython#106905)."""
    write(tmp_path, job="def build(x):\n    return [x + 1, {x: (x,)}]\n" * 20)

    def change_threads(phase: str, info: object) -> None:
        time.sleep(0.0005)

    threshold = gc.get_threshold()
    gc.freeze()
    gc.callbacks.append(change_threads)
    try:
        gc.set_threshold(50)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(refuse_clash, [str(tmp_path / "job.py")] * 6, ["model_path"] * 6))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(change_threads)
        gc.unfreeze()
