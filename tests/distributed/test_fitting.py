"""Profiles that follow the memory of machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.planning.memory import fitting
from distributed.planning.memory.fitting import FitResult, MemoryBudget
from distributed.planning.memory.memory_model import need_of
from profiles.errors import BadInput
from profiles.files.resolve import load_profile, profile_from_options
from profiles.schema import ModelSettings, Profile
from training.tasks.inputs.model_size import ModelSize
from training.tasks.registry import size_for

GB = 2**30
SHAPES = {
    "tiny": (384, 4, 1536, 80),
    "small": (768, 12, 3072, 80),
    "medium": (1024, 24, 4096, 80),
    "large-v3": (1280, 32, 5120, 128),
}
"""Width, layers of encoder and decoder, width of their MLPs, mels (Radford et al. 2022, table 1)."""


@pytest.fixture
def whispers(tmp_path: Path) -> Path:
    for name, (width, layers, wide, mels) in SHAPES.items():
        config = {"model_type": "whisper", "d_model": width, "vocab_size": 51866, "num_mel_bins": mels}
        config |= {f"{stack}_layers": layers for stack in ("encoder", "decoder")}
        config |= {f"{stack}_ffn_dim": wide for stack in ("encoder", "decoder")}
        config |= {"max_source_positions": 1500, "max_target_positions": 448}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def fitted(
    profile: Profile, size: ModelSize | None, budgets: list[MemoryBudget], with_bitsandbytes: bool = False
) -> FitResult:
    """Whatever is installed on this machine."""
    return fitting.fit_to_budgets(profile, size, budgets, with_bitsandbytes=lambda: with_bitsandbytes)


def fit(
    folder: Path,
    gigabytes: float,
    device: str = "cpu",
    workers: int = 1,
    with_bitsandbytes: bool = False,
    **options: object,
) -> FitResult:
    profile = profile_from_options("mine", {"model_path": str(folder), **options})
    budget = MemoryBudget("studio", int(gigabytes * GB), device, workers)
    return fitted(profile, size_for(profile), [budget], with_bitsandbytes)


@pytest.mark.parametrize(
    ("name", "gigabytes", "changed"),
    [
        ("small", 8, {"gradient_checkpointing", "batch_size", "gradient_accumulation"}),
        ("small", 16, {"batch_size", "gradient_accumulation"}),
        ("small", 24, set()),
        ("medium", 8, {"tuning", "gradient_checkpointing", "batch_size", "gradient_accumulation", "learning_rate"}),
        ("medium", 16, {"gradient_checkpointing", "batch_size", "gradient_accumulation"}),
        ("medium", 24, {"batch_size", "gradient_accumulation"}),
        ("large-v3", 16, {"tuning", "gradient_checkpointing", "batch_size", "gradient_accumulation", "learning_rate"}),
        ("large-v3", 24, {"tuning", "gradient_checkpointing", "learning_rate"}),
    ],
)
def test_a_whisper_fits_by_itself(whispers: Path, name: str, gigabytes: int, changed: set[str]) -> None:
    budget = MemoryBudget("studio", gigabytes * GB)
    result = fit(whispers / name, gigabytes)
    assert set(result.changes) == changed
    assert result.bytes_after <= budget.usable < budget.total
    training = result.profile.training
    assert training.batch_size * training.gradient_accumulation == 8
    assert bool(result.line) == bool(changed) and (not changed or "studio has" in result.line)


@pytest.mark.parametrize(
    ("name", "gigabytes", "batch", "passes", "checkpointing"),
    [
        ("whisper-small-full", 8, 2, 8, False),
        ("whisper-small-full", 12, 4, 4, False),
        ("whisper-small-full", 16, 8, 2, False),
        ("whisper-small-full", 24, 8, 2, False),
        ("whisper-small-full", 80, 16, 1, False),
        ("whisper-large-v3-lora", 8, 2, 8, True),
        ("whisper-large-v3-lora", 16, 8, 2, True),
        ("whisper-large-v3-lora", 24, 8, 2, True),
        ("whisper-large-v3-lora", 80, 4, 4, False),
    ],
)
def test_starter_profiles_use_a_gpu(
    whispers: Path, name: str, gigabytes: int, batch: int, passes: int, checkpointing: bool
) -> None:
    result = fit_starter(whispers, name, gigabytes)
    training = result.profile.training
    assert (training.batch_size, training.gradient_accumulation) == (batch, passes)
    assert result.profile.model.gradient_checkpointing is checkpointing


def fit_starter(whispers: Path, name: str, gigabytes: int, device: str = "cuda", **options: str) -> FitResult:
    folder = whispers / ("small" if "small" in name else "large-v3")
    profile = load_profile(name, {"model_path": str(folder), "dataset_path": "/nowhere", **options}).profile
    return fitted(profile, size_for(profile), [MemoryBudget("tower", gigabytes * GB, device, bf16=True)])


def test_one_line_tells_what_a_roomy_gpu_is_used_for(whispers: Path) -> None:
    line = fit_starter(whispers, "whisper-small-full", 80).line
    assert line == "tower has 80 GB: checkpointing off, batch 16 in one pass, evaluations by 64 (about 23 GB)"


def test_what_a_person_set_is_not_loosened(whispers: Path) -> None:
    options = {
        "gradient_checkpointing": "true",
        "batch_size": "2",
        "gradient_accumulation": "3",
        "eval_batch_size": "1",
    }
    assert not fit_starter(whispers, "whisper-small-full", 80, **options).changes


def test_processors_keep_their_batches(whispers: Path) -> None:
    assert not fit_starter(whispers, "whisper-small-full", 80, "cpu").changes


def test_what_is_chosen_for_there_is_room_leaves_some(whispers: Path) -> None:
    budget = MemoryBudget("tower", 24 * GB, "cuda")
    for name in ("whisper-small-full", "whisper-large-v3-lora"):
        assert fit_starter(whispers, name, 24).bytes_after <= 0.85 * budget.usable


def test_nothing_is_loosened_where_activations_are_unknown() -> None:
    options = {"model_path": "owner/model", "gradient_checkpointing": "true", "fit_memory": "gradient_checkpointing"}
    profile = profile_from_options("mine", options)
    budget = [MemoryBudget("tower", 80 * GB, "cuda")]
    assert not fitted(profile, ModelSize(10**8), budget).changes
    assert fitted(profile, ModelSize(10**8, activations=10**6), budget).changes


def test_one_machine_of_unknown_memory_keeps_all_from_growing(whispers: Path) -> None:
    profile = profile_from_options("mine", {"model_path": str(whispers / "tiny")})
    roomy, unknown = MemoryBudget("tower", 80 * GB, "cuda"), MemoryBudget("studio", 0, "cuda")
    assert fitted(profile, size_for(profile), [roomy]).changes
    assert not fitted(profile, size_for(profile), [roomy, unknown]).changes


def test_the_line_names_what_was_changed_why_and_where(whispers: Path) -> None:
    line = fit(whispers / "medium", 8).line
    assert line.startswith("tuning lora instead of full, gradient_checkpointing true instead of false, batch_size ")
    assert ": full needs " in line and " GB, studio has 8.0 GB; so " in line and "\n" not in line


def test_accumulation_keeps_the_batch_of_a_step_that_is_no_power_of_two(whispers: Path) -> None:
    config = whispers / "config.ini"
    config.write_text(
        f"[group:g]\nbatch_size = 9\ngradient_accumulation = 2\n[profile:p]\ngroup = g\nmodel = {whispers / 'small'}\n"
        "dataset = /nowhere\n"
    )
    profile = load_profile("p", config=config).profile
    training = fitted(profile, size_for(profile), [MemoryBudget("studio", 9 * GB)]).profile.training
    assert training.batch_size < 9 and training.batch_size * training.gradient_accumulation == 18


@pytest.mark.parametrize("set_by_person", ["", "batch_size = 1\n"])
def test_evaluations_follow_whether_or_not_the_batch_does(whispers: Path, set_by_person: str) -> None:
    config = whispers / "config.ini"
    config.write_text(
        "[group:g]\nbatch_size = 1\neval_batch_size = 64\n"
        f"[profile:p]\ngroup = g\nmodel = {whispers / 'small'}\ndataset = /nowhere\n{set_by_person}"
    )
    profile = load_profile("p", config=config).profile
    result = fitted(profile, size_for(profile), [MemoryBudget("studio", 12 * GB)])
    assert set(result.changes) == {"eval_batch_size"}
    assert result.bytes_after <= result.bytes_before / 2
    size = result.profile.evaluation.eval_batch_size
    assert (
        fitted(result.profile, size_for(profile), [MemoryBudget("studio", 12 * GB)]).profile is result.profile
        and size > 1
    )


def test_what_the_person_set_stays(whispers: Path) -> None:
    result = fit(whispers / "medium", 16, tuning="full", batch_size=8)
    assert set(result.changes) == {"gradient_checkpointing"}
    assert (result.profile.model.tuning, result.profile.training.batch_size) == ("full", 8)
    assert not fit(whispers / "small", 16, fit_memory="off").changes


def test_what_cannot_fit_is_refused_with_what_would(whispers: Path) -> None:
    with pytest.raises(BadInput, match=r"mine needs about [0-9.]+ GB a worker, studio has 8.0 GB") as refused:
        fit(whispers / "medium", 8, tuning="full")
    assert refused.value.hint.startswith("set tuning = lora, gradient_checkpointing = true, batch_size = ")
    with pytest.raises(BadInput) as without_package:
        fit(whispers / "large-v3", 6, fit_memory="off")
    assert (
        "install" in without_package.value.hint and "bitsandbytes, then set tuning = lora" in without_package.value.hint
    )
    with pytest.raises(BadInput) as hopeless:
        fit(whispers / "large-v3", 4)
    assert hopeless.value.hint == "take a smaller model, or a machine with more memory"


@pytest.mark.parametrize(("gigabytes", "precision"), [(20, "auto"), (9, "int8"), (6, "nf4")])
def test_a_base_in_4_bits_comes_after_one_in_8(whispers: Path, gigabytes: float, precision: str) -> None:
    result = fit(whispers / "large-v3", gigabytes, with_bitsandbytes=True)
    assert result.profile.model.base_precision == precision
    assert "tight" not in result.line


@pytest.mark.parametrize("installed", [True, False])
def test_a_base_in_8_bits_comes_after_adapters(whispers: Path, installed: bool) -> None:
    result = fit(whispers / "large-v3", 10, with_bitsandbytes=installed)
    tight = "which is tight" in result.line
    assert (result.profile.model.base_precision, tight) == (("int8", False) if installed else ("auto", True))
    assert result.profile.model.tuning == "lora"


def test_adapters_of_a_large_whisper_train_on_a_small_gpu(whispers: Path) -> None:
    options = {"model_path": str(whispers / "large-v3"), "tuning": "lora", "gradient_checkpointing": True}
    profile = profile_from_options("mine", {**options, "batch_size": 1, "window": "full"})
    size = size_for(profile)
    assert size is not None
    assert need_of(profile, size, alone=True, on_gpu=True, bf16=True).total <= 6e9


@pytest.mark.parametrize(
    ("strategy", "options", "vectors"),
    [
        ("diloco", {}, 0),
        ("diloco", {"diloco.sync_delay": 5}, 1),
        ("diloco", {"diloco.sync_delay": 5, "error_feedback": True}, 3),
        ("streaming_diloco", {"streaming_diloco.fragments": 4, "error_feedback": True}, 1.25),
        ("demo", {}, 1),
    ],
)
def test_what_a_strategy_keeps_on_a_gpu_is_counted(strategy: str, options: dict[str, object], vectors: float) -> None:
    profile = profile_from_options("mine", {"model_path": "owner/model", "strategy": strategy, **options})
    size = ModelSize(parameters=10**6)
    alone, together = (need_of(profile, size, alone, on_gpu=True).optimizer for alone in (True, False))
    assert together - alone == 4 * vectors * 10**6


def test_a_rate_that_the_person_set_is_not_raised_for_adapters(whispers: Path) -> None:
    results = [fit(whispers / "medium", 8), fit(whispers / "medium", 8, learning_rate=3e-5)]
    rates = [result.profile.training.learning_rate for result in results]
    assert rates == [pytest.approx(1e-3), 3e-5]


def test_a_model_from_scratch_gets_no_adapters(whispers: Path) -> None:
    with pytest.raises(BadInput):
        fit(whispers / "medium", 8, from_scratch=True)


def test_all_workers_of_a_machine_share_its_memory(whispers: Path) -> None:
    sizes = [fit(whispers / "small", 24, workers=count).profile.training.batch_size for count in (1, 2)]
    assert sizes[0] > sizes[1]


def test_a_gpu_and_a_mac_have_margins_of_their_own() -> None:
    cpu, mps, cuda = (MemoryBudget("x", 8 * GB, device).usable for device in ("cpu", "mps", "cuda"))
    assert mps < cpu < cuda < 8 * GB
    assert MemoryBudget("x", 8 * GB, limited=True).usable > cpu


def test_what_is_advised_fits_a_gpu_and_the_memory_beside_it() -> None:
    size = ModelSize(parameters=244 * 10**6, layers=12, activations=60 * 10**6, working=300_000, matrices=195 * 10**6)
    options = {"model_path": "owner/model", "batch_size": 64, "strategy": "diloco", "fit_memory": "off"}
    profile = profile_from_options("mine", {**options, "gradient_checkpointing": False, "tuning": "full"})
    budgets = [MemoryBudget("tower", int(6.5e9), "cuda"), MemoryBudget("studio", int(8.6e9))]
    with pytest.raises(BadInput, match="studio has 8.0 GB") as refused:
        fitted(profile, size, budgets)
    advised = dict(setting.split(" = ") for setting in refused.value.hint[4:].partition(" (")[0].split(", "))
    open_ = profile_from_options("mine", {**options, **advised})
    assert fitted(open_, size, budgets).tightest is None


def test_what_is_not_known_changes_nothing() -> None:
    profile = Profile(name="p", model=ModelSettings(model_path="owner/model"))
    assert fitted(profile, None, [MemoryBudget("x", GB)]).profile is profile
    assert fitted(profile, ModelSize(10**9), [MemoryBudget("x", 0)]).profile is profile


def test_the_machine_with_the_least_memory_decides(whispers: Path) -> None:
    profile = profile_from_options("mine", {"model_path": str(whispers / "small")})
    result = fitted(profile, size_for(profile), [MemoryBudget("tower", 64 * GB), MemoryBudget("studio", 8 * GB)])
    assert "studio has" in result.line


def test_a_base_in_fewer_bits_needs_less(whispers: Path) -> None:
    def bytes_needed(precision: str) -> int:
        options = {"model_path": str(whispers / "large-v3"), "tuning": "lora", "base_precision": precision}
        profile = profile_from_options("mine", options)
        size = size_for(profile)
        assert size is not None
        return need_of(profile, size, on_gpu=True, bf16=True).weights

    assert bytes_needed("auto") == bytes_needed("bf16") < 0.6 * bytes_needed("fp32")
    assert bytes_needed("nf4") < bytes_needed("int8") < bytes_needed("bf16")
