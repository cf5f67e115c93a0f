"""Device, precision and mode of a model's computations, and the handling of out-of-memory errors."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from profiles.errors import BadInput, RunFailed
from profiles.options import memory_saving_settings
from training.hardware.device_probe import bf16_gains

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory")
"""Messages of back ends without an error class of their own (MPS, the CPU's allocator)."""
_SUMMED_AT_ONCE = 1 << 16
"""Squares that a CPU adds up one after another for a norm; the error is 2e-7 then."""


def select_device(setting: str, index: int = 0) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``mps``.

    Raises:
        BadInput: the device that was asked for is not here.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if setting == "auto":
        setting = next(name for name, is_present in available.items() if is_present)
    if not available.get(setting, False):
        available_names = ", ".join(name for name, is_present in available.items() if is_present)
        raise BadInput(
            f"device '{setting}' is not available here", f"this machine has: {available_names}; set device = auto"
        )
    return torch.device(setting, index) if setting == "cuda" else torch.device(setting)


def cpu_multiplies_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def select_precision(
    setting: str,
    device: torch.device,
    on_cpu: bool = False,
    cpu_has_it: Callable[[], bool] = cpu_multiplies_bf16,
    gains: Callable[[str], bool] = bf16_gains,
) -> torch.dtype | None:
    """Return the autocast type, or ``None`` for full fp32.

    ``auto`` is bf16 on a CUDA device that has it in hardware, on a CPU that has it if it was measured to be faster for
    the task, and on MPS if steps of a small model are faster with it; else off: CPUs without bf16 units are slower.

    Args:
        on_cpu: whether bf16 pays on a CPU that has it in hardware: :attr:`training.tasks.base.Task.bf16_is_faster`.
        cpu_has_it: whether this machine's processor has bf16 in hardware.
        gains: whether bf16 is faster on a kind of device, as measured: on MPS that depends on chip and system.
    """
    if setting == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        has_bf16 = has_bf16 or (device.type == "cpu" and on_cpu and cpu_has_it())
        has_bf16 = has_bf16 or (device.type == "mps" and gains("mps"))
        return torch.bfloat16 if has_bf16 else None
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[setting]


class Precision:
    """Autocast, and loss scaling where fp16 needs it (Micikevicius et al. 2018, section 3.2)."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        # It makes its scale with the first loss, and a member may have none before its first gradients come.
        self.scaler.scale(torch.zeros((), device=device))

    @property
    def name(self) -> str:
        """Type that the steps are computed in: ``float32`` without mixed precision."""
        return str(self.dtype or torch.float32).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def loss_scale(self) -> float | None:
        """Factor of the loss; ``None`` without loss scaling."""
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else None

    def clip(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        max_norm: float,
        global_norm: float | None = None,
    ) -> torch.Tensor | None:
        """Unscale and clip; return the gradient norm before clipping, which the device may still be computing (``None``
        if clipping is off).

        Args:
            whole: norm of the whole gradient without its scale, where other members hold part of it.
        """
        if _has_gradient(parameters):
            self.scaler.unscale_(optimizer)
        elif max_norm > 0:
            return torch.tensor(global_norm or 0.0, dtype=torch.float64)
        if max_norm > 0 and global_norm is not None:
            _scale_down(parameters, max_norm, global_norm)
            return torch.tensor(global_norm, dtype=torch.float64)
        return clip(parameters, max_norm)

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Step with gradients that went through :meth:`clip`; without gradients, as where a member has no sample, do
        nothing."""
        if _has_gradient(parameters):
            self.scaler.step(optimizer)
            self.scaler.update()


def _has_gradient(parameters: list[nn.Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


def _scale_down(parameters: list[nn.Parameter], max_norm: float, norm: float) -> None:
    """Clip by a norm that the host knows, as :func:`torch.nn.utils.clip_grads_with_norm_` does, but copy nothing."""
    share = float(torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0))
    torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], share)


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor | None:
    """Scale gradients down to ``max_norm``; return their norm before (``None`` if clipping is off)."""
    if max_norm <= 0:
        return None
    norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all elements of some gradients, as a tensor without dimensions.

    A CPU adds up the squares of a tensor in 32 bits one after another, so for 4 million of them it is off by 1e-4, and
    how much depends on how a layout divides the tensor: large ones are taken in pieces.
    """
    return nn.utils.get_total_norm([piece for gradient in gradients for piece in _pieces(gradient)])


def _pieces(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if gradient.device.type != "cpu" or gradient.layout != torch.strided or gradient.numel() <= _SUMMED_AT_ONCE:
        return (gradient,)
    return gradient.chunk(-(-gradient.numel() // _SUMMED_AT_ONCE))


def gradient_norm(parameters: list[nn.Parameter], loss_scale: float | None) -> torch.Tensor:
    """Return the norm of gradients without their loss scale."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients)
    return norm if loss_scale is None else norm / loss_scale


def read(scalar: torch.Tensor, *others: torch.Tensor | None) -> tuple[float, list[float | None]]:
    """Return the values of scalars that a device may still be computing; the host waits for it only once."""
    queued = [value.detach() for value in (scalar, *others) if value is not None and value.device.type != "cpu"]
    numbers = iter(_read(queued) if queued else [])
    number, *other_numbers = (
        None if value is None else float(value.detach()) if value.device.type == "cpu" else next(numbers)
        for value in (scalar, *others)
    )
    assert number is not None
    return number, other_numbers


def _read(queued: list[torch.Tensor]) -> list[float]:
    dtype = functools.reduce(torch.promote_types, [scalar.dtype for scalar in queued])
    numbers: list[float] = torch.stack([scalar.to(queued[0].device, dtype) for scalar in queued]).tolist()
    return numbers


def start_training(model: nn.Module) -> None:
    """Put a freshly built model into training mode, except modules that its author has put into evaluation mode.

    A batch norm whose statistics are to stay, or a frozen part without dropout, is left as it is. A model that is in
    evaluation mode as a whole is not meant to stay there: ``from_pretrained`` returns it so. The same holds for such a
    model inside another one, if it has weights to train.
    """
    evaluation_modules = _evaluation_modules(model) if model.training else []
    model.train()
    for module in evaluation_modules:
        module.training = False


def _evaluation_modules(model: nn.Module) -> list[nn.Module]:
    as_loaded = {
        inner
        for module in model.modules()
        if not module.training and hasattr(module, "from_pretrained")
        if any(parameter.requires_grad for parameter in module.parameters())
        for inner in module.modules()
    }
    return [module for module in model.modules() if not module.training and module not in as_loaded]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and afterwards every module back into its former mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def move(value: Any, device: torch.device) -> Any:
    """Move ``value`` to ``device``: tensors, objects with ``.to()``, and containers of these."""

    def moved(item: Any) -> Any:
        return item.to(device, non_blocking=True) if isinstance(item, torch.Tensor) else item.to(device)

    return _changed(value, moved)


def pin(value: Any) -> Any:
    """Return ``value`` with its tensors, also those in containers, in pinned memory.

    Objects with ``.to()`` but without ``.pin_memory()`` stay as they are, and so does everything if no pinned memory is
    left.
    """

    def pinned(item: Any) -> Any:
        is_elsewhere = isinstance(item, torch.Tensor) and item.device.type != "cpu"
        try:
            return item.pin_memory() if callable(getattr(item, "pin_memory", None)) and not is_elsewhere else item
        except RuntimeError:
            return item

    return _changed(value, pinned)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with everything changed in it that can move to a device."""
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _changed(getattr(value, name), change) for name in names})
    return value


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or the machine is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def sample_too_large(error: Exception, device: torch.device, task: str) -> RunFailed:
    """Return the error for a single sample that does not fit into memory."""
    reason = " ".join(str(error).split())[:200]
    return RunFailed(
        f"one sample alone does not fit into the memory ({device.type}): {reason}",
        ", ".join(
            [
                *(f"set {change}" for change in memory_saving_settings(task)),
                "use smaller samples",
                "or take a smaller model",
            ]
        ),
    )


def release_memory(device: torch.device) -> None:
    """Free unreferenced memory, also on ``device``."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
