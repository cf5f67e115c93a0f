from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from planner_figures import cluster, joined, machine

from app.cli.main import main
from app.plan_table import explanation_lines, summary_lines, table_lines
from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Figures, Planning, Workload
from distributed.planning.memory.fitting import MemoryBudget
from distributed.planning.memory.memory_model import need_of
from distributed.planning.planner import plan
from profiles.files.resolve import load_profile
from training.tasks.registry import size_for

Capture = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs" / "inside" / "planning.md"
WORKLOAD = Workload(trainable=600_576, total=600_576, samples=14_400)


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    return written(tmp_path, cluster([8, 8, 2], 95))


def written(folder: Path, cluster: Cluster, workload: Workload = WORKLOAD) -> Path:
    path = folder / "figures.json"
    Figures(cluster=cluster, workload=workload).write(path)
    return path


def run(*arguments: str | Path) -> int:
    return main(["plan", *map(str, arguments)])


def test_a_hosts_file_that_is_not_there(capsys: Capture) -> None:
    assert run("demo-scratch", "--hosts", "mine.json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: mine.json: no such hosts file\nhint: name machines as after ssh, with commas between them, or copy "
        "distributed_hosts.json.example and fill it in\n"
    )


@pytest.mark.slow
def test_the_choice_in_a_few_lines(figures: Path, capsys: Capture) -> None:
    assert run("demo-scratch", "--figures", figures) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "Machines: a, b and c, merging in every step.\nThis run takes 5:20:27; machine a alone would take"
    )
    assert re.search(r"^  c: \d+ samples", out, re.MULTILINE)


def test_the_explanation_is_80_columns_wide(figures: Path, capsys: Capture) -> None:
    assert run("demo-scratch", "--figures", figures, "--explain", "--set", "strategy=auto") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(">  allreduce") for line in lines)
    assert any("alone" in line for line in lines)
    assert any(line.startswith("- each machine's share of the batch follows its speed") for line in lines)


def test_json_is_one_document(figures: Path, capsys: Capture) -> None:
    assert run("demo-scratch", "--figures", figures, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["chosen"] == 0
    assert document["settings"]["options"]["strategy"] == "allreduce"
    assert len(document["sentences"]) == len(document["reasons"])


def test_a_written_plan_fits_its_profile(figures: Path, tmp_path: Path) -> None:
    assert run("demo-scratch", "--figures", figures, "--out", tmp_path / "plan.json") == 0
    planning = Planning.read(tmp_path / "plan.json")
    profile = load_profile("demo-scratch").profile
    assert planning.overlay(profile).strategy.codec in ("fp32", "bf16")
    assert planning.made_for.profile
    assert planning.made_for.figures


def test_only_the_machines_of_the_hosts_file(figures: Path, tmp_path: Path, capsys: Capture) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps({"master": "a", "workers": ["B", "elsewhere"]}))
    assert run("demo-scratch", "--figures", figures, "--hosts", hosts, "--explain") == 0
    out = capsys.readouterr().out
    assert "2 machines with allreduce" in out
    assert "elsewhere is in the hosts file and was not measured" in out


def test_a_job_that_fits_nowhere_is_exit_code_3(tmp_path: Path, capsys: Capture) -> None:
    small = joined([machine("a", memory_free=1_000_000)])
    assert run("demo-scratch", "--figures", written(tmp_path, small)) == 3
    assert "the job fits none of these machines" in capsys.readouterr().out


@pytest.mark.parametrize("bf16", [True, False])
def test_figures_tell_whether_a_gpu_computes_in_bf16(bf16: bool, tmp_path: Path, capsys: Capture) -> None:
    profile = load_profile("demo-scratch", {}).profile
    size = size_for(profile)
    assert size is not None
    half_bytes, full_bytes = (
        need_of(profile, size, alone=True, on_gpu=True, bf16=halves).total for halves in (True, False)
    )
    total = next(
        size_in_bytes
        for size_in_bytes in range(half_bytes, 2**34, 2**20)
        if MemoryBudget("a", size_in_bytes, "cuda").usable > (half_bytes + full_bytes) / 2
    )
    gpu = machine("a", device="cuda", memory_total=total, bf16=bf16)
    assert run("demo-scratch", "--figures", written(tmp_path, joined([gpu]))) == 0
    assert ("instead of" in capsys.readouterr().err) is not bf16


def test_figures_of_another_model(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, cluster([8]), WORKLOAD.model_copy(update={"model_path": "other"}))
    assert run("demo-scratch", "--figures", path) == 2
    assert "the figures were measured for other (full)" in capsys.readouterr().err


def test_a_plan_that_cannot_be_written(figures: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run("demo-scratch", "--figures", figures, "--out", tmp_path / "no" / "plan.json") == 2
    assert "choose another place with --out" in capsys.readouterr().err


def test_names_from_the_network_stay_in_their_column() -> None:
    from planner_figures import job

    long = joined([machine("x" * 100), machine("b" * 60)], 10)
    planning = plan(long, job())
    output_lines = (*table_lines(planning), *explanation_lines(planning), *summary_lines(planning))
    assert all(len(line) <= 80 for line in output_lines)


def test_the_example_in_the_docs_can_be_planned(tmp_path: Path, capsys: Capture) -> None:
    example = re.search(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "figures.json").write_text(example[1])
    assert run("demo-scratch", "--figures", tmp_path / "figures.json", "--explain") == 0
    assert "over" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ divided models

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 3072, "num_hidden_layers": 28,
    "vocab_size": 128_256, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
WHOLE = ("--set", "tuning=full", "--set", "task=causal_lm", "--set", "eval_batch_size=1", "--set", "batch_size=8")


def divided(folder: Path, *gigabytes: int, linked: bool = True, **fields: Any) -> tuple[str | Path, ...]:
    """Return the arguments of a plan for a 3 B language model, all of whose weights are trained, on such machines."""
    model = folder / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (model / "model.safetensors").touch()
    machines = [
        machine("abc"[index], 0, memory_total=size * 10**9, blocks=(0.1 + 0.1 * index,) * 28, **fields)
        for index, size in enumerate(gigabytes)
    ]
    home = joined(machines)
    home = home if linked else home.model_copy(update={"links": ()})
    workload = Workload(trainable=3_212_749_824, total=3_212_749_824, layers=28, samples=1000)
    return ("demo-scratch", "--figures", written(folder, home, workload), "--set", f"model_path={model}", *WHOLE)


def test_a_model_that_no_machine_holds_is_divided(tmp_path: Path, capsys: Capture) -> None:
    assert run(*divided(tmp_path, 40, 40, 40), "--out", tmp_path / "plan.json") == 0
    out = capsys.readouterr().out
    assert re.search(r"^The model is divided over \w, \w and \w: layers 1-\d+, \d+-\d+, \d+-28", out, re.MULTILINE)
    settings = Planning.read(tmp_path / "plan.json").settings
    assert settings is not None and settings.options["layout"] == "pipeline"
    (member,) = settings.members
    ends = [device.blocks for device in member.devices]
    assert ends[0] is not None and ends[0][0] == 0 and ends[-1] is not None and ends[-1][1] == 28
    layers = {d.machine: d.blocks[1] - d.blocks[0] for d in member.devices if d.blocks is not None}
    assert layers["a"] > layers["c"]  # which takes three times as long for a block


def test_without_links_a_line_says_why_the_model_is_not_divided(tmp_path: Path, capsys: Capture) -> None:
    assert run(*divided(tmp_path, 40, 40, 40, linked=False)) == 3
    assert "would need links that were not measured" in capsys.readouterr().out


def test_a_model_that_one_machine_holds_is_compared_with_divisions(tmp_path: Path, capsys: Capture) -> None:
    assert run(*divided(tmp_path, 20, 128)) == 0
    out, err = capsys.readouterr()
    assert "a has 19 GB: the model is divided, unless b alone is faster" in err
    assert "machine b holds the whole model, which is faster than dividing it" in out
    assert "b: 8 samples in 44.8 s, takes 64 GB of 103 GB memory" in out


def test_a_pipeline_by_hand_takes_the_planners_cut(tmp_path: Path, capsys: Capture) -> None:
    assert run(*divided(tmp_path, 128, 128), "--set", "layout=pipeline") == 0
    assert "The model is divided over" in capsys.readouterr().out
