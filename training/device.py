"""Device, precision and mode of a model's computations, and what happens where memory runs out."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from profiles.errors import BadInput, RunFailed
from profiles.options import less_memory
from training.device_probe import bf16_gains

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory")
"""What back ends without an error class of their own say (MPS, the CPU's allocator)."""


def select_device(wanted: str, index: int = 0) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``mps``.

    Raises:
        BadInput: the device that was asked for is not here.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, there in available.items() if there)
    if not available.get(wanted, False):
        there = ", ".join(name for name, present in available.items() if present)
        raise BadInput(f"device '{wanted}' is not available here", f"this machine has: {there}; set device = auto")
    return torch.device(wanted, index) if wanted == "cuda" else torch.device(wanted)


def cpu_multiplies_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def select_precision(
    wanted: str,
    device: torch.device,
    on_cpu: bool = False,
    cpu_has_it: Callable[[], bool] = cpu_multiplies_bf16,
    gains: Callable[[str], bool] = bf16_gains,
) -> torch.dtype | None:
    """Return the autocast type, or ``None`` for full fp32.

    ``auto`` is bf16 on a CUDA device that has it in hardware, and on a CPU that has if it was measured to pay for the
    task, and on MPS where some steps of a small model are faster so; else off: on CPUs without bf16 units it is slower.

    Args:
        on_cpu: whether bf16 pays on a CPU that has it in hardware: :attr:`training.tasks.base.Task.bf16_pays`.
        cpu_has_it: whether this machine's processor has bf16 in hardware.
        gains: whether bf16 is faster on a kind of device, as measured: on MPS that depends on chip and system.
    """
    if wanted == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        has_bf16 = has_bf16 or (device.type == "cpu" and on_cpu and cpu_has_it())
        has_bf16 = has_bf16 or (device.type == "mps" and gains("mps"))
        return torch.bfloat16 if has_bf16 else None
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


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
        """What the steps are computed in: ``float32`` without mixed precision."""
        return str(self.dtype or torch.float32).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by; ``None`` without loss scaling."""
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else None

    def clip(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        max_norm: float,
        whole: float | None = None,
    ) -> torch.Tensor | None:
        """Unscale and clip; return the gradient norm before, which the device may still compute (``None`` if clipping
        is off).

        Args:
            whole: norm of the whole gradient without its scale, where others hold some of it.
        """
        if _has_gradient(parameters):
            self.scaler.unscale_(optimizer)
        elif max_norm > 0:
            return torch.tensor(whole or 0.0, dtype=torch.float64)
        if max_norm > 0 and whole is not None:
            _scale_down(parameters, max_norm, whole)
            return torch.tensor(whole, dtype=torch.float64)
        return clip(parameters, max_norm)

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Step with gradients that went through :meth:`clip`; without any, as where a member has no sample, nothing is
        done."""
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
    return nn.utils.clip_grad_norm_(parameters, max_norm) if max_norm > 0 else None


def gradient_norm(parameters: list[nn.Parameter], loss_scale: float | None) -> torch.Tensor:
    """Return the norm of gradients without their loss scale."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    return norm if loss_scale is None else norm / loss_scale


def read(scalar: torch.Tensor, *others: torch.Tensor | None) -> tuple[float, list[float | None]]:
    """Return numbers that a device may still compute, as they are; the host waits for it once."""
    queued = [one.detach() for one in (scalar, *others) if one is not None and one.device.type != "cpu"]
    numbers = iter(_read(queued) if queued else [])
    first, *rest = (
        None if one is None else float(one.detach()) if one.device.type == "cpu" else next(numbers)
        for one in (scalar, *others)
    )
    assert first is not None
    return first, rest


def _read(queued: list[torch.Tensor]) -> list[float]:
    dtype = functools.reduce(torch.promote_types, [scalar.dtype for scalar in queued])
    found: list[float] = torch.stack([scalar.to(queued[0].device, dtype) for scalar in queued]).tolist()
    return found


def start_training(model: nn.Module) -> None:
    """Put a freshly built model into training mode, but what its author has put into evaluation mode.

    A batch norm whose statistics are to stay, or a frozen part without dropout, is left as it is. A model that is in
    evaluation mode as a whole was not put there part by part: ``from_pretrained`` returns it so. That holds as well for
    such a model inside of another one, if it has weights to train.
    """
    kept = _kept(model) if model.training else []
    model.train()
    for module in kept:
        module.training = False


def _kept(model: nn.Module) -> list[nn.Module]:
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
    """Put a model into evaluation mode, and afterwards every module back into the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def move(value: Any, device: torch.device) -> Any:
    """Move what can be moved in ``value`` to ``device``: tensors, whatever has ``.to()``, and these in containers."""

    def moved(one: Any) -> Any:
        return one.to(device, non_blocking=True) if isinstance(one, torch.Tensor) else one.to(device)

    return _changed(value, moved)


def pin(value: Any) -> Any:
    """Return ``value`` with its tensors, those in containers too, in memory from which a device copies by itself.

    What has a ``.to()`` of its own stays as it is if it has no ``.pin_memory()``, and so does all if none is left.
    """

    def pinned(one: Any) -> Any:
        is_elsewhere = isinstance(one, torch.Tensor) and one.device.type != "cpu"
        try:
            return one.pin_memory() if callable(getattr(one, "pin_memory", None)) and not is_elsewhere else one
        except RuntimeError:
            return one

    return _changed(value, pinned)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with everything changed in it that can move to a device."""
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_changed(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _changed(getattr(value, name), change) for name in names})
    return value


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device, or of the machine, does not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def does_not_fit(error: Exception, device: torch.device, task: str) -> RunFailed:
    """Return the error to raise where even a single sample does not fit."""
    said = " ".join(str(error).split())[:200]
    return RunFailed(
        f"one sample alone does not fit into the memory ({device.type}): {said}",
        ", ".join([*(f"set {way}" for way in less_memory(task)), "use smaller samples", "or take a smaller model"]),
    )


def give_back(device: torch.device) -> None:
    """Free memory that nothing refers to any more, on ``device`` too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
