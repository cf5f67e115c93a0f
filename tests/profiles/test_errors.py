"""What an error carries beside its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.ssh.errors import PortClosed
from profiles.errors import BadInput, MusterError, counted
from profiles.files.resolve import profile_from_options
from training.records.run_folder import RunFolder


def test_a_message_begins_with_what_it_is_about_and_a_row_beside_it_need_not() -> None:
    error = PortClosed("air", "nothing listens: port 22", "start it")
    assert (error.message, error.machine) == ("air: nothing listens: port 22", "air")
    assert (error.message_for("air"), error.message_for("airy")) == ("nothing listens: port 22", error.message)
    plain = MusterError("air: is a word")
    assert (plain.message, plain.problem, plain.message_for("air")) == ("air: is a word",) * 3


def test_a_value_that_does_not_fit_names_its_option() -> None:
    with pytest.raises(BadInput) as caught:
        profile_from_options("p", {"model_path": 'a": b', "batch_size": "none"})
    assert caught.value.option == "batch_size"
    assert caught.value.problem in caught.value.message and "none" not in caught.value.problem


def test_a_folder_that_is_no_run_is_the_errors_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        RunFolder.open(tmp_path)
    assert (caught.value.file, caught.value.message) == (str(tmp_path), f"{tmp_path}: {caught.value.problem}")


def test_one_of_what_is_counted_is_singular_and_all_else_plural() -> None:
    assert [counted(count, "clip") for count in (0, 1, 2)] == ["0 clips", "1 clip", "2 clips"]
    assert [counted(count, "step is", "steps are") for count in (1, 2)] == ["1 step is", "2 steps are"]
