"""Where a model can be cut: its blocks, and which of them each other module belongs with.

No rule per family: the blocks are the largest list of modules of one class (two lists in an encoder-decoder), and what
lies before and after them is seen in one forward on the meta device, which costs neither memory nor arithmetic.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from profiles.errors import BadInput
from training.layouts.stages.origins import Origins
from training.layouts.stages.stand_ins import hidden_state

MODEL_ERRORS = (
    RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError
)  # fmt: skip
"""What a model's code raises that does not find what it expects."""
_LOST = frozenset({-2})
"""The origins of what blocks give beside the hidden state: it does not cross."""

Run = Callable[[nn.Module], object]
"""Runs the forward of a model on the meta device."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of a whole model. Blocks are numbered through it, those of an encoder first."""

    blocks: tuple[str, ...]
    """Names of the blocks."""
    encoder_blocks: int
    """How many of them are the encoder's; 0 if there is no encoder apart from the decoder."""
    memory: str
    """The module that gives the encoder's output, which all decoder blocks read; empty without an encoder."""
    homes: Mapping[str, int]
    """For each module with weights outside the blocks: the block in whose stage it is computed."""
    shared: Mapping[str, frozenset[int]]
    """For each weight that several modules use, by its first name: the blocks in whose stages it is needed."""
    everywhere: frozenset[str]
    """Weights beside the list of blocks, which every stage holds."""
    gives_pairs: bool = False
    """Whether a block gives a pair, of which the model reads the hidden state only, instead of one tensor."""

    @property
    def encoder(self) -> str:
        """Prefix of the encoder's names."""
        return _parent(_parent(self.blocks[0])) + "."


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device, for which no memory is taken."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): _on_meta(tensor) for tensor in tensors}
    return copy.deepcopy(model, memo)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta = tensor.detach().to("meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def examine(model: nn.Module, run: Run) -> Anatomy:
    """Return the anatomy of a model on the meta device, of which ``run`` computes a forward.

    Raises:
        BadInput: it has no list of blocks, or its blocks are not called one after the other.
    """
    lists = _block_lists(model)
    trace = _follow(model, lists, run)
    blocks = trace.blocks
    memory = trace.memory() if len(lists) == 2 else ""
    homes = dict(trace.homes())
    number = {name: index for index, name in enumerate(blocks)} | homes
    needed = {name: _blocks_of(users, number) for name, users in _ties(model).items()}
    for name, block in trace.reads():
        needed[name] = needed.get(name, _blocks_of({_parent(name)}, number)) | {block}
    return Anatomy(
        blocks=tuple(blocks),
        encoder_blocks=trace.boundary,
        memory=memory,
        homes=homes,
        shared={name: blocks for name, blocks in needed.items() if blocks},
        everywhere=frozenset(trace.beside_blocks()),
        gives_pairs=trace.gives_pairs,
    )


def _follow(model: nn.Module, lists: list[str], run: Run) -> _Trace:
    """Follow a forward in which blocks give a tensor or, if the model takes no tensor from them, a pair."""
    trace = _Trace(model, list(lists))
    try:
        trace.record(run)
    except BadInput as error:
        trace = _Trace(model, list(lists), gives_pairs=True)
        try:
            trace.record(run)
        except BadInput:
            raise error from error.__cause__
        _Trace(model, list(lists), gives_pairs=True, is_lone_half=False).record(run)
    return trace


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _block_lists(model: nn.Module) -> list[str]:
    """Return the names of the lists of blocks: the largest one, of an encoder-decoder the two largest."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        nested = any(name.startswith(outer + ".") for outer in sizes)
        if not nested and isinstance(module, nn.ModuleList | nn.Sequential) and _is_uniform(module):
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    lists = 2 if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else 1
    if len(sizes) < lists:
        raise BadInput(
            f"{type(model).__name__} has no list of blocks of one class, so it cannot be cut into stages",
            "keep its blocks in an nn.ModuleList, or train it whole",
        )
    return sorted(sizes, key=lambda name: sizes[name], reverse=True)[:lists]


def _is_uniform(modules: nn.ModuleList | nn.Sequential) -> bool:
    return len(modules) > 1 and len({type(module) for module in modules}) == 1


def _ties(model: nn.Module) -> dict[str, set[str]]:
    """Return the modules that use each weight which more than one uses, by the first name of the weight."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    ties = {same[0]: {_parent(name) for name in same} for same in names.values() if len(same) > 1}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        ties.setdefault(source, set()).update((_parent(source), _parent(target)))
    return ties


def _blocks_of(modules: set[str], number: Mapping[str, int]) -> frozenset[int]:
    """Return the blocks with which these modules belong."""
    owners = (next((name for name in _lineage(module) if name in number), "") for module in modules)
    return frozenset(number[owner] for owner in owners if owner)


def _lineage(name: str) -> Iterator[str]:
    while name:
        yield name
        name = _parent(name)


@dataclass
class _Trace:
    """One forward: in which order blocks and other modules with weights are called, and what they read."""

    model: nn.Module
    lists: list[str]
    gives_pairs: bool = False
    is_lone_half: bool = True
    """Whether the second of a pair is ``None``, as on stages that do not compute it; else it is a number."""
    blocks: list[str] = field(default_factory=list)
    """Names of the blocks in the order of their calls."""
    ends: list[int] = field(default_factory=list)
    """How many other calls had been made when a block was left."""
    begins: list[int] = field(default_factory=list)
    calls: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Number of each call of each module outside the blocks."""
    _count: int = 0
    _hidden: torch.Tensor | None = None
    _version: int = 0
    """How often the hidden state had been written into when its block was left."""

    def __post_init__(self) -> None:
        self._origins = Origins(self._check_ending, self._read)
        self._buffers_before: dict[str, tuple[int, int]] = {}
        self._running: list[str] = []
        self._reads: dict[str, list[int]] = defaultdict(list)
        """Number of each read of a weight outside of its module, by the first name of the weight."""
        self._weights: dict[int, list[str]] = defaultdict(list)
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            self._weights[id(weight)].append(name)

    def record(self, run: Run) -> None:
        hooks = [*self._watch_blocks(), *self._watch_others()]
        try:
            with torch.no_grad(), self._hollow(), self._origins:
                run(self.model)
        except MODEL_ERRORS as error:
            reason = " ".join(str(error).split())[:200]
            self._refuse(f"its forward cannot be followed: {reason}")
        finally:
            for hook in hooks:
                hook.remove()
        if self.blocks != self._expected:
            self._refuse_order()
        for name, state in self._buffers().items():
            if self._buffers_before.get(name) != state:
                self._refuse(f"its buffer {name} changes after blocks, which not all stages compute")

    @property
    def _expected(self) -> list[str]:
        return [name for blocks in self.lists for name in self._names(blocks)]

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Return identity and version of each saved buffer that all stages have."""
        saved = self.model.state_dict(keep_vars=True)
        of_one_stage = tuple(f"{name}." for name in (*self._others(), *self._expected))
        buffers = ((name, saved[name]) for name, _ in self.model.named_buffers() if name in saved)
        return {name: (id(buffer), buffer._version) for name, buffer in buffers if not name.startswith(of_one_stage)}

    def _refuse_order(self) -> NoReturn:
        self._refuse(f"the blocks of {' and '.join(self.lists)} are not called once each, in their order")

    def _names(self, blocks: str) -> list[str]:
        return [f"{blocks}.{index}" for index in range(len(list(self.model.get_submodule(blocks).children())))]

    @property
    def boundary(self) -> int:
        """Number of the encoder's blocks."""
        return len(self._names(self.lists[0])) if len(self.lists) == 2 else 0

    def _watch_blocks(self) -> Iterator[RemovableHandle]:
        for blocks in self.lists:
            for index, name in enumerate(self._names(blocks)):
                block = self.model.get_submodule(name)
                yield block.register_forward_pre_hook(partial(self._enter, name, index == 0), with_kwargs=True)
                yield block.register_forward_hook(self._leave)

    def _enter(self, name: str, is_first: bool, _: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self.blocks:
            self._refuse_order()
        if not self.blocks and not name.startswith(self.lists[0] + "."):
            self.lists.reverse()  # the encoder's come first
        hidden = hidden_state(args, kwargs)
        if not isinstance(hidden, torch.Tensor):
            self._refuse(f"{name} takes a {type(hidden).__name__}, and one tensor alone crosses")
        # what arrives replaces a block's output, and what departs is the next one's input
        if not is_first and (hidden is not self._hidden or hidden._version != self._version):
            self._refuse(f"{name} takes something else than what the block before it gives")
        origins = self._origins.of((args[1:], kwargs) if args else list(kwargs.values())[1:])
        if not is_first and origins - self._from_encoder:
            self._refuse(f"{name} reads more than what the block before it gives, and that alone crosses")
        if not self.blocks:
            self._buffers_before = self._buffers()
        self.blocks.append(name)
        self.begins.append(self._count)

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        hidden, beside = output if self.gives_pairs else (output, None)
        self._hidden, self._version = hidden, hidden._version
        self._origins.set(beside, _LOST)
        self._origins.set(hidden, frozenset({len(self.ends)}))
        self.ends.append(self._count)

    @property
    def _from_encoder(self) -> frozenset[int]:
        """The origins of the encoder's output, which all stages behind it have."""
        return frozenset({self.boundary - 1}) if self.boundary else frozenset()

    def _check_ending(self, origins: frozenset[int]) -> None:
        last = len(self._expected) - 1
        if len(self.ends) > last and origins - self._from_encoder - {last}:
            self._refuse("what follows its blocks reads more than what the last of them gives, and that alone crosses")

    def _read(self, weight: nn.Parameter) -> frozenset[int]:
        """Note a weight that is read outside of its module; return its origins."""
        names = self._weights[id(weight)]
        if not names or any(self._contains_blocks(_parent(name)) or self._is_running(name) for name in names):
            return frozenset()
        if any(name.startswith(tuple(f"{blocks}." for blocks in self.lists)) for name in names):
            self._refuse(f"{names[0]} is read outside of its block")
        self._reads[names[0]].append(self._count)
        self._count += 1
        return frozenset({len(self.ends) - 1})

    def _is_running(self, name: str) -> bool:
        return any(name.startswith(f"{running}.") for running in self._running)

    @contextmanager
    def _hollow(self) -> Iterator[None]:
        """Let the blocks compute nothing: what they compute does not matter, and may need data or a device."""
        blocks = [self.model.get_submodule(name) for name in self._expected]
        for block in blocks:
            block.__dict__["forward"] = self._fresh
        try:
            yield
        finally:
            for block in blocks:
                del block.__dict__["forward"]

    def _fresh(self, *args: Any, **kwargs: Any) -> Any:
        """Return a new tensor like the hidden state, so what reads it is told apart from what reads the input."""
        fresh = torch.empty_like(hidden_state(args, kwargs))
        second = None if self.is_lone_half else fresh.new_empty(())
        return (fresh, second) if self.gives_pairs else fresh

    def _others(self) -> Iterator[str]:
        """Yield the outermost modules with weights of their own that neither are in a block nor contain blocks."""
        outermost = ""
        for name, module in self.model.named_modules():
            if any(f"{name}.".startswith(f"{blocks}.") for blocks in self.lists) or self._contains_blocks(name):
                continue
            if outermost and name.startswith(outermost + "."):
                continue
            if next(module.parameters(recurse=False), None) is not None:
                outermost = name
                yield name

    def _contains_blocks(self, name: str) -> bool:
        return not name or any(blocks.startswith(name + ".") for blocks in self.lists)

    def _watch_others(self) -> Iterator[RemovableHandle]:
        def enter(name: str, *_: object) -> None:
            self.calls[name].append(self._count)
            self._count += 1
            self._running.append(name)

        def leave(_: nn.Module, __: object, output: object) -> None:
            self._running.pop()
            self._origins.set(output, frozenset({len(self.ends) - 1}))

        for name in self._others():
            module = self.model.get_submodule(name)
            yield module.register_forward_pre_hook(partial(enter, name))
            yield module.register_forward_hook(leave)

    def beside_blocks(self) -> Iterator[str]:
        """Yield the weights of the modules that contain the blocks."""
        for name, _ in self.model.named_parameters():
            if self._contains_blocks(_parent(name)):
                yield name

    def memory(self) -> str:
        """Return the module that is called last in the encoder: what ends it, or its last block."""
        encoder = _parent(self.lists[0]) + "."
        end = self.ends[self.boundary - 1]
        ending = [name for name, calls in self.calls.items() if name.startswith(encoder) and calls[0] >= end]
        return ending[-1] if ending else self.blocks[self.boundary - 1]

    def homes(self) -> Iterator[tuple[str, int]]:
        """Yield each module outside the blocks that is called, with the block in whose stage it is computed."""
        tied = {user for users in _ties(self.model).values() for user in users}
        for name in self._others():
            reads = [moments[0] for weight, moments in self._reads.items() if weight.startswith(f"{name}.")]
            if calls := self.calls[name] or reads[:1]:
                yield name, self._home(name, calls)
            elif name not in tied:
                self._refuse(f"{name} has weights, and its forward is not called")

    def reads(self) -> Iterator[tuple[str, int]]:
        """Yield each weight that is read outside of its module, with the block in whose stage that is done."""
        for name, moments in self._reads.items():
            for moment in moments:
                yield name, self._home(name, [moment])

    def _home(self, name: str, calls: list[int]) -> int:
        final, boundary = len(self.blocks) - 1, self.boundary
        if calls[0] >= self.ends[final]:
            return final
        if calls[-1] < self.begins[0] and not (boundary and self._is_under(name, 1)):
            return 0
        if boundary and self.ends[boundary - 1] <= calls[0] and calls[-1] < self.begins[boundary]:
            if self._is_under(name, 0):
                return boundary - 1
            if self._is_under(name, 1):
                return boundary
        if boundary and self._is_under(name, 1) and calls[-1] < self.begins[boundary]:
            return boundary
        self._refuse(f"{name} is used neither only before its blocks nor only after them")

    def _is_under(self, name: str, index: int) -> bool:
        return name.startswith(_parent(self.lists[index]) + ".")

    def _refuse(self, reason: str) -> NoReturn:
        raise not_to_be_cut(self.model, reason)


def not_to_be_cut(model: nn.Module, reason: str) -> BadInput:
    """Return the error for a model that cannot be cut."""
    hint = "train it whole, or with a method that needs less memory"
    return BadInput(f"{type(model).__name__} cannot be cut into stages: {reason}", hint)
