"""A model in stages that answers as a whole one would: the last stage leads, and the others follow.

The leader runs code for whole models unchanged (``generate`` of transformers, a task's evaluation). Each forward of its
model becomes a request to the other stages, of a few numbers: each computes its blocks, hands the hidden state on, and
keeps the keys and values of its own blocks. An encoder's output is computed once and handed to all stages of the
decoder. Only the leader looks at texts, times and random numbers, so devices of several kinds cannot fall apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import BaseModel, NonNegativeInt, ValidationError
from torch import nn

from training.hardware.device import Precision, evaluating
from training.layouts.carrier import Carrier, receive_payload, send_payload
from training.layouts.messages import HEADER_BYTES, TensorHeader, as_bytes, pack_header, parse_header
from training.layouts.orders import Work
from training.layouts.stages.cut import record_of
from training.layouts.stages.stand_ins import StageEnd, UnexpectedArrival
from training.tasks.text.packing import unpacked

_HIDDEN = Work("forward", 0)
_ENCODED, _CACHE = "encoder_outputs", "past_key_values"
_MAX_BYTES = 1 << 32
"""Largest tensor of a request that is received."""
Element = Literal["float32", "bfloat16", "float16", "float64", "int64", "int32", "bool"]


class StageCall(BaseModel):
    """What the leader asks of a stage; the bytes of the tensors follow."""

    call: Literal["encode", "forward", "end"]
    numbers: dict[str, bool | int | float] = {}
    """Arguments of the forward that are no tensors."""
    tensors: dict[str, tuple[Element, tuple[NonNegativeInt, ...]]] = {}
    """Element type and shape of each argument that is one."""
    reads_encoder: bool = False
    """Whether the forward takes the encoder's output, the newest one if it is not among the tensors."""
    cache: Literal["none", "new", "grows"] = "none"
    """Whether the forward goes on after one that came before."""


@contextmanager
def leading(model: nn.Module, carrier: Carrier, precision: Precision) -> Iterator[None]:
    """Let the last stage's ``model`` give what the whole one would, while all other stages :func:`follow`.

    Forwards take named arguments: tensors, numbers, a cache and, of an encoder-decoder, ``encoder_outputs``. The model
    of an encoder-decoder has a method ``encode``, which takes features and returns the encoder's output.

    Raises:
        ExchangeError: a device is lost. After an error the other stages are still following.
    """
    stage = _Stage(model, carrier, precision)
    base, names = stage.base, ("forward", "encode", "generate")
    attributes = {name: vars(base)[name] for name in names if name in vars(base)}
    base.forward = functools.wraps(base.forward)(functools.partial(stage.lead_forward))  # whose signature is looked at
    if stage.encoder_stages:
        base.encode = stage.lead_encode
    if new_cache(base.config) is None:
        base.generate = functools.partial(base.generate, use_cache=False)
    try:
        yield
    finally:
        for name in names:
            vars(base).pop(name, None)
        vars(base).update(attributes)
    stage.ask(range(stage.last), StageCall(call="end"), {})


@torch.no_grad()
def follow(model: nn.Module, carrier: Carrier, precision: Precision) -> None:
    """Compute what the leader asks of this stage, until it ends.

    Raises:
        ExchangeError: a device is lost.
        RunFailed: a device sent something else than what belongs there.
    """
    stage = _Stage(model, carrier, precision)
    with evaluating(model), precision.autocast(), unpacked():
        while stage.serve():
            pass


class _Stage:
    """One stage's part in the calls of the leader."""

    def __init__(self, model: nn.Module, carrier: Carrier, precision: Precision) -> None:
        module, self._record = record_of(model)
        self.base: Any = module
        self._forward, self._encode = module.forward, getattr(module, "encode", None)
        self._carrier, self._device = carrier, precision.device
        cut, encoder_blocks = self._record.cut, self._record.anatomy.encoder_blocks
        self._number, self.last = cut.stage, cut.stages - 1
        self.encoder_stages = range(cut.stage_of(encoder_blocks - 1) + 1) if encoder_blocks else range(0)
        self._decoder_stages = range(cut.stage_of(encoder_blocks), cut.stages)
        self._encoded: torch.Tensor | None = None
        """The encoder's newest output."""
        self._cache: Any = None

    # ------------------------------------------------------------------------------------------------------ the leader

    def lead_forward(self, **inputs: Any) -> Any:
        """Return the output of the whole model."""
        encoded, self._cache = inputs.pop(_ENCODED, None), inputs.pop(_CACHE, None)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in inputs.items() if name not in tensors and value is not None}
        if encoded is not None and encoded[0] is not self._encoded:
            tensors[_ENCODED] = self._encoded = encoded[0]
        length = self._cache.get_seq_length() if self._cache is not None else None
        request = StageCall(
            call="forward",
            numbers=numbers,
            reads_encoder=encoded is not None,
            cache="none" if length is None else "grows" if length else "new",
        )
        self.ask(self._decoder_stages[:-1], request, tensors)
        return self._compute_forward(request, {**inputs, _ENCODED: encoded})

    def lead_encode(self, features: torch.Tensor) -> torch.Tensor:
        """Return the encoder's output for features [batch, mels, frames]."""
        self.ask(range(self.last), StageCall(call="encode"), {"features": features})
        self._compute_encoder(features)
        assert self._encoded is not None
        return self._encoded

    def ask(self, stages: Sequence[int], request: StageCall, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send a request to some stages."""
        shapes = {name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()}
        head = StageCall.model_validate({**request.model_dump(), "tensors": shapes}).model_dump_json().encode()
        data = [as_bytes(tensor.detach().cpu()) for tensor in tensors.values()]
        for stage in stages:
            sends = send_payload(self._carrier, stage, head) + [self._carrier.send(stage, each) for each in data]
            for send in sends:
                send.wait()

    # --------------------------------------------------------------------------------------------------- the followers

    def serve(self) -> bool:
        """Compute the next request; return whether it was none to end."""
        request, tensors = self._next_request()
        if request.call == "encode":
            self._compute_encoder(tensors["features"])
        elif request.call == "forward":
            if request.cache == "new":
                self._cache = new_cache(self.base.config)
            elif request.cache == "none":
                self._cache = None
            self._encoded = tensors.pop(_ENCODED, self._encoded)
            encoded = (self._encoded,) if request.reads_encoder else None
            self._compute_forward(request, {**request.numbers, **tensors, _ENCODED: encoded})
        return request.call != "end"

    def _next_request(self) -> tuple[StageCall, dict[str, torch.Tensor]]:
        carrier, tensors = self._carrier, {}
        try:
            request = StageCall.model_validate_json(receive_payload(carrier, self.last))
        except ValidationError as error:
            raise carrier.refused(self.last, str(error).splitlines()[0], "a request") from error
        for name, (element, shape) in request.tensors.items():
            dtype: torch.dtype = getattr(torch, element)
            if (size := math.prod(shape) * dtype.itemsize) > _MAX_BYTES:
                raise carrier.refused(self.last, f"a tensor of {size} bytes", f"at most {_MAX_BYTES}")
            tensors[name] = carrier.receive(self.last, size).view(dtype).view(shape).to(self._device)
        return request, tensors

    # ------------------------------------------------------------------------------------------------------- all stages

    def _compute_encoder(self, features: torch.Tensor) -> None:
        """Compute this stage's part of the encoder, and hand the output to all stages of the decoder."""
        home = self.encoder_stages[-1]
        if self._number in self.encoder_stages:
            assert self._encode is not None
            hidden = self._passed(functools.partial(self._encode, features), arrives=self._number > 0)
            others = [stage for stage in self._decoder_stages if stage != home]
            for stage in others if self._number == home else [self._number + 1]:
                self._send(stage, hidden)
            self._encoded = hidden if self._number == home else None
        else:
            self._encoded = self._receive(home)

    def _compute_forward(self, request: StageCall, inputs: dict[str, Any]) -> Any:
        """Compute this stage's part of a forward; the leader returns its output."""
        layers = _layers(self._cache)
        lengths = [layer.get_seq_length() for layer in layers]
        if not self._record.anatomy.encoder_blocks:
            inputs.pop(_ENCODED)
        if self._cache is not None:
            inputs[_CACHE] = self._cache
        output = self._passed(
            functools.partial(self._forward, **inputs), arrives=self._number > self._decoder_stages[0]
        )
        _grow_others(layers, lengths, output)
        if self._number < self.last:
            self._send(self._number + 1, output)
        return output

    def _passed(self, call: Callable[[], Any], arrives: bool) -> Any:
        """Return what leaves this stage, or what a call returns that ends in it."""
        crossing, arrived = self._record.crossing, self._receive(self._number - 1) if arrives else None
        with crossing.under_way(self._device, None):
            crossing.hidden = arrived
            try:
                return call()
            except StageEnd as end:
                return end.tensors[0]
            except UnexpectedArrival as error:
                shapes = (", ".join(map(str, side)) for side in (error.arrived, error.expected))
                raise self._carrier.refused(self._number - 1, *shapes) from error

    def _send(self, stage: int, tensor: torch.Tensor) -> None:
        header = TensorHeader.of(tensor, None)  # exact, so that the texts are those of one process
        for data in (pack_header(_HIDDEN, [header]), header.encode(tensor)):
            self._carrier.send(stage, data).wait()

    def _receive(self, stage: int) -> torch.Tensor:
        try:
            (header,) = parse_header(self._carrier.receive(stage, HEADER_BYTES), _HIDDEN)
        except ValueError as error:
            raise self._carrier.refused(stage, str(error), "a hidden state") from error
        return header.decode(self._carrier.receive(stage, header.size), self._device)


def new_cache(config: Any) -> Any:
    """Return an empty cache of keys and values; ``None`` for a model that keeps other things of earlier tokens."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache  # takes a second

    caches = [DynamicCache(config=config.get_text_config(decoder=True)) for _ in range(2)]
    if any(caches[0].is_linear) or any(caches[0].is_dummy):
        return None
    return EncoderDecoderCache(*caches) if config.is_encoder_decoder else caches[0]


def _layers(cache: Any) -> Sequence[Any]:
    return [] if cache is None else getattr(cache, "self_attention_cache", cache).layers


def _grow_others(layers: Sequence[Any], lengths: Sequence[int], like: Any) -> None:
    """Let the entries of other stages' blocks grow as those of this stage's have.

    A model asks the first block's for positions and masks. They hold one number a token.
    """
    added = max((layer.get_seq_length() - length for layer, length in zip(layers, lengths)), default=0)
    batch = len(like if isinstance(like, torch.Tensor) else like.logits)
    for layer, length in zip(layers, lengths):
        if added and layer.get_seq_length() == length:
            layer.update(*[torch.zeros(batch, 1, added, 1)] * 2)
