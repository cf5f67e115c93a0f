from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from fake_run import finished_run
from typer.core import TyperGroup

from app.cli.commands import COMMANDS, GROUPS, command_list, command_tree
from app.cli.main import main, run_app
from app.cli.runs import listing
from benchmarks.whisper_memory_limit import UNFITTED
from profiles.errors import ExitCode
from profiles.options import options
from training.records.run_folder import RunFolder
from training.records.runs import find_run, summarise

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cli_typer.py"
HELPS = [[], ["distributed-train"], ["runs"], ["runs", "clean"], ["profiles", "show"], ["transcribe"], ["evaluate"]]
Capture = pytest.CaptureFixture[str]


def in_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def run_id(completed_run: Path) -> str:
    return completed_run.name[:20]


def another_run(capsys: Capture) -> str:
    made = finished_run()
    capsys.readouterr()
    return made.name[:20]


@pytest.mark.slow
def test_the_benchmark_of_a_memory_limit_starts_the_command_as_it_is_today() -> None:
    assert in_process(UNFITTED, "--version").returncode == 0


WHAT_HELP_IMPORTS = """
import contextlib, io, sys
from app.cli.main import main
for command in ([], ["distributed-train"], ["runs", "list"], ["profiles"], ["transcribe"], ["evaluate"]):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*command, "--help"]) == 0
for wrong in (["train"], ["train", "dem"], ["train", "demo", "--dataset", "/nope"], ["train", "--resume", "nothing"]):
    assert main(wrong) == 2
heavy = (
    "torch transformers cryptography numpy textual paramiko zeroconf soundfile av questionary psutil safetensors yaml"
)
print([name for name in heavy.split() if name in sys.modules])
"""


@pytest.mark.slow
def test_help_and_wrong_names_load_nothing_heavy() -> None:
    assert in_process(WHAT_HELP_IMPORTS).stdout.strip() == "[]"


def test_only_the_called_command_is_looked_at() -> None:
    def names(tree: typer.Typer) -> list[str]:
        return list(typer.main.get_group(tree).commands)

    assert (names(command_tree(["evaluate"])), names(command_tree(["runs"]))) == (["evaluate"], ["runs"])
    assert set(names(command_tree())) == {*COMMANDS, *GROUPS, "train"}
    assert {*COMMANDS, *GROUPS, "train"} < set(names(command_list()))


def test_the_first_help_lists_six_and_the_long_one_all_groups(capsys: Capture) -> None:
    def listed() -> list[str]:
        return re.findall(r"^│ ([a-z-]+)  ", capsys.readouterr().out.partition("Commands")[2], re.MULTILINE)

    main(["--help"])
    first = listed()
    main(["--help-all"])
    assert first == ["train", "launch", "runs", "model", "data", "machines"]
    assert set(listed()) == {*first, "wizard", "tour", "profiles", "demo-run"}


@pytest.mark.parametrize("key", [key for key, command in COMMANDS.items() if command.group])
def test_a_command_of_a_group_is_the_one_that_has_its_name_alone(key: str) -> None:
    command = COMMANDS[key]
    path = [command.group, command.name or key]
    group = typer.main.get_group(command_tree(path)).commands[command.group]
    alone = typer.main.get_group(command_tree([key])).commands[key]
    assert isinstance(group, TyperGroup)
    assert [p.name for p in group.commands[path[1]].params] == [p.name for p in alone.params]


def test_what_stands_before_a_command_of_a_group_may_have_the_name_of_another(run_id: str, capsys: Capture) -> None:
    assert main(["runs", "--output", "output", "show", run_id]) == 0
    assert run_id in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "named"), [("80", False), ("120", True)])
def test_the_list_of_runs_has_a_line_a_run(
    columns: str, named: bool, run_id: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = {"test": {"wer": 0.03}, "validation": {"wer": 0.09}}
    RunFolder.open(find_run(Path("output"), run_id)).update_metadata(metrics={"after": after})
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["runs", "list"]) == 0
    head, run = capsys.readouterr().out.splitlines()
    assert run.startswith(f"{run_id}  ") and ("workers" in head) == named
    assert run.rstrip().endswith("WER test 3.0 %, WER validation 9.0 %" if named else "WER test 3.0 %")


@pytest.mark.parametrize(("columns", "has_folder"), [("80", False), ("120", True)])
def test_a_narrow_list_has_room_for_results_instead_of_folders(
    columns: str, has_folder: bool, run_id: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = summarise(find_run(Path("output"), run_id))
    far = replace(run, path=Path("/home/me/toy/output") / run_id)
    monkeypatch.setattr(listing, "list_all_runs", lambda output: [run, far])
    monkeypatch.setenv("COLUMNS", columns)
    main(["runs", "list"])
    assert ("toy/output" in capsys.readouterr().out) == has_folder


def test_the_newest_run_is_meant_where_none_is_named(run_id: str, capsys: Capture) -> None:
    assert main(["report"]) == 0
    assert run_id in capsys.readouterr().out


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_every_level_has_help_without_escape_codes(command: list[str], capsys: Capture) -> None:
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: cli_typer.py" in out
    assert "\x1b" not in out
    assert not re.search(r"<(bool|str|path|int range|float range|list)", out)  # words of a programmer


@pytest.mark.slow
def test_every_option_has_a_flag_and_advanced_ones_are_in_the_long_help(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # in a narrow terminal the longest names take two lines
    main(["distributed-train", "--help"])
    short = capsys.readouterr().out
    main(["distributed-train", "--help-all"])
    long = capsys.readouterr().out
    assert "--try " in short and "--dry-run" not in long
    assert "--trust-code" in long and "--trust-code" not in short
    for spec in options():
        flag = re.compile(rf"--{spec.name.replace('_', '-')}\s")
        assert flag.search(long)
        assert bool(flag.search(short)) != (spec.advanced or "." in spec.name)  # options of one strategy


def test_several_machines_are_named_in_the_first_box_of_the_help(capsys: Capture) -> None:
    main(["train", "--help"])
    first_box = capsys.readouterr().out.partition("Options ─")[2].partition("╰")[0]
    assert first_box.index("--dataset ") < first_box.index("--hosts ") < first_box.index("--set ")


def test_no_name_is_cut_in_a_narrow_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["distributed-train", "--help-all"])
    assert not re.findall(r"--\S*…", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("distributed-train", "no profile given", "profiles list"),
        ("distributed-train dem", "there is no profile 'dem'", "did you mean 'demo'?"),
        ("distributed-train demo --local 0", "too small", ""),
        ("distributed-train demo --local two", "not a whole number", ""),
        ("distributed-train demo-scratch --strategy dilco", "unknown strategy 'dilco'", "did you mean 'diloco'?"),
        ("distributed-train demo --model nosuch", "neither a [model:NAME]", ""),
        ("distributed-train demo --set lerning_rate=1", "unknown option 'lerning_rate'", "did you mean"),
        ("distributed-train demo --set x", "not of the form key=value", "learning_rate=1e-3"),
        ("distributed-train demo --set seed=1 --seed 2", "'seed' is set twice", "once"),
        ("distributed-train demo --lora-merge --no-lora-merge", "contradict", "one of the two"),
        ("distributed-train demo-scratch --output notes/deeper", "a file has the name of a folder", "--output"),
        ("distributed-train whisper-tiny-lora --dataset /nope", "/nope: no such file or folder", "names"),
        ("distributed-train demo --model /nope/x", "model /nope/x: no such file or folder", "check what --model names"),
        ("distributed-train --resume nothing", "no run 'nothing'", "runs list"),
        ("runs sho", "No such command 'sho'", "Did you mean 'show'?"),
        ("ask", "Missing argument 'RUN'", "ask --help"),
        ("runs compare", "Missing argument", "--help"),
        ("runs clean", "no runs to remove were named", "--keep N"),
        ("runs list --output notes", "Not a directory", "--output"),
        ("profiles show dem", "there is no profile 'dem'", "did you mean"),
        ("transcribe", "no recording was named", "--microphone"),
        ("transcribe /away/clip.m4a", "/away/clip.m4a: no such file", "check the path"),
        ("nothing", "No such command 'nothing'", "--help"),
        ("--nothing", "No such option", ""),
        ("--minibatch-size", "No such option", "gradient_accumulation"),
    ],
)
def test_wrong_use_is_one_line_and_a_hint_and_exit_code_2(
    command: str, message: str, hint: str, capsys: Capture
) -> None:
    Path("notes").touch()
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    first, *second = [line for line in err.splitlines() if not line.startswith("  ")]
    assert out == ""
    assert first.startswith("error: ")
    assert message in first
    assert [line[:6] for line in second] in ([], ["hint: "])
    assert hint in "".join(second)
    assert not Path("output").exists()


@pytest.mark.parametrize("command", ["distributed-train dem", "runs show nothing", "runs sho", "profiles show dem"])
def test_errors_are_json_where_json_was_asked_for(command: str, capsys: Capture) -> None:
    assert main([*command.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["exit_code"] == 2
    assert document["error"]["message"]
    assert err == ""


CRASH = """
import app.cli.runs.listing, sys
def broken(*_, **__):
    raise ZeroDivisionError("by\\nnothing")
app.cli.runs.listing.filter_runs = broken
from app.cli.main import main
sys.exit(main(["runs", "list"]))
"""


@pytest.mark.slow
def test_a_fault_of_ours_is_one_line_and_a_saved_traceback() -> None:
    done = in_process(CRASH)
    error, hint = done.stderr.splitlines()
    assert done.returncode == 1
    assert error == "error: unexpected ZeroDivisionError: by nothing"
    assert "in broken" in Path(hint.removeprefix("hint: the traceback is in ")).read_text()


@pytest.mark.usefixtures("run_id")
def test_a_closed_pipe_is_quiet() -> None:
    shell = f'"{sys.executable}" "{SCRIPT}" runs list --json | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert re.match(r"muster \S+\n", capsys.readouterr().out)


def test_a_run_without_a_lost_machine_is_completed_and_says_so(run_id: str, capsys: Capture) -> None:
    RunFolder.open(find_run(Path("output"), run_id)).update_metadata(metrics={"lost": ["studio"]})
    assert main(["runs", "list"]) == 0 and "completed, 1 lost" in capsys.readouterr().out
    assert main(["runs", "show", run_id]) == 0 and "(completed, lost studio, attempt 1)" in capsys.readouterr().out
    assert main(["runs", "show", run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == ["studio"]


def test_bare_runs_is_the_list(run_id: str, capsys: Capture) -> None:
    assert main(["runs"]) == 0
    bare = capsys.readouterr().out
    assert run_id in bare
    assert "WER test 3.0 %" in " ".join(bare.split())
    assert main(["runs", "list"]) == 0
    assert capsys.readouterr().out == bare


def test_no_runs_yet_says_how_to_start_one(capsys: Capture) -> None:
    assert main(["runs"]) == 0
    assert " train PROFILE" in capsys.readouterr().err


def test_a_run_is_shown_with_the_state_of_its_events(run_id: str, capsys: Capture) -> None:
    assert main(["runs", "show", run_id, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run_id"], shown["status"], shown["state"]["step"]) == (run_id, "completed", 6)
    assert [member["bytes_sent"] for member in shown["state"]["members"]] == [18000, 18000]


@pytest.mark.usefixtures("run_id")
@pytest.mark.parametrize("run", [[], ["demo-scratch"]])
def test_a_run_is_shown_to_a_person(run: list[str], capsys: Capture) -> None:
    assert main(["runs", "show", *run]) == 0
    out = capsys.readouterr().out
    assert "steps     6/6" in out
    assert "WER     test  98.0 % -> 3.0 %" in out


def test_runs_are_compared(run_id: str, capsys: Capture) -> None:
    ids = [run_id, another_run(capsys)]
    assert main(["runs", "compare", *ids, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["runs"] == ids
    assert table["metrics"]["after.test.wer"] == [0.03, 0.03]
    assert main(["runs", "compare", *ids]) == 0
    assert "after.test.wer" in capsys.readouterr().out


LOOKS = "runs|runs list|runs show RUN|runs compare RUN RUN|runs clean --keep 1|report RUN|track RUN --to csv".split("|")
LOOKS += ["profiles", "profiles list", "profiles show demo", "profiles validate", "profiles validate bad.ini"]


@pytest.mark.parametrize("command", LOOKS)
def test_json_is_one_document_that_ends_with_the_exit_code(command: str, run_id: str, capsys: Capture) -> None:
    Path("bad.ini").write_text("[profile:a]\nlearning_rat = 1\n")
    code = main([*command.replace("RUN", run_id).split(), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["exit_code"], list(document)[-1]) == (code, "exit_code")
    assert code == (2 if "bad.ini" in command else 0)


def test_figures_of_every_member_are_left_to_json(run_id: str, capsys: Capture) -> None:
    prediction = {"step": 0.5, "members": [{"name": "studio"}]}
    RunFolder.open(find_run(Path("output"), run_id)).update_metadata(metrics={"prediction": prediction})
    assert main(["runs", "compare", run_id, another_run(capsys)]) == 0
    shown = capsys.readouterr().out
    assert "prediction.step" in shown and "prediction.members" not in shown


def test_cleaning_needs_somebody_to_confirm(run_id: str, capsys: Capture) -> None:
    assert main(["runs", "clean", "--keep", "0"]) == 2
    out, err = capsys.readouterr()
    assert run_id in out
    assert "--yes" in err
    assert len(list(Path("output").iterdir())) == 1


def test_cleaning_shows_what_it_removes(run_id: str, capsys: Capture) -> None:
    assert main(["runs", "clean", "--status", "completed", "--yes"]) == 0
    out = capsys.readouterr().out
    assert out.index(run_id) < out.index("removed 1 run,")
    assert list(Path("output").iterdir()) == []


def test_profiles_are_listed(capsys: Capture) -> None:
    assert main(["profiles", "--json"]) == 0
    assert "demo" in [entry["name"] for entry in json.loads(capsys.readouterr().out)["profiles"]]


def test_a_profile_shows_where_its_values_come_from(capsys: Capture) -> None:
    assert main(["profiles", "show", "demo", "--origin", "--set", "seed=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed = 7  # command line" in lines
    assert re.search(r"config\.ini \[profile:demo\] line \d+", "\n".join(lines))


def test_shipped_profiles_are_valid(capsys: Capture) -> None:
    assert main(["profiles", "validate"]) == 0
    assert capsys.readouterr().out == "all profiles are valid\n"


def test_every_problem_of_a_config_is_shown(capsys: Capture) -> None:
    Path("bad.ini").write_text("[profile:a]\nlearning_rat = 1\n\n[profile:b]\nseed = x\n")
    assert main(["profiles", "validate", "bad.ini"]) == 2
    out, err = capsys.readouterr()
    assert "unknown option 'learning_rat'" in out
    assert "not a whole number" in out
    assert err.startswith("error: 2 problems in the profiles")


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()

    @made.command()
    def interrupted(as_json: bool = typer.Option(False, "--json")) -> ExitCode:
        raise KeyboardInterrupt

    @made.command()
    def told() -> ExitCode:
        return ExitCode.STOPPED

    return made


def test_ctrl_c_is_one_document_with_json(app: typer.Typer, capsys: Capture) -> None:
    assert run_app(lambda: app, ["interrupted", "--json"], "x") == 130
    assert json.loads(capsys.readouterr().out) == {"error": {"message": "stopped", "hint": ""}, "exit_code": 130}


def test_ctrl_c_is_one_line_and_not_told_twice(app: typer.Typer, capsys: Capture) -> None:
    assert run_app(lambda: app, ["interrupted"], "x") == 130
    assert capsys.readouterr().err == "error: stopped\n"
    assert run_app(lambda: app, ["told"], "x") == 130
    assert capsys.readouterr().err == ""


def test_wrong_keys_of_a_person_are_refused_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("app.cli.runs.attach.fits_here", lambda: True)
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster" / "keys.ini").write_text("[keys]\nsnapshop = S\n")
    assert main(["distributed-train", "demo-scratch", "--local", "1", "--dashboard"]) == ExitCode.BAD_INPUT
    assert "there is no action 'snapshop'" in capsys.readouterr().err
    assert not Path("output").exists()
