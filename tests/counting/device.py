"""A device without hardware that counts what a GPU would be asked for: launches, waits of the host, and copies.

Its tensors say that they are on ``gpu:0``; the work is done on the CPU. What the host must wait for, what is copied and
what is launched is noted with the line of Muster's code that asked for it. It works as CUDA does:

- ``.item()``, a copy to the host without ``non_blocking`` and any copy from or to memory that is not pinned make the
  host wait; so does :meth:`Event.synchronize`;
- what is copied to pinned memory without a wait arrives there when the host has waited for an event after it;
- what one stream has written, another one may use after it has waited for it: else :attr:`Counts.races` names the line.

To be used in a process of its own: the device stays, and ``torch.empty(pin_memory=True)`` pins from then on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _foreach_utils, backend_registration
from torch.utils._pytree import tree_map

_ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{_ROOT / room}/" for room in ("training", "tests/counting"))
_SHAPES = ("nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")
"""Operations whose result has a shape, or a value, that the host must know."""


class Counts:
    """What was asked of the device since :meth:`begin`, by place: a file of Muster and its line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = False
        self.begin(counting=False)

    def begin(self, counting: bool = True) -> None:
        self.waits: Counter[str] = Counter()
        self.waits_beside: Counter[str] = Counter()
        """Those of threads of a side queue, which hold nobody up."""
        self.launches: Counter[str] = Counter()
        self.pageable: Counter[str] = Counter()
        """Bytes copied from or to memory that is not pinned."""
        self.to_host: Counter[str] = Counter()
        """Bytes, pinned or not."""
        self.to_device: Counter[str] = Counter()
        self.races: Counter[str] = Counter()
        self._counting = counting

    def end(self) -> None:
        self._counting = False

    def note(self, kind: str, amount: int = 1) -> None:
        if kind == "waits" and threading.current_thread().name.startswith("side queue"):
            kind = "waits_beside"
        if self._counting:
            with self._lock:
                getattr(self, kind)[_place()] += amount

    def report(self) -> dict[str, dict[str, int]]:
        kinds = ("waits", "waits_beside", "launches", "pageable", "to_host", "to_device", "races")
        return {kind: dict(getattr(self, kind).most_common()) for kind in kinds}


counts = Counts()


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS) and name != __file__:
            return f"{Path(name).relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"


# ------------------------------------------------------------------------------------------------- streams and events


class Stream:
    """A queue of the device: what it has done, what it knows of other streams, and copies that are under way."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.done = 0
        self.seen: dict[Stream, int] = {}
        self.copies: list[Callable[[], None]] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, done in event.seen.items():
            self.seen[stream] = max(done, self.seen.get(stream, 0))
        self.copies += event.copies

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        counts.note("waits")
        self.arrive()

    def arrive(self) -> None:
        """Let all that it copies be there."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy()


class Event:
    """A moment of a stream."""

    def __init__(self, **_: Any) -> None:
        self.seen: dict[Stream, int] = {}
        self.copies: list[Callable[[], None]] = []

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.seen, self.copies = {**stream.seen, stream: stream.done}, list(stream.copies)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        counts.note("waits")
        for copy in self.copies:
            copy()


_default, _local = Stream(), threading.local()
_written: dict[int, tuple[Stream, int]] = {}
"""By memory: which stream wrote it last, and when."""


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", _default)


@contextlib.contextmanager
def in_stream(stream: Stream) -> Iterator[None]:
    before, _local.stream = current_stream(), stream
    try:
        yield
    finally:
        _local.stream = before


class _Module:
    """``torch.gpu``, as far as Muster and torch ask for it."""

    Stream, Event = Stream, Event
    current_stream, stream = staticmethod(current_stream), staticmethod(in_stream)
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
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
    stream.done += 1
    for raw in written:
        if isinstance(raw, torch.Tensor) and raw.numel():
            _written[_memory(raw)] = (stream, stream.done)


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
        else:
            _blocks()
            _written.pop(_memory(target.raw), None)  # it is there, for whatever stream
        return target
    _uses([source.raw])
    stream, values = current_stream(), source.raw.clone()
    if is_pinned and non_blocking:
        host.numel() and host.fill_(-77)  # what is not there yet
        stream.copies.append(_Once(lambda: host.copy_(values)))
    else:
        _blocks()
        host.copy_(values)
    return host


class _Once:
    """Does something the first time that it is called; whoever calls it finds it done."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._action is not None:
                self._action()
            self._action = None


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
    _foreach_utils._foreach_supported_types.append(Tensor)
    torch.empty = _empty_or_pinned  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, device=None: _pin(self.clone())  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = _is_pinned  # type: ignore[method-assign,assignment]
    return torch.device("gpu", 0)


_library = torch.library.Library("aten", "IMPL")
DEVICE = _register()
