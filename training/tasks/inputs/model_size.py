"""Size of a model from the files of its folder, without loading it."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 100_000_000
_GATED = ("llama", "mistral", "mixtral", "qwen", "gemma", "phi3", "olmo", "smollm3", "granite")
"""How model types begin whose MLP has three matrices, and no biases."""
_QUERY_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3")
"""How model types begin that normalise queries and keys."""
_FOUR_NORMS = ("gemma2", "gemma3")
"""How model types begin that also normalise what attention and MLP return."""


@dataclass(frozen=True)
class BlockSize:
    """One block of a model, as counts of numbers. The embedding counts with the block behind it, the head with the last
    one: no stage of a pipeline holds either without a block."""

    parameters: int
    matrices: int
    """Parameters in linear layers, which can be held in 8 or 4 bits."""
    multiplications: int
    """Multiplications of the forward of one sample."""
    activations: int
    """Activations of one sample saved for backward, without those of the model's ``outputs``."""
    boundary: int
    """Numbers of one sample that the next block gets: the hidden state, and with it the output of an encoder, which all
    later blocks read."""
    encoded: int = 0
    """Part of ``boundary`` that an encoder computes: if it is frozen, no gradient of these comes back."""
    evaluation: int = 0
    """Numbers of one sample that an evaluation holds of this block until its forward ends."""
    in_encoder: bool = False


@dataclass(frozen=True)
class ModelSize:
    """The properties of a model that its memory depends on, as counts of numbers."""

    parameters: int
    layers: int = 12
    activations: int = 0
    """Activations of one sample saved for backward; 0: unknown. For Whisper with a full window."""
    encoder: int = 0
    """Parameters of an encoder that can be frozen."""
    encoder_activations: int = 0
    """Part of ``activations`` in that encoder; none if it is frozen."""
    outputs: int = 0
    """Part of ``activations`` outside of the blocks, the logits and probabilities: checkpointing does not save them."""
    working: int = 0
    """Temporary activations of one sample in the encoder, needed even if nothing is saved for backward."""
    evaluation: int = 0
    """Activations of one sample in an evaluation; nothing is saved for backward. For Whisper with a full window."""
    matrices: int = 0
    """Parameters in linear layers, which can be held in 8 or 4 bits."""
    teacher: ModelSize | None = None
    """Size of the teacher in a distillation."""
    encoder_layers: int = 0
    """Part of ``layers`` in that encoder."""
    blocks: tuple[BlockSize, ...] = ()
    """Blocks in the order of the forward, an encoder's before those of its decoder; empty: unknown."""
    tied: int = 0
    """Parameters of the embedding, in the first block behind an encoder, that the head shares: two stages hold them if
    these are not the same."""

    def stage(self, start: int, end: int) -> ModelSize:
        """Return the size of the stage of a pipeline that holds the blocks from ``start`` to ``end``, exclusive.

        The parameters of the blocks are scaled to those of the model, whose files may hold more than was expected from
        its configuration.
        """
        stage, is_end = self.blocks[start:end], end == len(self.blocks)
        size = sum_of_blocks(
            stage,
            outputs=self.outputs if is_end else 0,
            working=self.working if stage[0].in_encoder else 0,
            evaluation=self.evaluation - sum(block.evaluation for block in self.blocks),
            tied=self.tied if is_end and start <= self.encoder_layers else 0,
        )
        arrived = self.blocks[start - 1].encoded if start and not stage[0].in_encoder else 0
        scale = self.parameters / (sum(block.parameters for block in self.blocks) - self.tied)
        return replace(
            size,
            parameters=round(scale * size.parameters),
            encoder=round(scale * size.encoder),
            activations=size.activations + arrived,
        )


def sum_of_blocks(
    blocks: Sequence[BlockSize], *, outputs: int, evaluation: int, working: int = 0, tied: int = 0
) -> ModelSize:
    """Return the size of a model of these blocks.

    Args:
        evaluation: activations of one sample that an evaluation holds at once, besides those of each block.
        outputs, working, tied: see :class:`ModelSize`.
    """
    encoder = [block for block in blocks if block.in_encoder]
    return ModelSize(
        parameters=sum(block.parameters for block in blocks) - tied,
        layers=len(blocks),
        activations=sum(block.activations for block in blocks) + outputs,
        encoder=sum(block.parameters for block in encoder),
        encoder_activations=sum(block.activations for block in encoder),
        outputs=outputs,
        working=working,
        evaluation=sum(block.evaluation for block in blocks) + evaluation,
        matrices=sum(block.matrices for block in blocks),
        encoder_layers=len(encoder),
        blocks=tuple(blocks),
        tied=tied,
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def _elements(path: Path) -> int:
    """Return how many numbers a safetensors file holds, from its header; 0 if that cannot be read."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= _LONGEST_HEADER else {}
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        return sum(math.prod(int(side) for side in shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return 0


def integer_in(config: Mapping[str, Any], *names: str) -> int:
    """Return the first entry of a configuration that is a whole number above 0.

    Raises:
        KeyError: there is none.
    """
    for name in names:
        if isinstance(config.get(name), int) and 0 < config[name] < 2**40:
            return int(config[name])
    raise KeyError(names[0])


def decoder_size(config: Mapping[str, Any], sequence: int = 0) -> ModelSize:
    """Return the size of a decoder like GPT-2, or like Llama (gated MLP of three matrices, grouped keys and values).

    Args:
        sequence: tokens of one text; 0: the model's maximum.
    """
    width, layers = (
        integer_in(config, "hidden_size", "n_embd"),
        integer_in(config, "num_hidden_layers", "n_layer"),
    )
    vocabulary, kind = integer_in(config, "vocab_size"), str(config.get("model_type"))
    gated = kind.startswith(_GATED)
    wide = integer_in({"wide": 4 * width, **config}, "intermediate_size", "n_inner", "wide")
    heads = integer_in({"heads": 1, **config}, "num_attention_heads", "n_head", "heads")
    groups = integer_in({"heads": heads, **config}, "num_key_value_heads", "heads")
    head = integer_in({"head": max(1, width // heads), **config}, "head_dim", "head")
    attention = 2 * width * heads * head + 2 * width * groups * head
    mlp_parameters = (3 if gated else 2) * width * wide
    small_parameters = 2 * width if gated else 4 * width + 4 * width + wide + width  # norms, and biases
    position_parameters = (
        0 if gated else integer_in({"places": 1, **config}, "n_positions", "max_position_embeddings", "places") * width
    )
    tied = config.get("tie_word_embeddings", not gated)
    length = sequence or integer_in({"length": 512, **config}, "n_positions", "max_position_embeddings", "length")
    matrices = attention + mlp_parameters
    block = BlockSize(
        parameters=matrices + small_parameters,
        matrices=matrices if kind != "gpt2" else 0,  # whose layers are no Linear
        multiplications=length * (matrices + 2 * length * heads * head),
        activations=length * _saved_in_decoder(config, kind, width, wide, heads * head, groups * head),
        boundary=length * width,
    )
    embedding = vocabulary * width
    blocks = with_ends(
        [block] * layers,
        embedding=embedding + position_parameters,
        head=embedding + 2 * width,
        multiplications=length * embedding,
        outputs=2 * length * vocabulary,
    )
    return sum_of_blocks(
        blocks,
        outputs=2 * length * vocabulary,
        evaluation=length * working_activations(width, wide),
        tied=embedding if tied else 0,
    )


def with_ends(
    blocks: Sequence[BlockSize], embedding: int, head: int, multiplications: int, outputs: int
) -> list[BlockSize]:
    """Return the blocks of a decoder with its embedding in the first one and its head in the last one.

    Args:
        embedding: its parameters.
        head: its parameters, also those that are tied to the embedding.
        multiplications: those of the head, for one sample.
        outputs: numbers of one sample that the head computes in an evaluation.
    """
    front = replace(blocks[0], parameters=blocks[0].parameters + embedding)
    *others, back = (front, *blocks[1:])
    back = replace(
        back,
        parameters=back.parameters + head,
        multiplications=back.multiplications + multiplications,
        evaluation=back.evaluation + outputs,
        boundary=0,
        encoded=0,
    )
    return [*others, back]


def saved_activations(width: int, wide: int) -> int:
    """Return the activations of one token that a block like Whisper's or OPT's saves for backward, without the
    attention matrix, which is recomputed: input and output of both norms, queries, keys, values, what attention returns
    and its copy for the next matrix, and the hidden numbers of the MLP before and after their activation function."""
    return 9 * width + 2 * wide


def _saved_in_decoder(config: Mapping[str, Any], kind: str, width: int, wide: int, queries: int, keys: int) -> int:
    """Return the activations of one token that a block of a decoder saves for backward, as its module in transformers
    computes it.

    An RMSNorm saves its input, this divided by its norm, and this times the weight. A gated MLP saves the outputs of
    both first matrices and of the activation function, and their product; GPT-2's GELU is computed from five numbers.

    Args:
        queries, keys: numbers of one token's queries, and of its keys.
    """
    gated = kind.startswith(_GATED)
    saved = 2 * queries + 2 * keys  # with values and output
    saved += (3 if gated else 2) * width * (4 if kind.startswith(_FOUR_NORMS) else 2)
    if kind.startswith(_QUERY_NORMS):
        saved += 2 * (queries + keys)
    function = config.get("hidden_act") or config.get("activation_function") or ("gelu_new" if kind == "gpt2" else "")
    return saved + (4 if gated else 5 if function == "gelu_new" else 2) * wide


def working_activations(width: int, wide: int) -> int:
    """Return the activations of one token that a block holds at once if nothing is saved: residual stream and MLP."""
    return 3 * width + wide


def size_of(
    folder: Path, shape: Callable[[Mapping[str, Any]], ModelSize] = decoder_size, is_whole: bool = True
) -> ModelSize | None:
    """Return the size of the model in a folder; ``None`` if neither its weights nor its configuration show it.

    Args:
        shape: returns the size of a model with a configuration; raises ``KeyError``, ``TypeError`` or ``ValueError``
            if it describes none.
        is_whole: whether all weights in the folder are trained, so that they can be counted.
    """
    config = {**_read(folder / "preprocessor_config.json"), **_read(folder / "config.json")}
    size: ModelSize | None = None
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        size = shape(config)
    parameters = sum(_elements(path) for path in folder.glob("*.safetensors")) if is_whole else 0
    if parameters and size is not None:
        return replace(size, parameters=parameters)
    return ModelSize(parameters) if parameters else size
