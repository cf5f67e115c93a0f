from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiles.errors import BadInput, RunFailed
from profiles.schema import Profile
from tests.preloaded.python import python_itself
from training.records.events import WarningEvent
from training.records.plan import MemberPlan, RunPlan
from training.records.run_folder import RUN_ID, RunFolder, folder_name, new_run_id, rerun_script


def make_plan(run_id: str = "20261121-013005-ab12", name: str = "demo", workers: int = 2) -> RunPlan:
    members = tuple(MemberPlan(rank=rank, name="here", batch_size=4) for rank in range(workers))
    return RunPlan(run_id=run_id, profile=Profile(name=name), members=members, engine="mesh")


def make(output: Path, run_id: str = "20261121-013005-ab12") -> RunFolder:
    return RunFolder.create(output, make_plan(run_id), ["distributed-train", "demo"])


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) > 45
    assert all(RUN_ID.fullmatch(run_id) for run_id in ids)


def test_a_new_folder_has_what_the_contract_says(tmp_path: Path) -> None:
    with make(tmp_path / "output") as folder:
        assert folder.path.name == "20261121-013005-ab12-demo"
        names = {path.name for path in folder.path.iterdir()}
        assert {"metadata.json", "plan.json", "events.jsonl", "logs", "checkpoints", "secrets"} <= names
        assert folder.plan() == make_plan()


@pytest.mark.parametrize("word", ["two words", "it's", "$HOME", "*", "-n"])
def test_the_command_of_a_run_starts_the_same_again(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    monkeypatch.chdir(place)
    with RunFolder.create(tmp_path, make_plan(), ["printf", "%s\n", word]) as folder:
        done = subprocess.run([folder.path / "command.sh", "more"], capture_output=True, text=True, check=True, cwd="/")
        assert done.stdout == f"{word}\nmore\n"
    with RunFolder.create(tmp_path, make_plan("20261121-013005-ab13"), ["LocalTrainer.fit"]) as folder:
        assert not (folder.path / "command.sh").exists()
    assert rerun_script(["run.py"]).splitlines()[1:] == [
        f"cd -- '{place}' || exit",
        f'exec {sys.executable} run.py "$@"',
    ]


def test_private_files_are_private(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append(WarningEvent(message="x"))
        private = [folder.path / name for name in ("metadata.json", "plan.json", "events.jsonl")]
        assert {mode(path) for path in [*private, folder.log_path("here")]} == {0o600}
        assert mode(folder.secrets) == 0o700


def test_metadata_names_the_choice(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        metadata = json.loads((folder.path / "metadata.json").read_text())
    assert metadata["profile"] == "demo"
    assert metadata["status"] == "starting"
    assert metadata["config"]["training"]["batch_size"] == 8
    assert [host["rank"] for host in metadata["hosts"]] == [0, 1]
    assert metadata["versions"]["python"] == sys.version.split()[0]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "räum 1", "x" * 300])
def test_any_profile_name_stays_inside_the_output_folder(tmp_path: Path, name: str) -> None:
    plan = make_plan(name=name)
    with RunFolder.create(tmp_path / "out", plan, []) as folder:
        assert folder.path.parent == tmp_path / "out"
    assert os.sep not in folder_name(plan)


def test_a_file_in_the_way_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("mine")
    with pytest.raises(BadInput, match="a file has the name"):
        make(tmp_path / "output" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_run_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    make(tmp_path).close()
    with pytest.raises(BadInput, match="already exists"):
        make(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="no permission"):
        make(tmp_path / "output")


IN_A_SMALL_FILE_SYSTEM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_run_folder import make
from profiles.errors import BadInput
root = Path(sys.argv[1])
try:
    make(root / "output")
except BadInput as error:
    print(error.message, [path.name for path in root.iterdir()])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root on Linux")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ro", "the file system is read-only"),
        ("size=4k", "the disk is full"),
        ("nr_inodes=4", "the file system has no inodes left for more files"),
    ],
)
def test_a_disk_that_refuses_is_named_and_nothing_is_left(tmp_path: Path, options: str, message: str) -> None:
    script = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3" "$1" "$4"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, IN_A_SMALL_FILE_SYSTEM]
    done = subprocess.run([*command, str(Path(__file__).parent)], capture_output=True, text=True, check=False)
    if "mount" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.stdout.strip().endswith(f"{message} []"), done.stderr


@pytest.mark.slow
def test_only_one_process_works_on_a_run(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        with pytest.raises(BadInput, match=f"process {os.getpid()} is working"):
            RunFolder.resume(folder.path, folder.plan(), [])
        assert RunFolder.open(folder.path).live
    assert not RunFolder.open(folder.path).live


HOLD = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_run_folder import make
folder = make(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_lock_of_a_killed_process_locks_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (path,) = tmp_path.iterdir()
        assert RunFolder.open(path).live
        holder.kill()
    assert not RunFolder.open(path).live
    RunFolder.resume(path, make_plan(), []).close()


def test_a_resumed_run_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.append(WarningEvent(message="first"))
        first_log = folder.log_path("here")
        first_log.write_text("kept")
        folder.finish("cancelled", {})
    with RunFolder.resume(folder.path, make_plan(), ["again"]) as again:
        assert again.append(WarningEvent(message="second")).seq == 1
        assert again.log_path("here") != first_log
        assert again.metadata.attempt == 2
        assert again.metadata.status == "starting"
        assert again.metadata.end_time is None
    assert first_log.read_text() == "kept"
    assert [e.message for e in again.events() if isinstance(e, WarningEvent)] == ["first", "second"]


def test_a_stop_that_nobody_heard_and_removed_logs_do_not_end_a_resumed_run(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        unheard = folder.path / "requests" / "1-a.json"
        unheard.write_text('{"action": "stop"}')
        folder.logs.rmdir()
    with RunFolder.resume(folder.path, make_plan(), ["again"]) as again:
        assert not unheard.exists()
        assert again.log_path("here").is_file()


def test_a_resume_with_another_plan_that_never_trains_leaves_the_plan_as_it_was(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.finish("failed", {})
    plan, other = make_plan(), make_plan(workers=3)
    for _ in range(2):  # the first is killed before it ends
        RunFolder.resume(folder.path, other, []).close()
    assert RunFolder.open(folder.path).plan() == other
    assert RunFolder.open(folder.path).plan_before() == plan
    with RunFolder.resume(folder.path, other, []) as again:
        again.put_back()
    assert RunFolder.open(folder.path).plan() == RunFolder.open(folder.path).plan_before() == plan
    with RunFolder.resume(folder.path, other, []) as again:
        again.begin("running")
    assert RunFolder.open(folder.path).plan() == RunFolder.open(folder.path).plan_before() == other
    assert not list(folder.path.glob("plan.*.json"))


KILLED_BEFORE_A_CHANGE = """
import os, signal, sys
from pathlib import Path
from training.records import run_folder
from training.records.plan import read_plan

def counted(change):
    def carried_out(*arguments, **options):
        global changes
        if not changes:
            os.kill(os.getpid(), signal.SIGKILL)
        changes -= 1
        return change(*arguments, **options)
    return carried_out

run_folder.write_atomically, Path.unlink = counted(run_folder.write_atomically), counted(Path.unlink)
for changes, folder in enumerate(sys.argv[2:]):
    if not (child := os.fork()):
        run_folder.RunFolder.resume(Path(folder), read_plan(Path(sys.argv[1])), []).begin("running")
        sys.exit("nobody has killed it")
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_a_resume_that_is_killed_anywhere_leaves_the_plan_that_was_trained(tmp_path: Path) -> None:
    folders = [make(tmp_path / str(changes)) for changes in range(7)]
    for folder in folders:
        folder.finish("failed", {})
        folder.close()
    (resumed := tmp_path / "resumed.json").write_text(make_plan(workers=3).model_dump_json())
    words = [python_itself(), "-c", KILLED_BEFORE_A_CHANGE, resumed, *(folder.path for folder in folders)]
    subprocess.run(words, check=True)
    for trained, folder in zip([make_plan()] * 6 + [make_plan(workers=3)], folders, strict=True):
        with RunFolder.resume(folder.path, make_plan(workers=4), []) as again:
            assert again.plan() == make_plan(workers=4) and again.plan_before() == trained
            again.put_back()
            assert again.plan() == again.plan_before() == trained


def test_keys_do_not_outlive_the_run(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        (folder.secrets / "coordinator.key").write_text("secret")
    assert not (folder.path / "secrets").exists()


def test_finish_writes_metrics_and_marker(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.finish("completed", {"wer": 0.04, "bad": float("nan"), "list": (1.0, float("inf"))})
    assert json.loads((folder.path / "metrics.json").read_text()) == {"wer": 0.04, "bad": None, "list": [1.0, None]}
    assert (folder.path / "completed").exists()
    assert RunFolder.open(folder.path).metadata.status == "completed"


def test_a_failed_run_has_no_marker(tmp_path: Path) -> None:
    with make(tmp_path) as folder:
        folder.finish("failed", {}, "NaN loss at step 3")
    assert not (folder.path / "completed").exists()
    assert RunFolder.open(folder.path).metadata.error_message == "NaN loss at step 3"


def test_metadata_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with make(tmp_path) as folder:
        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(RunFailed, match="the disk is full"):
            folder.update_metadata(status="running")
        assert RunFolder.open(folder.path).metadata.status == "starting"
        assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": 3}', "\x00" * 20])
def test_damaged_metadata_is_bad_input(tmp_path: Path, content: str) -> None:
    (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(BadInput, match="damaged"):
        RunFolder.open(tmp_path)


def test_a_folder_that_is_no_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_a_folder_open_for_reading_takes_no_events(tmp_path: Path) -> None:
    make(tmp_path).close()
    (path,) = tmp_path.iterdir()
    with pytest.raises(RunFailed, match="reading only"):
        RunFolder.open(path).append(WarningEvent(message="x"))


@pytest.mark.slow
def test_importing_the_run_folder_does_not_import_torch() -> None:
    code = "import sys, training.records.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
