"""The files of a model that lies on several machines, divided by its blocks: a machine gets those that it holds, and
what belongs to no block.

Each block is a file of its own, so a machine that gets other blocks later is sent only these. A machine that has the
whole folder already, of an earlier run, is sent nothing.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from distributed.machine.link import MachineLink
from distributed.preparation.code_sync import Inputs
from distributed.preparation.transfer import Tree, ask_missing
from profiles.schema import Profile
from training.layouts.stages.bounds import bounds_of, kinds_of_blocks
from training.model.model_files import join_files, tensor_names
from training.records.plan import RunPlan
from training.records.run_files import sha256
from training.tasks.inputs.model_size import ModelSize
from training.tasks.registry import size_for

SMALLEST = 64 << 20
"""Bytes of a model's files up to which every machine gets all of them."""
_FOLDER = "inputs/model"
_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_IN_LIST = re.compile(r"(.+?)\.(\d+)\.")
"""Beginning of the name of a tensor in a list of modules."""


class DividedModel:
    """A model's files by block, which lie in a folder until :meth:`close`.

    Args:
        tree: of the model's folder.
        encoder, blocks: number of blocks in its encoder, and of all.
        folder: made for the files.

    Raises:
        OSError: the files cannot be read, or there is no room for as much again.
        ValueError: they are no such files, or their names do not tell which block a tensor belongs to.
    """

    def __init__(self, tree: Tree, encoder: int, blocks: int, folder: Path) -> None:
        self._folder = folder
        weights = [tree.sources[blob] for name, blob in tree.files.items() if name.endswith(_SUFFIX)]
        names = [name for file in weights for name in tensor_names(file)]
        self._others = {n: blob for n, blob in tree.files.items() if not n.endswith((_SUFFIX, f"{_SUFFIX}.index.json"))}
        self._sources, self._blobs = dict(tree.sources), dict[int | None, str]()
        self._names, self._block_of = names, block_numbers(names, encoder, blocks)
        if not self._block_of:
            raise ValueError("the blocks are not recognised by the names")
        folder.mkdir(parents=True)
        for block in (None, *range(blocks)):
            file = folder / _file_of(block)
            join_files(weights, file, lambda name: self._block_of.get(name) == block)  # noqa: B023 - it is called at once
            self._blobs[block] = blob = sha256(file)
            self._sources[blob] = file

    def tree(self, blocks: Collection[int]) -> Tree:
        """Return the folder of a machine with these blocks."""
        kept = {None, *blocks}
        places = {name: _file_of(self._block_of.get(name)) for name in self._names if self._block_of.get(name) in kept}
        index = self._folder / f"index-{'-'.join(map(str, sorted(blocks)))}.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        files = {**self._others, **{_file_of(block): self._blobs[block] for block in kept}, _INDEX: sha256(index)}
        sources = {**self._sources, files[_INDEX]: index}
        return Tree(files, {blob: sources[blob] for blob in files.values()})


def _file_of(block: int | None) -> str:
    return "model-rest.safetensors" if block is None else f"model-block-{block:05d}.safetensors"


def block_numbers(names: Iterable[str], encoder: int, blocks: int) -> dict[str, int]:
    """Return the number of the block that each tensor belongs to, in the order of the forward; without those outside of
    blocks; empty: the names do not tell.

    Args:
        encoder: blocks in an encoder, which come first.
    """
    lists: dict[str, dict[str, int]] = defaultdict(dict)
    for name in names:
        if (begin := _IN_LIST.match(name)) is not None:
            lists[begin[1]][name] = int(begin[2])
    numbers: dict[str, int] = {}
    for start, count, word in ((0, encoder, "encoder."), (encoder, blocks - encoder, "decoder." if encoder else "")):
        fitting = [m for prefix, m in lists.items() if word in f"{prefix}." and {*m.values()} == {*range(count)}]
        if count and len(fitting) != 1:
            return {}
        numbers |= {name: start + number for modules in fitting for name, number in modules.items()}
    return numbers


BlocksOn = Callable[[str, ModelSize], Collection[int]]
"""Returns the blocks that a machine needs, by its name."""


class BlockInputs:
    """What each machine is sent, where it needs some blocks of a model only.

    Args:
        profile: with the paths of this machine.
        folder: in which the blocks lie until :meth:`close`.
        blocks_on: ``None``: all machines need the whole model.
    """

    def __init__(self, profile: Profile, folder: Path, blocks_on: BlocksOn | None) -> None:
        self._profile, self._folder, self._blocks_on = profile, folder, blocks_on
        self._divided: DividedModel | None = None
        self._lock = threading.Lock()

    def of(self, link: MachineLink, inputs: Inputs) -> Inputs:
        """Return the inputs for a machine; several threads may ask.

        Raises:
            SshError: it cannot be asked what it has.
        """
        tree = inputs.trees.get(_FOLDER)
        if tree is None or self._blocks_on is None or link.machine.is_local or _weight_bytes(tree) < SMALLEST:
            return inputs
        if not ask_missing(link, [tree.name], []).trees or (size := size_for(self._profile)) is None:
            return inputs
        with self._lock:
            self._divided = self._divided or _divided(tree, size, self._folder)
            if self._divided is None:
                self._blocks_on = None
            if self._blocks_on is None or self._divided is None:
                return inputs
            own = self._divided.tree(self._blocks_on(link.name, size))
        return replace(inputs, trees={**inputs.trees, _FOLDER: own})

    def close(self) -> None:
        """Remove the blocks."""
        self._divided = None
        shutil.rmtree(self._folder, ignore_errors=True)


def blocks_of_stages(plan: RunPlan) -> BlocksOn | None:
    """Return which blocks the machines of a plan hold; ``None``: each the whole model."""
    if plan.world_size > 1 or not plan.is_staged or plan.profile.run.layout != "pipeline":
        return None
    devices = plan.members[0].devices

    def blocks_on(machine: str, size: ModelSize) -> set[int]:
        stages = zip(devices, pairwise(bounds_of(devices, len(size.blocks))))
        return {block for device, ends in stages if device.machine == machine for block in range(*ends)}

    return blocks_on


def blocks_to_measure(profile: Profile) -> BlocksOn | None:
    """Return the blocks that any machine measures of a model that is to be divided; ``None``: it measures the whole."""
    if profile.run.layout != "pipeline":
        return None
    return lambda machine, size: {*kinds_of_blocks(len(size.blocks), size.encoder_layers)}


def _weight_bytes(tree: Tree) -> int:
    return sum(tree.sources[blob].stat().st_size for name, blob in tree.files.items() if name.endswith(_SUFFIX))


def _divided(tree: Tree, size: ModelSize, folder: Path) -> DividedModel | None:
    """Return a model divided by its blocks; ``None``: it is sent whole, as these are not known or there is no room."""
    if not size.blocks:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError, ValueError):
        return DividedModel(tree, size.encoder_layers, len(size.blocks), folder)
    return None
