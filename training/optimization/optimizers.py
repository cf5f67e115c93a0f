"""Optimizers by name, or made by a function of the user's own.

``adamw``: Loshchilov & Hutter 2019 (arXiv 1711.05101). ``sgd``: with momentum; its weight decay is added to the
gradient. ``adafactor``: Shazeer & Stern 2018 (arXiv 1804.04235); its learning rate is relative to the size of the
weights. ``muon``: Jordan et al. 2024 (kellerjordan.github.io/posts/muon): the momentum of every hidden matrix is made
orthogonal; embeddings, the output layer, vectors and convolutions go to AdamW beside it. Its updates are scaled by
``0.2 sqrt(max(rows, columns))``, to the root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2),
so learning rate and weight decay that suit AdamW suit both.

The learning rate of a run is that of all groups of weights; a function of the user's own may give groups others, and
they keep their relation to ``learning_rate`` on its course.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from profiles.errors import BadInput
from profiles.optimisation import TrainingSettings
from training.lazy import lazy, nn, torch
from training.numerics.schedule import RATE_SHARE

if TYPE_CHECKING:
    from training.optimization import optimizer_pair
    from training.tasks import user_code
else:
    optimizer_pair, user_code = lazy("training.optimization.optimizer_pair"), lazy("training.tasks.user_code")

_FP32 = 4
FUSED_ON = {"cpu", "cuda", "mps"}
"""Devices for which torch has AdamW as one operation: of a hundred weights on MPS, 4 launches instead of 700."""


def state_bytes(settings: TrainingSettings, trainable: int, hidden: int = 0) -> int:
    """Return the bytes of the optimizer's state, and of the weights' average; a user's own is estimated as AdamW.

    Args:
        trainable: number of trained weights.
        hidden: number of those in hidden matrices, as far as it is known.
    """
    average = _FP32 * trainable if settings.ema else 0
    match settings.optimizer:
        case "sgd":
            return average + (_FP32 * trainable if _momentum(settings) else 0)
        case "muon":
            return average + _FP32 * (2 * trainable - min(hidden, trainable))
        case "adafactor":
            return average + _FP32 * trainable // 100  # a row and a column of every matrix
    return average + 2 * _FP32 * trainable


def build_optimizer(
    model: nn.Module,
    settings: TrainingSettings,
    is_part: bool = False,
    make: Callable[..., Any] | None = None,
    replaced_by: str = "",
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters; biases, norms and other vectors are not decayed.

    Args:
        is_part: whether other devices hold other parts of the model: then there may be none.
        make: the user's, instead of that of the settings: a class of optimizers, or a partial one, which gets the
            learning rate, and the weight decay of matrices, where it leaves them open; a function of two arguments,
            which gets model and settings; or any other function, which gets the list of parameters.
        replaced_by: name of a strategy that is an optimizer itself, see :func:`plain_steps`.

    Raises:
        BadInput: there are none, or none that suit this optimizer; or the user's function returns no optimizer.
    """
    if replaced_by:
        return plain_steps(model, settings, replaced_by, make)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained and is_part:
        return torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=settings.learning_rate)  # torch refuses an empty one
    if not trained:
        raise BadInput("the model has no weights to train: all are frozen (requires_grad = False)", "leave some free")
    rate, groups = settings.learning_rate, _decayed(trained, settings.weight_decay)
    if make is not None:
        return _made_by(make, model, trained, settings)
    match settings.optimizer:
        case "adamw":
            return _adamw(trained, settings)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=_momentum(settings))
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=rate)
        case "muon":
            return _muon(model, trained, settings)
    return _from_user_code(model, settings)


def plain_steps(
    model: nn.Module, settings: TrainingSettings, strategy: str, make: Callable[..., Any] | None = None
) -> torch.optim.Optimizer:
    """Return an optimizer that moves the weights by ``p.grad`` times the learning rate, for a strategy that writes its
    step there.

    Without momentum, a decay that is added to the gradient is decoupled from it: ``(1 - lr lambda) theta - lr grad``.

    Raises:
        BadInput: another optimizer than the usual one is asked for, or there is nothing to train.
    """
    if make is not None or settings.optimizer != TrainingSettings().optimizer:
        name = settings.optimizer if make is None else _name_of(make)
        problem = f"{strategy} is an optimizer itself: optimizer = {name} cannot be used with it"
        raise BadInput(problem, "leave 'optimizer' as it is, or take another strategy")
    return build_optimizer(model, settings.model_copy(update={"optimizer": "sgd", "momentum": 0.0}))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(RATE_SHARE, 1.0)


def _momentum(settings: TrainingSettings) -> float:
    usual = 0.95 if settings.optimizer == "muon" else 0.9
    return usual if settings.momentum < 0 else settings.momentum


def _decayed(parameters: list[nn.Parameter], decay: float) -> list[dict[str, object]]:
    """Return the non-empty ones of the groups with and without decay."""
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(parameters: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.AdamW:
    is_scaled_on_mps = settings.mixed_precision == "fp16" and parameters[0].device.type == "mps"
    # MPS's fused one takes steps whose scaled gradients are infinite. None: torch chooses, but never the fused one.
    fused = (all(map(_is_plain, parameters)) and not is_scaled_on_mps) or None
    groups = _decayed(parameters, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, settings.adam_beta2), fused=fused)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether the fused AdamW, one pass over the memory instead of a dozen, can be used.

    It takes weight, gradient and moments element by element in memory order. Those of a snapshot and of a mean over
    members are contiguous; a weight in another order (``channels_last``) would get the update of another element.
    """
    return parameter.device.type in FUSED_ON and parameter.dtype == torch.float32 and parameter.is_contiguous()


def _muon(model: nn.Module, trained: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    outside = set(_embeddings_and_head(model))
    hidden = [p for p in trained if p.ndim == 2 and p not in outside]
    if not hidden:
        problem = "muon: the model has no hidden matrix, only embeddings, an output layer, vectors or convolutions"
        raise BadInput(problem, "set optimizer = adamw")
    muon = torch.optim.Muon(
        hidden,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=_momentum(settings),
        adjust_lr_fn="match_rms_adamw",
    )
    chosen = set(hidden)
    others = [p for p in trained if p not in chosen]
    return optimizer_pair.OptimizerPair(muon, _adamw(others, settings)) if others else muon


def _embeddings_and_head(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of embeddings, and those of the output layer: the one that the model names
    (``get_output_embeddings``, as transformers do), else its last linear layer."""
    modules = list(model.modules())
    embeddings = [module for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    named = [getattr(module, "get_output_embeddings", lambda: None) for module in modules]
    heads = [head for ask in named if callable(ask) and isinstance(head := ask(), nn.Module)]
    return [p for module in (*embeddings, *(heads or _last_linear(modules))) for p in module.parameters()]


def _last_linear(modules: list[nn.Module]) -> list[nn.Module]:
    linear: list[nn.Module] = [module for module in modules if isinstance(module, nn.Linear)]
    return linear[-1:]


def _from_user_code(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Call ``function(model, training)``, whose second argument holds the options of the section."""
    name = settings.optimizer
    optimizer = user_code.call_factory(user_code.find_factory(name, "optimizer"), name, model, settings)
    return _checked(optimizer, name, model, settings)


def _made_by(
    make: Callable[..., Any], model: nn.Module, trained: list[nn.Parameter], settings: TrainingSettings
) -> torch.optim.Optimizer:
    parameters = inspect.signature(make).parameters
    required = [
        one for one in parameters.values() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    arguments: tuple[Any, ...] = (trained,)
    given = make.keywords if isinstance(make, functools.partial) else {}
    if isinstance(getattr(make, "func", make), type):  # a class, or a partial one
        decay = given.get("weight_decay", settings.weight_decay)
        arguments = (_decayed(trained, decay),) if "weight_decay" in parameters else arguments
        options = {"lr": settings.learning_rate} if "lr" in parameters and "lr" not in given else {}
        make = functools.partial(make, **options)
    elif len(required) > 1:
        arguments = (model, settings)
    return _checked(user_code.call_factory(make, _name_of(make), *arguments), _name_of(make), model, settings)


def _name_of(make: Any) -> str:
    make = getattr(make, "func", make)  # of a partial
    return str(getattr(make, "__qualname__", type(make).__name__))


def _checked(optimizer: Any, name: str, model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return the user's optimizer, whose groups keep the ratio of their rates to the option's.

    Raises:
        BadInput: it is none, or none that suits a step.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            f"{name} returned a {type(optimizer).__name__}, no torch.optim.Optimizer", "return the optimizer"
        )
    if _wants_closure(optimizer):
        raise BadInput(
            f"{name}: {type(optimizer).__name__} computes a step's loss several times", "take another optimizer"
        )
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if held - set(model.parameters()):
        raise BadInput(f"{name}: the optimizer holds weights that are not the model's", "give it model.parameters()")
    for group in optimizer.param_groups:
        group[RATE_SHARE] = float(group["lr"]) / settings.learning_rate
    return optimizer


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
