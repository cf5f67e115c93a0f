"""``launch`` as a person types it: scripts that know nothing of Muster, and how they end."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.cli.train.launch import script_of, with_written_files
from app.cli.train.torchrun import processes_here
from tests.waiting import until
from training.records.events import ErrorEvent, MachineEvent
from training.records.run_folder import RunFolder
from training.run.processes import processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MUSTER = (sys.executable, str(ROOT / "cli_typer.py"))
DDP = ROOT / "examples" / "launch" / "ddp.py"
SUM = """
import torch, torch.distributed as dist
{begin}
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total[0].item(), dist.get_backend())
"""


def muster(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MUSTER, *words], capture_output=True, text=True, timeout=240, check=False)


def launch(*arguments: str) -> tuple[int, str, str]:
    done = muster("launch", *arguments)
    return done.returncode, done.stdout, done.stderr


def script(text: str, name: str = "script.py") -> str:
    Path(name).write_text(text)
    return name


def only_run() -> RunFolder:
    (path,) = Path("output").iterdir()
    return RunFolder.open(path)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock torch has no way to train two processes on one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("no_gpu")
def test_a_plain_ddp_script_trains_on_the_mesh_to_what_gloo_trains_it_to() -> None:
    code, said, complained = launch("--local", "2", "--", str(DDP), "--steps", "20", "--out", "ours.pt")
    assert code == 0, complained
    ours = next(line for line in said.splitlines() if "loss" in line)
    code, said, complained = launch("--local", "2", "--backend", "script", "--", str(DDP), "--steps", "20")
    assert code == 0, complained
    stock = next(line for line in said.splitlines() if "loss" in line)
    assert "muster with 2 ranks" in ours and "muster" not in stock
    assert ours.rpartition(" ")[2] == stock.rpartition(" ")[2]
    assert Path("ours.pt").is_file()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "needs"),
    [("trainer", "accelerate"), ("accelerate_loop", "accelerate"), ("lightning_module", "pytorch_lightning")],
)
def test_trainers_of_others_run_unchanged(name: str, needs: str) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    code, said, complained = launch("--local", "2", "--", str(DDP.with_name(f"{name}.py")), "--steps", "5")
    assert code == 0, complained + said
    assert "muster with 2 ranks: loss 0." in said or "muster with 2 ranks: loss 3." in said


def test_whatever_a_script_says_it_gets_the_mesh_and_again_after_its_group_was_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All is started as a user starts it: the script loads torch itself."""
    monkeypatch.setenv("MUSTER_TESTS_COLD", "1")
    again = "group = dist.new_group([0, 1], backend='gloo')\n"
    again += "dist.all_reduce(total, group=group)\nprint('in it', dist.get_backend(group), total[0].item())\n"
    begins = [
        f"dist.init_process_group({n})"
        for n in ("", "'gloo'", "'cpu:gloo,cuda:nccl'", "'muster'", "init_method='env://'")
    ]
    begins.append("dist.init_device_mesh('cpu', (2,))")
    parts = (SUM.format(begin=begin) + again + "dist.destroy_process_group()\n" for begin in begins)
    code, said, complained = launch("--local", "2", "--", script("".join(parts)))
    assert code == 0, complained
    assert said.count("sum 3.0 muster") == said.count("in it muster 6.0") == 2 * len(begins)


def test_packages_of_a_script_win_over_ours_with_and_without_an_init_file() -> None:
    files = {"training/__init__.py": "", "training/here.py": "x = 7", "profiles/here.py": "x = 8",
             "distributed/utils/here.py": "x = 9", "app/here.py": "x = 10"}  # fmt: skip
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    imports = "import training.here, profiles.here, distributed.utils.here, app.here\n"
    told = "print(training.here.x, profiles.here.x, distributed.utils.here.x, app.here.x)"
    text = imports + SUM.format(begin="dist.init_process_group()") + told
    code, said, complained = launch("--local", "2", "--", script(text))
    assert code == 0, complained
    assert said.count("7 8 9 10") == said.count("sum 3.0 muster") == 2


LATE = """
import atexit, pickle, sys, threading, time
class Row: pass
main = threading.main_thread()
def copy(when): print(when, type(pickle.loads(pickle.dumps(Row()))).__name__, sys.modules["__main__"].__file__)
def late():
    main.join()
    copy("late")
threading.Thread(target=late).start()
atexit.register(copy, "last")
"""


@pytest.mark.parametrize("kind", [[], ["-m"]])
def test_a_script_is_the_main_module_to_the_end_of_its_process(
    kind: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started as a user starts it: it has no `__main__` to go back to."""
    monkeypatch.setenv("MUSTER_TESTS_COLD", "1")
    name = script(LATE)
    code, said, complained = launch("--local", "1", *kind, name.removesuffix(".py") if kind else name)
    assert code == 0, complained
    assert f"last Row {Path(name).resolve()}" in said and f"late Row {Path(name).resolve()}" in said


def test_a_module_runs_with_torchruns_environment() -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    Path("job").mkdir()
    Path("job/__init__.py").touch()
    script(f"import json, os, sys\nprint(json.dumps([sys.argv[1:], [os.environ[n] for n in '{names}'.split()]]))",
           "job/train.py")  # fmt: skip
    code, said, complained = launch("--local", "2", "-m", "job.train", "--x", "1")
    assert code == 0, complained
    found = sorted(json.loads(line.partition(": ")[2]) for line in said.splitlines() if "rank-" in line)
    assert [one[1][:7] for one in found] == [[f"{r}", "2", f"{r}", "2", "0", "1", "127.0.0.1"] for r in (0, 1)]
    assert found[0][0] == ["--x", "1"]


ENDS = """
import os, sys
{how}
"""
FAILS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group()
value = torch.zeros(4)
while True:
    dist.all_reduce(value)
    time.sleep(0.05)
    if dist.get_rank() == 1:
        {how}
"""


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        (FAILS, "raise ValueError('a bad sample')", "rank-1: ValueError: a bad sample"),
        (FAILS, "dist.destroy_process_group(); raise ValueError('a bad sample')", "rank-1: ValueError: a bad sample"),
        (
            FAILS,
            "os.kill(os.getpid(), 11)",
            "rank-1: the script was killed by signal 11: a crash in a compiled package",
        ),
        (ENDS, "sys.exit(3)", "rank-0: the script ended with exit code 3"),
        (ENDS, "sys.exit('no data in /data')", "rank-0: no data in /data"),
        (ENDS, "raise KeyboardInterrupt", "rank-0: KeyboardInterrupt"),
        (ENDS, "raise __import__('asyncio').CancelledError('over')", "rank-0: asyncio.exceptions.CancelledError: over"),
    ],
)
def test_one_that_fails_ends_all_and_is_the_one_that_is_named(text: str, how: str, message: str) -> None:
    local = "2" if text is FAILS else "1"
    code, _, complained = launch("--local", local, "--", script(text.format(how=how)))
    assert code == 1
    assert f"error: {message}" in complained
    folder = only_run()
    first = next(event for event in folder.events() if isinstance(event, ErrorEvent))
    assert first.message == folder.metadata.error_message == message
    assert folder.metadata.status == "failed"
    if "raise" in how:
        lines = complained.splitlines()
        assert lines.index("Traceback (most recent call last):") < lines.index(f"error: {message}")
        assert first.traceback.startswith('Traceback (most recent call last):\n  File "')
    until(lambda: processes_of(folder.metadata.run_id) == [])  # what was killed may still be on its way out


def test_one_that_ends_early_without_an_error_is_named_before_those_that_lost_it() -> None:
    code, _, complained = launch(
        "--standalone", "--nproc_per_node=2", script(FAILS.format(how="sys.exit(0)")), "--lr=1"
    )
    assert code == 1
    assert "error: rank-1 ended with exit code 0 while others still needed it; rank-0: RuntimeError" in complained


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--local", "2", "--nproc-per-machine", "2"], "--local and --nproc-per-machine do not go together"),
        (["--local", "2", "--hosts", "h.json"], "--local and --hosts do not go together"),
        (["--standalone", "--hosts", "h.json"], "--standalone or --nnodes 1 and --hosts do not go together"),
        (["--nnodes=2"], "--nnodes 2: the machines are those of a hosts file"),
        (["--rdzv_backend", "c10d"], "the processes find one another through a store of the run"),
        (["--rdzv-endpoint=host:0"], "the processes find one another through a store of the run"),
        (["--max-restarts", "on"], "--max-restarts on: no number from 0 to 100"),
        (["--max-restarts", "3", "--detach"], "--max-restarts and --detach do not go together"),
        (["--nproc_per_node", "cpu"], "--nproc-per-node cpu: no number from 1 to 64"),
        (["--num_processes", "2"], "No such option: --num_processes\nhint: write --local N"),
        (["-n", "2"], "No such option: -n\nhint: write --local N"),
        (["--tee=3"], "No such option: --tee\nhint: leave it out: all ranks' output is shown"),
        (["--mixed_precision", "bf16"], "No such option: --mixed_precision\nhint: leave it out, and say it in"),
    ],
)
def test_torchruns_words_that_mean_nothing_here_get_ours(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words, script("pass"), "--lr", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {problem}" + "\nhint: " * ("hint" not in problem))


@pytest.mark.parametrize(
    ("local", "each", "alone", "processes"), [(3, 0, False, 3), (0, 2, True, 2), (0, 2, False, 2), (0, 0, False, 0)]
)
def test_how_many_processes_this_machine_gets(local: int, each: int, alone: bool, processes: int) -> None:
    assert processes_here(local, each, None, alone) == processes
    Path("distributed_hosts.json").touch()  # whose machines get as many each
    assert processes_here(local, each, None, alone) == (0 if each and not alone else processes)


RESTARTS = """
import os, pathlib, sys, torch, torch.distributed as dist
dist.init_process_group()
saved = pathlib.Path("step")
begin = int(saved.read_text()) if saved.exists() else 0
dist.barrier()
for step in range(begin, 6):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        saved.write_text(str(step + 1))
    dist.barrier()
    if step in (1, 3) and begin <= step - 1 and dist.get_rank() == 1:
        os._exit(9)  # as of a machine that is lost
print("went on at", begin, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
"""


def test_a_script_goes_on_from_its_checkpoints_in_a_new_group() -> None:
    code, said, complained = launch("--local", "2", "--max-restarts", "3", "--", script(RESTARTS))
    assert code == 0, complained
    assert said.count("went on at 4 2 3") == 2
    assert "restart 2 of 3: a new group begins" in complained and "restart 3" not in complained
    assert len(list(Path("output").iterdir())) == 3


def test_what_a_script_wrote_on_another_machine_is_sent_with_it_again(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "train.py"
    path.write_text("pass")
    (tmp_path / "run" / "files").mkdir(parents=True)
    (tmp_path / "run" / "files" / "step").write_text("3")
    again = with_written_files(script_of([str(path)], "auto", None), tmp_path / "run")
    assert (Path(again.folder) / "step").read_text() == "3" and Path(again.script).read_text() == "pass"
    assert with_written_files(again, tmp_path / "none") == again


RUNS_ON = """
import subprocess, time, torch, torch.distributed as dist
dist.init_process_group()
subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(f"begun-{dist.get_rank()}", "w").close()
while True:
    dist.barrier()
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_one_that_is_stopped(number: int) -> None:
    words = [*MUSTER, "launch", "--local", "2", "--", script(RUNS_ON)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: Path("begun-0").exists() and Path("begun-1").exists())
    folder = only_run()
    assert processes_of(folder.metadata.run_id)
    process.send_signal(number)
    _, complained = process.communicate(timeout=120)
    until(lambda: processes_of(folder.metadata.run_id) == [])
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "this machine: nothing left running" in complained
        assert only_run().metadata.status == "cancelled"


def test_a_run_in_the_background_is_stopped_and_shown_as_others_are() -> None:
    code, said, complained = launch("--local", "2", "--detach", "--json", "--", script(RUNS_ON))
    assert code == 0, complained
    run: dict[str, Any] = json.loads(said)
    until(lambda: Path("begun-0").exists() and Path("begun-1").exists())
    until(lambda: any(isinstance(event, MachineEvent) for event in only_run().events()))

    refused = muster("ask", run["run_id"], "pause")
    assert refused.returncode == 1 and "it can only be stopped" in refused.stdout
    stopped = muster("stop", run["run_id"])
    assert stopped.returncode == 0 and "this machine: nothing left running" in stopped.stdout
    shown = muster("runs", "show", run["run_id"])
    assert shown.returncode == 0 and "script.py" in shown.stdout
    assert processes_of(run["run_id"]) == []


def test_a_script_that_is_not_there_is_told_in_one_line() -> None:
    code, said, complained = launch("--local", "2", "--", "nowhere.py")
    assert (code, said) == (2, "")
    assert complained.splitlines()[0] == "error: nowhere.py: no such script"
    assert not Path("output").exists()
