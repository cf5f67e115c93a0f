"""A device without hardware that counts what a GPU would be asked for: launches, waits of the host, and copies.

Its tensors say that they are on ``gpu:0``; the work is done on the CPU. What the host must wait for, what is copied and
what is launched is noted with the line of Muster's code that asked for it. It works as CUDA does:

- ``.item()``, a copy to the host without ``non_blocking`` and any copy from or to memory that is not pinned make the
  host wait; so does :meth:`Event.synchronize`;
- what is copied to pinned memory without a wait arrives there when the host has waited for an event after it;
- what is copied from pinned memory without a wait may change after that; what one stream has written, another one may
  use after it has waited for it: else ``counts.races`` names the line.

To be used in a process of its own: the device stays, and ``torch.empty(pin_memory=True)`` pins from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _foreach_utils, backend_registration

from tests.counting.operators import look_up_operators
from tests.counting.streams import Event, Stream, counts, current_stream, in_stream, place_of_caller

_written: dict[int, tuple[Stream, int]] = {}
"""By memory: which stream wrote it last, and when."""
_SHAPES = ("nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")
"""Operations whose result has a shape, or a value, that the host must know."""


class _Module:
    """``torch.gpu``, as far as Muster and torch ask for it."""

    Stream, Event = Stream, Event
    current_stream, stream = staticmethod(current_stream), staticmethod(in_stream)
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    mem_get_info = staticmethod(lambda device=None: (counts.free, counts.free))
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = _lazy_init = staticmethod(lambda *_: None)
    get_rng_state = staticmethod(lambda *_: torch.empty(0, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


# -------------------------------------------------------------------------------------------------------- its tensors


class Tensor(torch.Tensor):
    """A tensor of the device; ``raw`` is where its values are."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Tensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )
        made.raw = raw.detach()
        memory = raw.untyped_storage()
        counts.hold(memory.data_ptr(), memory.nbytes())
        weakref.finalize(made, counts.release, memory.data_ptr()).atexit = False
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Tensor({self.raw})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), dict(kwargs or {})
        if name == "_local_scalar_dense":
            _blocks()
            return func(_raw(args[0]))
        if name == "copy_":
            return _copied(*args, **kwargs)
        if name == "_to_copy" and _is_cpu(kwargs.get("device", DEVICE)):
            target = torch.empty_like(args[0].raw, dtype=kwargs.get("dtype"), memory_format=torch.preserve_format)
            return _copied(target, args[0])
        if name in _SHAPES:
            _blocks()
        return _launched(func, name, args, kwargs)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Tensor) else value


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _memory(raw: torch.Tensor) -> int:
    return raw.untyped_storage().data_ptr()


def _blocks() -> None:
    """The host waits for the stream."""
    counts.note("waits")
    current_stream().arrive()


def _launched(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    stays = not _is_cpu(kwargs.get("device"))
    if kwargs.get("device") is not None:
        kwargs["device"] = "cpu"
    plain_args, plain_kwargs = tree_map(_raw, (args, kwargs))
    found = func(*plain_args, **plain_kwargs)
    given = [one for one in tree_flat((args, kwargs)) if isinstance(one, Tensor)]
    arguments = func._schema.arguments
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in arguments)
    if not is_view and name not in ("detach", "alias"):
        named = dict(zip((one.name for one in arguments), args)) | kwargs
        changed = [named.get(one.name) for one in arguments if one.alias_info is not None]
        _ran([one.raw for one in given], [_raw(one) for one in tree_flat([changed, found])])

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Tensor) or not stays:
            return value
        same = [one for one in given if one.raw is value]
        return same[0] if same else Tensor(value)

    return tree_map(wrapped, found)


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return arguments or results with each leaf changed; torch's own function takes longer than the operations."""
    if type(tree) in (tuple, list):
        return type(tree)([tree_map(change, branch) for branch in tree])
    if type(tree) is dict:
        return {name: tree_map(change, branch) for name, branch in tree.items()}
    return change(tree)


def tree_flat(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def _ran(read: list[Any], written: list[Any]) -> None:
    """Note a launch: it reads what its stream must know of, and writes."""
    counts.note("launches")
    _uses(read)
    _writes(written)


def _uses(read: list[torch.Tensor]) -> None:
    stream = current_stream()
    for raw in read:
        writer, moment = _written.get(_memory(raw), (stream, 0))
        if writer is not stream and stream.seen.get(writer, 0) < moment:
            counts.note("races")


def _writes(written: list[Any]) -> None:
    stream = current_stream()
    moment = stream.wrote()
    for raw in written:
        if isinstance(raw, torch.Tensor) and raw.numel():
            _written[_memory(raw)] = (stream, moment)


def _copied(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy on the device, to it, or to the host."""
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        _ran([source.raw], [target.raw])
        target.raw.copy_(source.raw)
        return target
    host, to_host = (source, False) if isinstance(target, Tensor) else (target, True)
    size, is_pinned = host.numel() * host.element_size(), _is_pinned(host)
    counts.note("to_host" if to_host else "to_device", size)
    if not is_pinned and size:
        counts.note("pageable", size)
    if not to_host:
        target.raw.copy_(source)
        if is_pinned and non_blocking:
            _writes([target.raw])
            sent, place = source.clone(), place_of_caller()
            current_stream().copy(lambda: torch.equal(source, sent) or counts.note("races", place=place))
        else:
            _blocks()
            _written.pop(_memory(target.raw), None)  # it is there, for whatever stream
        return target
    _uses([source.raw])
    stream, values = current_stream(), source.raw.clone()
    if is_pinned and non_blocking:
        host.numel() and host.fill_(-77)  # what is not there yet
        stream.copy(lambda: host.copy_(values))
    else:
        _blocks()
        host.copy_(values)
    return host


# ----------------------------------------------------------------------------------------------------- pinned memory

_pinned: dict[int, torch.Tensor] = {}
"""By address; they are held, so that no other memory gets their addresses."""
_empty = torch.empty


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    _pinned[_memory(tensor)] = tensor
    return tensor


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return not isinstance(tensor, Tensor) and _memory(tensor) in _pinned


def _empty_or_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    made = _empty(*size, **options)
    return _pin(made) if pin_memory else made


# --------------------------------------------------------------------------------------------------------- the device


def _made(make: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    def on_device(*size: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> Tensor:
        made = Tensor(make(*size, dtype=dtype or torch.get_default_dtype()))
        _written.pop(_memory(made.raw), None)  # whoever had this memory before
        return made

    return on_device


def _register() -> torch.device:
    backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=_Module())
    _library.impl("empty.memory_format", _made(_empty), "PrivateUse1")
    _library.impl("empty_strided", _made(torch.empty_strided), "PrivateUse1")
    _library.impl("_copy_from", lambda source, target, non_blocking=False: _copied(target, source, non_blocking),
                  "PrivateUse1")  # fmt: skip
    look_up_operators()
    _foreach_utils._foreach_supported_types.append(Tensor)
    torch.empty = _empty_or_pinned  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, device=None: _pin(self.clone())  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = _is_pinned  # type: ignore[method-assign,assignment]
    return torch.device("gpu", 0)


_library = torch.library.Library("aten", "IMPL")
DEVICE = _register()
