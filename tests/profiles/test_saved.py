from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput
from profiles.files.ini import parse_ini
from profiles.files.library import check_name
from profiles.files.resolve import load_profile, save_profile

Write = Callable[..., Path]
VALUES = {"model": "o/m", "dataset": "o/d", "batch_size": "4"}


def test_what_is_saved_is_loaded(write: Write) -> None:
    config = write("[DEFAULT]\nseed = 9\n")
    path = save_profile("mine", VALUES, config)
    resolved = load_profile("mine", {}, config)
    assert (resolved.profile.training.batch_size, resolved.profile.training.seed) == (4, 9)
    assert resolved.origins["batch_size"].file == path == config.parent / "profiles" / "saved" / "mine.ini"


def test_saving_again_replaces_the_values_and_keeps_the_rest(write: Write) -> None:
    text = "# mine\n[model:m]\nmodel_path = o/x\n\n[profile:mine]\n# why\nseed = 1\nmodel = m\n\n[dataset:d]\n"
    config = write("", mine=text)
    path = save_profile("mine", {"model": "m", "batch_size": "2"}, config)
    assert path.read_text() == text.replace("seed = 1\nmodel = m\n", "model = m\nbatch_size = 2\n")


@pytest.mark.parametrize("name", ["../x", "", ".x", "a/b", "x" * 65, "a b", "-x", "x\n", "é"])
def test_bad_names(name: str, write: Write, tmp_path: Path) -> None:
    config = write("")
    with pytest.raises(BadInput, match="cannot be the name of a profile"):
        save_profile(name, VALUES, config)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.ini"]


@given(st.text(max_size=12))
def test_a_good_name_is_one_file_below_the_folder(name: str) -> None:
    try:
        check_name(name)
    except BadInput:
        return
    assert os.path.normpath(f"folder/{name}.ini") == f"folder/{name}.ini"
    assert "/" not in name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_sise": "1"}, "did you mean 'batch_size'?"),
        ({"sync_intervall": "1"}, "did you mean 'sync_interval'?"),
        ({"batch_size": "x"}, 'mine.ini [profile:mine] batch_size = "x": not a whole number'),
        ({"language": "en\n[profile:b]"}, "cannot be kept in an INI file"),
        ({"language": "en # de"}, "cannot be kept in an INI file"),
        ({"model": "none"}, "neither a [model:NAME] section nor a path"),
    ],
)
def test_nothing_is_written_for_bad_values(
    values: dict[str, str], message: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write("")
    monkeypatch.chdir(config.parent)
    with pytest.raises(BadInput, match=re.escape(message)):
        save_profile("mine", values, config)
    assert not (config.parent / "profiles").exists()


def test_a_name_that_is_taken(write: Write) -> None:
    config = write("[profile:mine]\n")
    with pytest.raises(BadInput, match=r"config\.ini and in .*mine\.ini"):
        save_profile("mine", VALUES, config)


def test_a_name_that_differs_only_in_case(write: Write) -> None:
    with pytest.raises(BadInput, match="only in case"):
        save_profile("Mine", VALUES, write("[profile:mine]\n"))


def test_a_companion_that_would_win_is_named(write: Write) -> None:
    config = write("", mine="[profile:mine]\n[distributed:mine]\nstrategy = diloco\n")
    with pytest.raises(BadInput, match=r'\[distributed:mine\] strategy = "diloco" would win'):
        save_profile("mine", {"strategy": "allreduce"}, config)


def test_paths_mean_the_same_seen_from_the_saved_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write("[model:m]\nmodel_path = o/m\n")
    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    path = save_profile("mine", {"model": "m", "dataset": "data", "output_dir": "runs"}, config)
    entries = parse_ini(path.read_text(), path).sections["profile:mine"].entries
    assert entries["dataset"].value == "../../here/data"
    profile = load_profile("mine", {}, config).profile
    assert profile.data.dataset_path == str(tmp_path / "here" / "data")
    assert profile.run.output_dir == str(tmp_path / "here" / "runs")


def test_a_path_outside_the_project_is_saved_whole(write: Write) -> None:
    path = save_profile("mine", {"model": "o/m", "dataset": "/"}, write(""))
    assert parse_ini(path.read_text(), path).sections["profile:mine"].entries["dataset"].value == "/"


def test_a_damaged_file_is_not_overwritten(write: Write) -> None:
    config = write("", mine="precious text\n")
    with pytest.raises(BadInput, match="is not 'key = value'"):
        save_profile("mine", VALUES, config)
    assert (config.parent / "profiles" / "saved" / "mine.ini").read_text() == "precious text\n"


def test_a_folder_that_cannot_be_made(write: Write) -> None:
    config = write("")
    (config.parent / "profiles").write_text("a file where the folder should be")
    with pytest.raises(BadInput, match="choose a folder that can be written"):
        save_profile("mine", VALUES, config)
