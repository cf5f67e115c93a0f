"""Texts for language models: read from files or the hub, tokenise once, and split into blocks."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from profiles.errors import BadInput, counted
from profiles.locations import is_on_hub
from training.tasks.cache import get_or_build
from training.tasks.data_files.splits import SPLITS, by_split, held_out_count, path_if_file, without_hidden
from training.tasks.data_files.tables import read_text
from training.tasks.text.conversation_rows import IGNORED_COLUMNS
from training.tasks.text.message_rows import text_of
from training.tasks.text.row_files import is_table, row_files, rows_of

if TYPE_CHECKING:
    from training.tasks.base import Progress  # loads torch, which reading a text does not need

logger = logging.getLogger("muster.data")

Tokens = npt.NDArray[np.uint32]
PIECE = 1_000_000  # characters tokenised at once
_EXCERPTS, _CHARACTERS = 16, 8
"""Sampling of a text: number of excerpts, and characters read per requested token (English has about 4)."""


class Blocks:
    """A text's tokens in blocks of ``size``: each token but the first is predicted exactly once.

    A block is ``(inputs, targets)``, the targets one token later. The last block is as short as what is left.
    """

    def __init__(self, tokens: Tokens, size: int) -> None:
        self.tokens = tokens
        self.size = size

    def __len__(self) -> int:
        return max(0, -(-(len(self.tokens) - 1) // self.size))

    def __getitem__(self, index: int, /) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        piece = np.asarray(self.tokens[index * self.size : (index + 1) * self.size + 1], dtype=np.int64)
        return piece[:-1], piece[1:]

    def head(self, count: int) -> Blocks:
        """Return the first ``count`` blocks; 0 means all."""
        return Blocks(self.tokens[: count * self.size + 1], self.size) if count else self


def read_texts(path: str, text_column: str = "") -> dict[str, list[str]]:
    """Return the documents of a data set by split.

    It is a text file, a table of texts, a folder with ``train.txt`` or such tables, or a hub data set. A folder without
    ``train.txt`` is one training split of all its ``.txt`` files in alphabetical order.

    Raises:
        BadInput: not found, without text, or not UTF-8.
    """
    if is_on_hub(path):
        return _read_hub(path, text_column)
    files = text_files(path).items()
    return {split: [text for path in paths for text in _documents(path, text_column)] for split, paths in files}


def text_files(path: str) -> dict[str, list[Path]]:
    """Return the files of a local data set by split.

    Raises:
        BadInput: not found, or empty.
    """
    if not path:
        raise BadInput("no data set was given", "set dataset_path to a text file, or a folder with train.txt")
    source = Path(path).expanduser()
    if not source.exists():
        raise BadInput(f"data set {path}: no such file or folder", "check dataset_path")
    files_by_split = {"train": [source]} if source.is_file() else row_files(path) or _files_of(source)
    for file in (file for files in files_by_split.values() for file in files):
        if not file.stat().st_size:
            raise BadInput(f"{file}: the file is empty", "it needs the text to train on")
    return files_by_split


def hold_out_tail(splits: dict[str, Tokens], size: int) -> dict[str, Tokens]:
    """Return ``splits`` with a validation split: if missing, the last 10 % of the blocks of the training text.

    Raises:
        BadInput: the training text is too short to divide.
    """
    if "validation" in splits:
        return splits
    blocks = len(Blocks(splits["train"], size))
    held = held_out_count(blocks)
    if blocks < 2:
        raise BadInput(f"the training text has fewer than 2 blocks of {size} tokens", "add text or lower block_size")
    logger.warning("no validation.txt: the last %d of %d blocks are held out to evaluate on", held, blocks)
    cut = (blocks - held) * size
    return {**splits, "train": splits["train"][: cut + 1], "validation": splits["train"][cut:]}


def sample_tokens(documents: Sequence[str], tokenizer: Any, count: int) -> tuple[Tokens, float] | None:
    """Return at least ``count`` tokens from evenly spread excerpts of ``documents``, and their tokens per character.

    ``None`` if that would be a large part of the text.
    """
    total, per_sample = sum(map(len, documents)), -(-count // _EXCERPTS)
    width = _CHARACTERS * per_sample
    while _EXCERPTS * width * 2 < total:
        samples = list(_excerpts(documents, total, width))
        ids = [tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"] for sample in samples]
        if min(map(len, ids)) >= per_sample:
            tokens = np.concatenate([np.asarray(sample_ids[:per_sample], dtype=np.uint32) for sample_ids in ids])
            return tokens, sum(map(len, ids)) / (_EXCERPTS * width)
        width *= 2
    return None


def _excerpts(documents: Sequence[str], total: int, width: int) -> Iterator[str]:
    """Yield :data:`_EXCERPTS` excerpts of ``width`` characters, evenly spaced over the concatenated documents."""
    ends = list(itertools.accumulate(map(len, documents)))
    for index in range(_EXCERPTS):
        start = index * (total - width) // (_EXCERPTS - 1)
        document = bisect.bisect_right(ends, start)
        text, position = "", start - (ends[document] - len(documents[document]))
        while len(text) < width:
            text += documents[document][position : position + width - len(text)]
            document, position = document + 1, 0
        yield text


def tokenise(
    documents: Sequence[str], tokenizer: Any, root: Path, progress: Progress, phase: str, piece: int = PIECE
) -> Tokens:
    """Return the tokens of ``documents``, memory-mapped from the cache below ``root``, computing them if needed.

    Several documents are each ended by the tokenizer's end token, if it has one.

    Args:
        piece: characters tokenised at once, extended to the end of the line.
    """
    digest = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16)
    for document in documents:
        digest.update(hashlib.blake2b(document.encode()).digest())
    total = sum(map(len, documents))
    end = tokenizer.eos_token_id if len(documents) > 1 else None  # not part of the tokenizer's serialised form
    digest.update(f"end {end}".encode())

    def build(folder: Path) -> None:
        done = 0
        progress(phase, 0, total)
        with (folder / "tokens.u32").open("wb") as file:
            for document in documents:
                for text in _pieces(document, piece):
                    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                    file.write(np.asarray(ids, dtype=np.uint32).tobytes())
                    done += len(text)
                    progress(phase, done, total)
                if end is not None:
                    file.write(np.uint32(end).tobytes())

    folder = get_or_build(root / "tokens", digest.hexdigest(), build, lambda: progress(f"{phase} (waiting)", 0, total))
    file = folder / "tokens.u32"
    return np.memmap(file, np.uint32, "r") if file.stat().st_size else np.empty(0, np.uint32)


def _pieces(text: str, size: int) -> Iterator[str]:
    """Split a long text at line ends, which a tokenizer's merges do not cross."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


def _documents(path: Path, text_column: str) -> list[str]:
    """Return the text of a file, or the texts of a table's rows; rows without one are skipped."""
    if not is_table(path):
        return [_read(path)]
    column, documents, others = text_column or "text", [], dict[str, None]()
    for row, location in rows_of(path):
        if column not in row:
            columns = ", ".join(map(str, list(row)[:8]))
            raise BadInput(f"{location}: no column {column!r}; it has: {columns}", "set text_column")
        text = "" if row[column] is None else text_of(row[column], f"{location}, column {column}")
        documents.append(text)
        others |= dict.fromkeys(str(name) for name in row if name not in (column, *IGNORED_COLUMNS))
    if others:
        logger.warning("%s: only column %s is learnt, and not %s", path.name, column, ", ".join(list(others)[:8]))
    filled = [text for text in documents if text.strip()]
    if not filled:
        raise BadInput(f"{path}: no text in column {column!r}", "it needs the text to train on")
    if len(filled) < len(documents):
        logger.warning("%s: left out %s without a text", path.name, counted(len(documents) - len(filled), "row"))
    return filled


def _read(path: Path) -> str:
    text = read_text(path, "save the text as UTF-8")
    if not text.strip():
        raise BadInput(f"{path}: the file is empty", "it needs the text to train on")
    return text.replace("\r\n", "\n")


def _files_of(folder: Path) -> dict[str, list[Path]]:
    files = {split: [path] for split, path in by_split(lambda name: path_if_file(folder / f"{name}.txt")).items()}
    if "train" in files:
        return files
    taken = {name for names in SPLITS.values() for name in names}
    others = sorted(path for path in without_hidden(folder.glob("*.txt")) if path.stem not in taken)
    if not others:
        message = f"data set {folder}: no train.txt and no other .txt file"
        raise BadInput(message, "name a text file, a table, or a folder of them")
    return {**files, "train": others}


def _read_hub(name: str, text_column: str) -> dict[str, list[str]]:
    from training.tasks.data_files.hub import load_hub_dataset, splits_of  # the datasets package takes 2 s to import

    loaded = load_hub_dataset(name)
    column = text_column or "text"
    texts = {}
    for split, key in splits_of(loaded).items():
        if column not in loaded[key].column_names:
            columns = ", ".join(loaded[key].column_names)
            raise BadInput(f"data set {name}, {key}: no column {column!r}; it has: {columns}", "set text_column")
        texts[split] = [text for text in loaded[key][column] if text]
    if not texts.get("train"):
        raise BadInput(f"data set {name}: no text in a train split; it has: {', '.join(loaded)}", "")
    return texts
