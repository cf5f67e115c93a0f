"""Does a job fit a machine? Judged from data, and looked at on a machine."""

from __future__ import annotations

import json
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.checks.findings import Finding, Health
from distributed.checks.job import check_job, free_memory, judge_data, judge_memory, judge_origin, judge_port
from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.measuring.machine_figures import SpeedFigures
from distributed.planning.documents.cluster import ClusterMachine, Measurement, MeasurementCache
from distributed.planning.documents.document import Workload, job_of
from distributed.planning.memory.memory_model import RUNTIME_BYTES, need_of
from distributed.preparation.code_sync import collect
from distributed.preparation.members import plan_run
from distributed.preparation.preflight import Facts
from distributed.preparation.transfer import MissingFiles, Tree, send_trees
from profiles.files.resolve import load_profile, profile_from_options
from profiles.schema import Profile
from speech.inputs.model_size import whisper_size
from training.tasks.inputs.model_size import ModelSize, decoder_size, size_of
from training.tasks.published_models import model_folder
from training.tasks.registry import size_for

REPOSITORY = Path(__file__).resolve().parents[2]
FACTS = Facts((3, 11, 7), "2.13.0", (), 0.0, 10**12, True, "/r", "Linux", 0, "eth0", "key")


def health(free: float, total: float, gpus: tuple[tuple[float, float], ...] = ()) -> Health:
    """A machine's memory, and its GPUs', in GB free and in all."""
    size = lambda gigabytes: int(gigabytes * 2**30)  # noqa: E731 - it is used five times in the next lines
    nvidia = [{"name": "g", "driver": "1", "free": size(f), "total": size(t)} for f, t in gpus]
    devices = [{"device": f"cuda:{number}", "problem": ""} for number in range(len(gpus))]
    return Health.model_validate(
        {
            "machine": "arm64", "hardware": "arm64", "inhibitor": "", "mtu": {}, "power": {"source": ""},
            "memory": {"free": size(free), "total": size(total)}, "nvidia": nvidia, "devices": devices,
        }
    )  # fmt: skip


def profile(**options: Any) -> Profile:
    fixed = {"task": "causal_lm", "model_path": "owner/name", "fit_memory": "off"}
    return profile_from_options("p", {**fixed, **options})


def test_what_a_custom_job_refuses_is_not_advised() -> None:
    size = ModelSize(parameters=10**9, layers=2, activations=0)
    custom = profile_from_options("p", {"task": "custom", "model_path": "m:build"})
    fixes = {
        candidate.model.task: judge_memory(candidate, size, None, health(10, 10)).fix
        for candidate in (custom, profile())
    }
    assert "lora" not in fixes["custom"] and "check" not in fixes["custom"]
    assert fixes["causal_lm"].startswith("set tuning = lora, gradient_checkpointing = true")


def test_what_was_left_open_is_fitted_before_it_is_judged() -> None:
    finding = judge_memory(profile(fit_memory="tuning"), ModelSize(10**9), None, health(8, 10))
    assert finding.level == "ok" and "tuning lora instead of full: full needs" in finding.seen


@pytest.mark.parametrize(
    ("memory", "level"),
    [((64, 64), "ok"), ((8, 64), "warning"), ((8, 10), "problem")],
    ids=["fits", "other programs have it", "too small"],
)
def test_a_model_of_a_billion_parameters(memory: tuple[float, float], level: str) -> None:
    finding = judge_memory(profile(), ModelSize(10**9), None, health(*memory))
    assert (finding.check, finding.level) == ("model", level)
    if level != "problem":  # weights, gradients, two moments, buckets: 20 bytes each; torch; 0.1 GB of the mesh
        assert "about 19 GB needed (estimated)" in finding.seen


def test_what_trains_is_what_counts() -> None:
    assert judge_memory(profile(), ModelSize(10**9), None, health(200, 200, ((30, 80), (4, 12)))).level == "problem"
    lora = profile(tuning="lora")
    assert judge_memory(lora, ModelSize(10**9), None, health(200, 200, ((30, 80), (4, 12)))).level == "warning"


def test_a_measurement_stands_before_an_estimate() -> None:
    points = tuple(Measurement(batch=b, seconds=1, peak=b * 2**30 + 2**30) for b in (1, 2))
    speed = SpeedFigures(
        machine=ClusterMachine(name="m", measurements=points), workload=Workload(trainable=9, total=9, samples=9)
    )
    finding = judge_memory(profile(batch_size=8), ModelSize(10), speed, health(4, 16))
    assert (finding.level, finding.seen) == ("warning", "about 9.0 GB needed (as measured there), 4.0 GB of 16 GB free")


def test_a_model_of_unknown_size_is_no_reproach() -> None:
    assert judge_memory(profile(), None, None, health(1, 1)).level == "ok"


def test_what_travels_and_whether_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)
    tree = Tree({"big": "b" * 64}, {"b" * 64: tmp_path / "big"})
    trees = {"inputs/dataset": tree}

    def seen(missing: bool, begun: int = 0, free: int = 10**12) -> list[str]:
        lack = MissingFiles(trees=(), blobs=(), begun={})
        if missing:
            lack = MissingFiles(trees=(tree.name,), blobs=("b" * 64,), begun={"b" * 64: begun})
        facts = Facts(**{**FACTS.__dict__, "free": free})
        return [f"{finding.level}: {finding.seen}" for finding in judge_data(trees, lack, facts)]

    assert seen(False) == [f"ok: data: already there, with the same hash ({tree.name[:12]})"]
    assert seen(True) == ["ok: data: absent, a run sends 3.0 MB of 3.0 MB"]
    assert seen(True, begun=1_000_000) == ["ok: data: partly there, a run sends 2.0 MB of 3.0 MB"]
    assert seen(True, free=201_000_000)[1:] == ["problem: 201 MB free, a run sends 3.0 MB"]


def test_what_comes_from_the_hub_is_said() -> None:
    seen = [finding.seen for finding in judge_origin(profile(dataset_path="./mine"))]
    assert seen == ["model: each machine gets owner/name from the hub itself"]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert [finding.level for finding in judge_port(port)] == ["problem"]
    assert [finding.level for finding in judge_port(port)] == ["ok"]
    assert judge_port(0) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["examples/tiny_whisper", "examples/scratch_whisper", "examples/nanogpt/model"])
def test_a_configuration_tells_the_number_of_parameters(folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

    config = AutoConfig.from_pretrained(REPOSITORY / folder)
    kind = AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    size = size_of(REPOSITORY / folder, whisper_size if config.model_type == "whisper" else decoder_size)
    assert size is not None and size.activations > 0
    assert size.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.001)
    if config.model_type == "whisper":
        assert size.encoder == sum(p.numel() for p in model.model.encoder.parameters())


def test_llamas_are_counted_too(tmp_path: Path) -> None:
    tiny_llama = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    size = size_of(tmp_path, lambda config: decoder_size(config, 256))
    assert size is not None and size.parameters == pytest.approx(1_100_048_384, rel=0.001)


def test_a_frozen_encoder_needs_no_memory_for_backward() -> None:
    size = size_of(REPOSITORY / "examples" / "scratch_whisper", whisper_size)
    assert size is not None
    needs = [
        need_of(load_profile("demo", {"batch_size": "8", "freeze_encoder": frozen}).profile, size).total
        for frozen in ("false", "true")
    ]
    least_saved = size.encoder * (8 + 4) + 8 * 4 * (size.encoder_activations - size.working)
    assert needs[0] - needs[1] > least_saved


def test_memory_follows_the_optimizer() -> None:
    size = ModelSize(10**9, matrices=8 * 10**8)
    needs = {
        name: need_of(profile(optimizer=name), size, alone=True).optimizer
        for name in ("adamw", "sgd", "muon", "adafactor", "mine.py:build")
    }
    assert needs["adamw"] == needs["mine.py:build"] == 8 * 10**9
    assert (needs["sgd"], needs["muon"]) == (4 * 10**9, 4 * 8 * 10**8 + 8 * 2 * 10**8)
    assert needs["adafactor"] < 10**8
    workload = Workload(trainable=100, total=100, samples=10, model_path="owner/name")
    assert [job_of(profile(optimizer=name), workload).optimizer_bytes for name in needs] == [8, 4, 8, 0, 8]


def test_a_student_is_smaller_and_its_teacher_counts(tmp_path: Path) -> None:
    folder = str(REPOSITORY / "examples" / "scratch_whisper")
    full_size = size_for(profile_from_options("p", {"model_path": folder}))
    student = profile_from_options("p", {"teacher_path": folder, "student_layers": 1})
    size = size_for(student)
    assert full_size is not None and size is not None and size.teacher == full_size
    assert (full_size.layers - size.layers, full_size.parameters > size.parameters) == (3, True)
    alone, live = replace(size, teacher=None), profile_from_options("p", {"teacher_path": folder, "augmentation": 0.5})
    assert need_of(live, size).total - need_of(live, alone).total == 4 * full_size.parameters
    assert need_of(student, size).total == need_of(student, alone).total
    large = replace(size, teacher=ModelSize(10**9))
    assert need_of(student, large).total == 4 * 10**9 + RUNTIME_BYTES


def test_weights_count_before_the_configuration(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [10, 7], "data_offsets": [0, 280]}, "__metadata__": {}})
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(280))
    assert size_of(tmp_path) == ModelSize(70)
    assert model_folder(str(tmp_path)) == tmp_path and model_folder("no/such") is None


CONFIGS = st.dictionaries(
    st.sampled_from(["model_type", "d_model", "n_embd", "n_layer", "hidden_size", "vocab_size", "num_hidden_layers"]),
    st.integers() | st.text(max_size=5) | st.none() | st.floats(),
)


@given(st.binary(max_size=300), CONFIGS)
def test_no_file_breaks_it(tmp_path_factory: pytest.TempPathFactory, weights: bytes, config: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps(config))
    size = size_of(folder)
    assert size is None or size.parameters > 0


@pytest.mark.slow
def test_a_look_at_a_machine_writes_nothing_there(tmp_path: Path) -> None:
    machine = Machine(name="far", python=sys.executable, project_path=str(tmp_path / "far"))
    link = MachineLink(machine, lambda: HereConnection("far"))
    job = load_profile("nanogpt", {"output_dir": str(tmp_path)}).profile
    cache = MeasurementCache(tmp_path / "cache")

    def seen() -> list[Finding]:
        look = check_job(job, [(link, FACTS)], cache)
        assert look.size is not None and look.size.parameters > 500_000
        return [finding for finding in look.of("far", None) if finding.check == "data"]

    before = seen()
    assert [finding.seen.split(",")[0] for finding in before][:2] == ["code: absent", "model: absent"]
    assert not (tmp_path / "far").exists()
    link.put_agent()
    send_trees(link, collect(plan_run(job, [(link, FACTS)])).trees.values())
    assert all("with the same hash" in finding.seen for finding in seen())


def test_a_gpu_holds_neither_the_process_nor_what_the_exchange_keeps() -> None:
    folder = str(REPOSITORY / "examples" / "scratch_whisper")
    lora = profile_from_options("p", {"model_path": folder, "tuning": "lora", "batch_size": 4, "strategy": "diloco"})
    size = size_for(lora)
    assert size is not None
    on_cpu, on_gpu = need_of(lora, size), need_of(lora, size, on_gpu=True)
    assert (on_cpu.runtime, on_gpu.runtime) == (RUNTIME_BYTES, 0)
    assert on_gpu.optimizer == need_of(lora, size, alone=True).optimizer < on_cpu.optimizer
    nccl = lora.model_copy(update={"strategy": lora.strategy.model_copy(update={"engine": "nccl"})})
    assert on_gpu.optimizer < need_of(nccl, size, on_gpu=True).optimizer < on_cpu.optimizer
    assert 1.3 < on_cpu.step / on_gpu.step < 1.8  # the C library's holes


def test_mixed_precision_is_bf16_by_itself_only_where_all_gpus_have_it() -> None:
    folder = str(REPOSITORY / "examples" / "scratch_whisper")
    auto, off, bf16 = (
        profile_from_options("p", {"model_path": folder, "batch_size": 4, "mixed_precision": name})
        for name in ("auto", "off", "bf16")
    )
    size = size_for(auto)
    assert size is not None
    machine = health(8, 8, ((7, 8), (6, 8)))
    for has_it, equivalent in (((True, True), bf16), ((True, False), off)):
        devices = tuple(
            device.model_copy(update={"bf16": has}) for device, has in zip(machine.devices, has_it, strict=True)
        )
        memory = free_memory(machine.model_copy(update={"devices": devices}), "auto")
        assert memory.need(auto, size) == memory.need(equivalent, size)
    assert memory.need(bf16, size) < memory.need(off, size)


@pytest.mark.parametrize(
    ("device", "taken"), [("auto", (7, "cuda")), ("cuda", (7, "cuda")), ("cpu", (4, "cpu")), ("mps", (4, "mps"))]
)
def test_memory_is_that_of_the_device_that_the_job_wants(device: str, taken: tuple[int, str]) -> None:
    memory = free_memory(health(4, 8, ((7, 8),)), device)
    assert (memory.free // 2**30, memory.device) == taken
