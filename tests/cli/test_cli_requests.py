"""``ask`` and ``stop``: a live run on this machine, commanded from another terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from tests.distributed.muster_runs import Muster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_run_of_this_machine_obeys_another_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    muster = Muster(tmp_path, tmp_path / "none.json", pause=0.05)
    words = [word for word in muster.train("--max-steps", "2000") if word not in ("--hosts", str(muster.hosts_file))]
    output = tmp_path / "output"

    def ask(*arguments: str) -> dict[str, object]:
        assert main(["ask", "nanogpt", *arguments, "--output", str(output), "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    with muster.popen(*words, "--local", "2") as running:
        try:
            until(lambda: output.is_dir() and any(output.glob("*-nanogpt")))
            muster.until_step(next(output.glob("*-nanogpt")).name[:20], 3, members=2)
            assert ask("snapshot")["outcome"] == "done"
            assert ask("pause")["message"] == "the run is paused"
            assert ask("resume")["outcome"] == "done"
            assert ask("drop", "worker-1")["machine"] == "worker-1"
            assert main(["ask", "nanogpt", "drop", "worker-7", "--output", str(output)]) == 1
            assert "known: worker-0, worker-1" in capsys.readouterr().out
            assert main(["stop", "nanogpt", "--output", str(output)]) == 0
            assert capsys.readouterr().out == "this machine: nothing is left\n"
            assert running.wait(30) == 130
        finally:
            running.terminate()
            running.communicate()


def test_nobody_answers_for_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from app.demo.run import write_demo_run

    folder = write_demo_run(tmp_path, machines=1)
    assert main(["ask", str(folder), "pause"]) == 2
    assert "nobody works on" in capsys.readouterr().err
