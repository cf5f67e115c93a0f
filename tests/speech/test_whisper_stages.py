"""What a stage of a Whisper holds."""

from __future__ import annotations

from speech.inputs.model_size import whisper_size

LARGE = {
    "d_model": 1280,
    "vocab_size": 51866,
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}


def test_the_blocks_of_a_large_v3_are_all_of_its_parameters() -> None:
    size = whisper_size(LARGE)
    assert size.parameters == 1_543_490_560  # as transformers counts them
    assert sum(block.parameters for block in size.blocks) - size.tied == size.parameters
    assert size.stage(0, 64) == size


def test_a_stage_of_encoder_blocks_is_all_encoder() -> None:
    stage = whisper_size(LARGE).stage(0, 20)
    assert stage.parameters == stage.encoder and stage.activations == stage.encoder_activations
    assert (stage.layers, stage.encoder_layers, stage.outputs) == (20, 20, 0)


def test_every_later_stage_of_the_decoder_holds_what_was_heard() -> None:
    size = whisper_size(LARGE)
    halves = [size.stage(32, 48), size.stage(48, 64)]
    assert sum(half.activations for half in halves) == size.activations - size.encoder_activations + 2 * 1500 * 1280
    assert [half.encoder for half in halves] == [0, 0]


def test_the_decoders_embedding_is_counted_once_where_one_stage_holds_it_and_the_head() -> None:
    size = whisper_size(LARGE)
    apart = size.stage(32, 48).parameters + size.stage(48, 64).parameters
    assert size.stage(32, 64).parameters == apart - 51866 * 1280
    assert size.stage(30, 64).parameters == size.stage(30, 32).parameters + size.stage(32, 64).parameters
