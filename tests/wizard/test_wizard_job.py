"""The Job screen's facts: options with their errors, the data set, the model's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.wizard.services.job_view import data_of, fits_of, job_of, resolved, selection_of
from app.wizard.services.outside import Outside
from app.wizard.state.data_actions import LEAVE_OUT
from app.wizard.state.records import ItemStatus, JobAnswers, JobForm, JobOption
from distributed.checks.findings import Health
from distributed.checks.job import judge_memory
from profiles.options import canonical
from profiles.quantities import memory_text
from profiles.schema import DataSettings, Profile
from tests.wizard.fake_services import ANNA
from training.tasks.published_models import created_folder
from training.tasks.registry import size_for
from training.workers.data_findings import findings

ROOT = Path(__file__).parents[2]
DEMO = JobAnswers("demo")


def option(job: JobForm, name: str) -> JobOption:
    return next(row for row in job.options if row.name == name)


def test_the_demos_options_with_a_change() -> None:
    job = job_of(JobAnswers("demo", (("batch_size", "4"),)))
    assert (option(job, "batch_size").value, option(job, "batch_size").default) == ("4", "16")
    assert option(job, "batch_size").changed and not option(job, "learning_rate").changed
    assert [row.name for row in job.options[:2]] == ["epochs", "batch_size"]
    assert (job.model, job.dataset, job.assessment.status) == ("tiny-commands", "spoken-commands", ItemStatus.OK)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("batch_size", "many", "whole number"),
        ("learning_rate", "99", "<= 10"),
        ("epochs", "1e9", "too large (passes over the training data, in epochs, > 0, <= 10000)"),
        ("max_steps", "1000000000", "<= 10000000"),
        ("diloco.sync_delay", "77", "below sync_interval"),
        ("sync_delay", "77", "below sync_interval"),
    ],
)
def test_a_wrong_value_is_said_beside_its_option(name: str, value: str, cause: str) -> None:
    row = option(job_of(JobAnswers("demo", ((name, value),))), canonical(name))
    assert cause in row.problem and row.value == value


@pytest.mark.parametrize(
    ("strategy", "name", "value"), [("noloco", "error_feedback", "true"), ("sparta + diloco", "codec", "mxfp4")]
)
def test_what_the_strategy_refuses_is_said_beside_its_option(strategy: str, name: str, value: str) -> None:
    row = option(job_of(JobAnswers("demo", (("strategy", strategy), (name, value)))), name)
    assert row.problem and row.value == value


def test_a_layout_that_goes_with_no_machines_is_said() -> None:
    job = job_of(JobAnswers("demo", (("layout", "auto"), ("stages", "2"))))
    assert job.assessment.status is ItemStatus.FAILED and "stages = 2 is for a pipeline" in job.assessment.cause


def test_a_model_that_is_none_is_said() -> None:
    job = job_of(JobAnswers("demo", (("model", "no-such"),)))
    assert job.assessment.status is ItemStatus.FAILED and "no-such" in job.assessment.cause


def test_how_machines_work_together_is_open_unless_somebody_chose() -> None:
    assert resolved(DEMO).profile.strategy.strategy == "auto"
    assert resolved(JobAnswers("demo", (("strategy", "diloco"),))).profile.strategy.strategy == "diloco"


def test_a_profile_without_data_says_so_at_once() -> None:
    row = data_of(resolved(JobAnswers("whisper-tiny-lora"), complete=False).profile, Outside())
    assert (row.assessment.status, row.assessment.cause) == (ItemStatus.FAILED, "no data set is chosen")


def test_broken_recordings_are_counted(tmp_path: Path) -> None:
    good = next((ROOT / "examples/spoken_commands/audio/test").rglob("*.opus"))
    (tmp_path / "good.opus").write_bytes(good.read_bytes())
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    (tmp_path / "train.csv").write_text("id,audio_path,text\na,good.opus,yes\nb,bad.wav,no\n")
    profile = Profile(name="x", data=DataSettings(dataset_path=str(tmp_path)))
    hours = findings(profile)["hours"]
    (tmp_path / "test.csv").write_text("id,audio_path,text\nc,held.opus,yes\n")
    (tmp_path / "held.opus").write_bytes(good.read_bytes())
    found = findings(profile)
    assert found["hours"] == hours > 0  # of those to train on, as many as are counted beside it
    assert found["splits"] == {"train": 2, "test": 1} and found["broken_count"] == 1
    assert "bad.wav" in found["broken"][0] and found["columns"] == ["id", "audio_path", "text"]
    assert found["examples"] == ["yes", "no"]


def test_recordings_longer_than_the_window_are_a_red_row(tmp_path: Path) -> None:
    (tmp_path / "a.opus").write_bytes(next((ROOT / "examples/spoken_commands/audio/test").rglob("*.opus")).read_bytes())
    (tmp_path / "train.csv").write_text("id,audio_path,text,duration\na,a.opus,yes,10\n")
    profile = resolved(JobAnswers("demo-scratch", (("dataset", str(tmp_path)),))).profile
    row = data_of(profile, Outside())
    assert (row.assessment.status, row.instead) == (ItemStatus.FAILED, "whisper-scratch")
    assert "longer than the model's window of 2 s" in row.assessment.cause
    hears = resolved(JobAnswers("whisper-scratch", (("dataset", str(tmp_path)), ("language", "en")))).profile
    assert "too few to learn much; 40 sentences" in data_of(hears, Outside()).assessment.cause


@pytest.mark.slow
def test_what_can_be_read_of_messy_recordings_becomes_a_data_set_beside_them(tmp_path: Path) -> None:
    folder, told = tmp_path / "my clips", list[str]()
    folder.mkdir()
    good = sorted((ROOT / "examples/spoken_commands/audio/test").rglob("*.opus"))[:3]
    for number, clip in enumerate(good):
        (folder / f"{number}.opus").write_bytes(clip.read_bytes())
    rows = ["0,0.opus,yes", "1,1.opus,no", "2,2.opus,", "3,gone.opus,up"]
    (folder / "train.csv").write_text("\n".join(["id,audio_path,text", *rows]))
    profile = Profile(name="x", data=DataSettings(dataset_path=str(folder)))
    row = data_of(profile, Outside())
    assert row.salvageable and (row.assessment.status, row.assessment.fix) == (ItemStatus.FAILED, LEAVE_OUT)
    assert row.problems[0] == "train.csv:4: column text is empty" and len(row.problems) == 2
    (tmp_path / "no table").mkdir()
    (tmp_path / "no table/a.opus").touch()
    tableless = profile.model_copy(update={"data": DataSettings(dataset_path=str(tmp_path / "no table"))})
    assert not data_of(tableless, Outside()).salvageable
    made = selection_of(profile, Outside(), told.append)
    assert (Path(made.folder), made.used, len(made.left_out)) == (tmp_path / "my clips-readable", 2, 2)
    assert any(reason.startswith("1 ") and "such as 3" in reason for reason in made.left_out) and told
    usable = profile.model_copy(update={"data": DataSettings(dataset_path=made.folder)})
    assert data_of(usable, Outside()).assessment.status is ItemStatus.WARNING  # they are few


def test_what_commands_did_to_the_data_is_said_with_what_shows_it(tmp_path: Path) -> None:
    good = next((ROOT / "examples/spoken_commands/audio/test").rglob("*.opus"))
    (tmp_path / "good.opus").write_bytes(good.read_bytes())
    rows = [f"{name},good.opus,yes" for name in "abcd"]
    (tmp_path / "train.csv").write_text("\n".join(["id,audio_path,text", *rows]))
    (tmp_path / "left_out.csv").write_text("id,reason\nz,silent\n")
    (tmp_path / "pseudo.csv").write_text("id,audio_path,text\ny,good.opus,no\n")
    patches = {"override_text/a": "id,text\na,no\n", "delete/mine": "id\nb\n", "delete/blacklist-x": "id\nc\n"}
    for name, lines in patches.items():
        path = tmp_path / "patches" / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    row = data_of(Profile(name="x", data=DataSettings(dataset_path=str(tmp_path))), Outside())
    prepared, divided, corrected, pseudo = row.notes
    assert divided == "no validation.csv: 1 recording of the training data held out"
    assert prepared == "prepared; 1 not taken: see left_out.csv"
    assert corrected.startswith("patches: 1 corrected, 1 left out, 1 blacklisted; ") and "patches" in corrected
    assert pseudo == "pseudo.csv: 1 text by a model; none taken; set pseudo_share"
    assert (row.samples, row.assessment.status) == (2, ItemStatus.WARNING)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("free", "total", "words"), [(7, 12, "does not fit"), (7, 64, "tight"), (60, 64, "fits")])
def test_the_set_up_and_the_check_say_the_same_of_memory(
    tmp_path: Path, free: int, total: int, words: str, device: str
) -> None:
    header = json.dumps({"a": {"shape": [1000, 1_000_000]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    profile = resolved(JobAnswers("demo", (("model_path", str(tmp_path)), ("fit_memory", "off")))).profile
    memory = {"free": free * 2**30, "total": total * 2**30}
    said: dict[str, Any] = {"machine": "x", "hardware": "x", "power": {"source": ""}, "inhibitor": "", "mtu": {}}
    if device == "cuda":
        gpus = {"nvidia": [{"name": "g", "driver": "1", **memory}], "devices": [{"device": "cuda:0", "problem": ""}]}
        said, memory = said | gpus, {"free": 2**40, "total": 2**40}
    health = Health.model_validate({**said, "memory": memory})
    (row,) = fits_of([ANNA], profile, {ANNA.key: health})
    assert row.words == words
    finding = judge_memory(profile, size_for(profile), None, health)
    if words != "does not fit":
        assert finding.seen.startswith(f"about {memory_text(row.needed)} needed (estimated)")
    assert finding.level == {"does not fit": "problem", "tight": "warning", "fits": "ok"}[words]


def test_what_is_not_known_does_not_keep_out() -> None:
    profile = resolved(JobAnswers("demo")).profile
    assert fits_of([ANNA], profile, {})[0].words == "not known yet"


def test_it_is_said_that_another_profile_stands_in() -> None:
    job = job_of(DEMO)
    assert (job.model, job.assessment.status) == ("tiny-commands", ItemStatus.OK)
    assert job.assessment.cause == "the model of demo cannot be downloaded (no internet)"
    assert job.assessment.fix == "a small new model is trained instead, by the profile demo-scratch"


def test_the_demo_fine_tunes_where_its_model_is_there(
    whisper_tiny_en: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    created_folder("openai/whisper-tiny.en").parent.mkdir(parents=True)
    created_folder("openai/whisper-tiny.en").symlink_to(whisper_tiny_en)
    job = job_of(DEMO)
    assert (job.model, job.dataset, job.assessment.cause) == ("whisper-tiny-en", "spoken-commands", "")
    assert resolved(DEMO).value("model_path") == "openai/whisper-tiny.en"  # the saved profile may travel


def test_a_profile_whose_model_is_gone_says_so_and_takes_another(tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text(f"[profile:mine]\ntask = whisper\nmodel_path = ./gone\ndataset_path = {tmp_path}\n")
    form = job_of(JobAnswers("mine"), config)
    assert form.assessment.status == ItemStatus.FAILED and "no such folder" in form.assessment.cause
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    (tmp_path / "here" / "model.safetensors").touch()
    other = job_of(JobAnswers("mine", (("model_path", str(tmp_path / "here")),)), config)
    assert other.assessment.status == ItemStatus.OK
