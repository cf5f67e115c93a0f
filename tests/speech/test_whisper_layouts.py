"""What a Whisper's blocks take in a pipeline."""

from __future__ import annotations

import pytest

from distributed.planning.documents.cluster import Cluster, ClusterMachine, Measurement
from distributed.planning.layouts.layout_documents import LayoutJob
from distributed.planning.layouts.stage_devices import StagedJob
from profiles.files.resolve import profile_from_options
from speech.inputs.data_findings import Longest
from speech.inputs.model_size import SampleBounds, whisper_size
from tests.speech.test_whisper_stages import LARGE

SIZE = whisper_size(LARGE)
SPOKEN = SampleBounds("full", Longest(seconds=1.13, tokens=11))
ONE = Cluster(machines=(ClusterMachine(name="a"),))


def staged(**options: object) -> StagedJob:
    profile = profile_from_options("mine", {"tuning": "full", "batch_size": 8, **options})
    return StagedJob(profile, SIZE, profile_from_options("mine", {"batch_size": 8}), {}, SIZE.stage)


def test_a_boundary_of_the_decoder_carries_what_was_heard_as_well() -> None:
    boundaries = staged().boundaries()
    heard, tokens = 4 * 8 * 1500 * 1280, 4 * 8 * 448 * 1280
    assert boundaries[10] == boundaries[31] == (heard, heard)
    assert boundaries[40] == (heard + tokens, heard + tokens)
    assert boundaries[63] == (0, 0)


def test_in_bf16_half_as_many_bytes_cross() -> None:
    full, half = (staged(mixed_precision=name).boundaries()[40] for name in ("off", "bf16"))
    assert half.forward == full.forward // 2 and half.backward == full.backward // 2


def test_to_a_frozen_encoder_no_gradients_come_back() -> None:
    boundaries = staged(freeze_encoder=True).boundaries()
    assert boundaries[10].backward == 0
    assert boundaries[40].backward == 4 * 8 * 448 * 1280


def test_blocks_take_their_share_of_the_measured_step() -> None:
    machine = ClusterMachine(name="a", measurements=(Measurement(batch=8, seconds=4.0),))
    seconds = staged().seconds(machine)
    assert sum(seconds) == pytest.approx(4.0) and len(seconds) == 64
    checkpointed = staged(gradient_checkpointing=True).seconds(machine)
    assert sum(checkpointed) == pytest.approx(4.0 * 4 / 3)
    frozen = staged(freeze_encoder=True).seconds(machine)
    assert frozen[10] == pytest.approx(seconds[10] / 3) and frozen[40] == pytest.approx(seconds[40])


def test_a_stage_with_one_end_of_the_embedding_holds_copies_while_it_is_summed() -> None:
    machine = ClusterMachine(name="a", memory_total=10**11)
    ends = {"neither": (32 + 8, 32 + 16), "one": (32, 40), "head": (56, 64), "both": (32, 64)}
    copies = {name: staged()._copies_of_tied(*blocks, on_gpu=False) for name, blocks in ends.items()}
    assert copies == {"neither": 0, "one": 2 * SIZE.tied, "head": 2 * SIZE.tied, "both": 3 * SIZE.tied}
    full = staged(batch_size=1, gradient_accumulation=8)
    adapters = staged(batch_size=1, gradient_accumulation=8, tuning="lora")
    stage = SIZE.stage(63, 64)
    assert full.need(machine, 63, 64, 1) >= 4 * (4 * stage.parameters + 2 * SIZE.tied)
    assert adapters.tied == 0


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({}, (1809, 1892, 1517)),
        ({"gradient_checkpointing": True}, (1190, 1665, 1495)),
        ({"freeze_encoder": True}, (720, 1423, 1529)),
    ],
)
def test_stages_need_what_their_workers_took(options: dict[str, object], measured: tuple[int, ...]) -> None:
    """A Whisper base in three stages, with 6 samples of 30 s in a step (``benchmarks/staged_memory.py``, in MB)."""
    base = LARGE | {"d_model": 512, "vocab_size": 51865, "num_mel_bins": 80, "encoder_layers": 6, "decoder_layers": 6}
    size = whisper_size(base | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2048), SPOKEN)
    fixed = {"tuning": "full", "batch_size": 6, "gradient_accumulation": 1, "mixed_precision": "off", **options}
    profile = profile_from_options("mine", fixed)
    job = StagedJob(profile, size, profile, {}, size.stage, stages=3)
    for stage, peak in enumerate(measured):
        need = job.need(ClusterMachine(name="a"), 4 * stage, 4 * stage + 4, under_way=3 - stage)
        assert need / 1e6 == pytest.approx(peak, rel=0.15)


def test_the_job_is_tried_with_options_that_need_less_memory() -> None:
    job = LayoutJob(profile_from_options("mine", {"tuning": "full"}), SIZE, ONE, with_bitsandbytes=lambda: False)
    assert {s.profile.model.gradient_checkpointing for s in job.stagings()} == {False, True}
    assert {s.batch for s in job.stagings()} == {8, 4, 2, 1}
