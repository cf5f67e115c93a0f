"""Device, precision and mode of a model's computations, and what happens where memory runs out."""

from __future__ import annotations

import dataclasses
import gc
import math
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

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        max_norm: float,
        whole: float | None = None,
    ) -> float | None:
        """Unscale, clip, step; return the gradient norm before clipping (``None`` if clipping is off).

        Without any gradient, as where a member has no sample in a step, nothing is done.

        Args:
            whole: norm of the whole gradient without its scale, where others hold some of it.
        """
        if all(parameter.grad is None for parameter in parameters):
            return whole or 0.0 if max_norm > 0 else None
        self.scaler.unscale_(optimizer)
        if max_norm > 0 and whole is not None:
            norm: float | None = whole
            nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(whole))
        else:
            norm = clip(parameters, max_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm


def clip(parameters: list[nn.Parameter], max_norm: float) -> float | None:
    """Scale gradients down to ``max_norm``; return their norm before (``None`` if clipping is off)."""
    return float(nn.utils.clip_grad_norm_(parameters, max_norm)) if max_norm > 0 else None


def gradient_norm(parameters: list[nn.Parameter], loss_scale: float | None) -> float | None:
    """Return the norm of gradients without their loss scale; ``None`` where it is not finite."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients)) / (loss_scale or 1.0) if gradients else 0.0
    return norm if math.isfinite(norm) else None


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
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [move(item, device) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: move(getattr(value, name), device) for name in names})
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
