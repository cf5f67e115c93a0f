"""Per-step averaging of gradients, exact data parallelism.

Gradients are packed into flat buckets in the order in which backward computes them, and a bucket is sent while backward
still runs (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2). The
mean is weighted by each member's samples (or tokens), so ``n`` members equal one worker with the joint batch:
``g = sum_i (w_i / W) g_i``. Gradients are sent without their loss scale. With loss scaling, a gradient that is not
finite makes all members skip the step, as a single worker would; without it, the mean is over the others' gradients.

A compressor (:mod:`training.strategies.compressors`) may compress a bucket. What it has not sent stays with the member
and is part of a later mean. A compressor that clips limits each member's own gradient to ``max_grad_norm / sqrt(n)``;
nothing is clipped after it, and sending then waits for the end of backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from pydantic import SerializationInfo, SerializerFunctionWrapHandler, create_model, model_serializer

from profiles.declarations import OptionsByOwner, Section, option
from profiles.errors import RunFailed
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, MeanResult
from training.exchange.codecs import Codec, codec_by_name
from training.exchange.staging import SideQueue, common_async_device
from training.lazy import nn, torch
from training.strategies.base import FEEDS_BACK_ITSELF, StrategyContext
from training.strategies.compressors.base import BucketContext, Compressor, StepContext, compressors, sections
from training.strategies.costs import Compute, CostModel, Learning, RunSpec, SyncSchedule
from training.strategies.parts.gradients import Bucket, GradientStrategy, grouped
from training.strategies.registry import register

OVERLAP = 0.4
"""Share of a pass's compute that hides an exchange; measured with buckets of 25 MB."""
BACKWARD = 2 / 3
"""Share of a pass's compute that is backward: two matrix products for each one of forward."""
_MESH_BUCKET, _NCCL_BUCKET = 4.0, 25.0
"""Size of a bucket in MB, unless it is set."""
_ONLY_ON_REQUEST = "with a compressor it is used only where you ask for it: --set strategy=allreduce"


def _source(compressor: str) -> str:
    return "exact" if compressor == "none" else compressor


class _Options(Section):
    """Options of :class:`AllReduce`, without those of its compressors."""

    bucket_mb: float = option(
        0.0,
        "size of a gradient bucket; 0: 25 with engine = nccl, else 4",
        unit="MB",
        ge=0,
        advanced=True,
        alias="bucket_mb",
    )
    compressor: str = "none"

    @model_serializer(mode="wrap")
    def _without_earlier_default(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        """Plans and snapshots of runs that wrote the mesh's size as the default keep their hash."""
        document = handler(self)
        if info.exclude_defaults and document.get("bucket_mb") == _MESH_BUCKET:
            del document["bucket_mb"]
        return document

    def bucket_elements(self, engine: str) -> int:
        """Return the size of a bucket in fp32 gradients, which is the same on all members.

        Each mean of ``nccl`` costs messages of its own, which larger buckets save. On the mesh a bucket costs a GPU
        three launches, and small ones hide more of a small model's exchange.
        """
        return int((self.bucket_mb or (_NCCL_BUCKET if engine == "nccl" else _MESH_BUCKET)) * 1e6 / 4)


def _with_compressors() -> type[_Options]:
    available_compressors = compressors()
    summaries = "; ".join(f"{name}: {one.summary}" for name, one in available_compressors.items())
    choice: Any = Literal[tuple(available_compressors)]
    create: Any = create_model  # its types do not allow bases computed at run time
    options_class = create(
        "AllReduceOptions",
        __base__=(*reversed(sections()), _Options),
        __doc__=_Options.__doc__,
        __module__=__name__,
        compressor=(choice, option("none", f"what makes gradients smaller on their way; {summaries}")),
    )
    return cast("type[_Options]", options_class)


AllReduceOptions = _with_compressors()
"""Options of :class:`AllReduce` and of all its compressors."""


class AllReduceCosts(CostModel):
    """Gradients of all trainable parameters in every step, partly hidden behind backward.

    Args:
        settings: holds the options; ``None``: their defaults.
    """

    sources: ClassVar[Mapping[str, str]] = {
        "bf16": "16-bit gradients: no difference reported (Li et al. 2020; Micikevicius et al. 2018)"
    } | {_source(name): one.price(StrategySettings.model_construct()).source for name, one in compressors().items()}

    def __init__(self, settings: OptionsByOwner | None = None) -> None:
        options = AllReduceOptions() if settings is None else settings.of(AllReduceOptions)
        self._bucket = options.bucket_elements(getattr(settings, "engine", "auto"))
        self._compressor = options.compressor
        self._price = compressors()[options.compressor].price(settings or StrategySettings.model_construct())
        if options.compressor == "none":
            return
        overrides = {"codecs": self._price.codecs, "vectors": self._price.vectors, "merge_ns": self._price.merge_ns}
        for name, value in (overrides | {"exact": False}).items():
            setattr(self, name, value)

    def with_options(self, settings: OptionsByOwner) -> CostModel:
        return type(self)(settings)

    def why_not_ranked(self, run: RunSpec) -> str:
        return "" if self._compressor == "none" else _ONLY_ON_REQUEST

    def elements(self, trainable: int) -> int:
        return self._price.elements(trainable)

    def longest(self, trainable: int) -> int:
        return min(self.elements(trainable), self._bucket)

    def hidden(self, exchange: float, compute: Compute, schedule: SyncSchedule, settings: OptionsByOwner) -> float:
        bucket = self._bucket / compute.trainable
        return min(exchange, overlap_credit(compute.seconds / compute.passes, self._price.early * exchange, bucket))

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        if self._compressor != "none":
            return Learning(sources=(_source(self._compressor),))
        return Learning(sources=("exact" if run.codec == "fp32" else "bf16",))


def overlap_credit(compute: float, exchange: float, bucket: float) -> float:
    """Return how many seconds of an exchange the compute of its pass hides.

    At most :data:`OVERLAP` of the compute, and what is left of backward when the first bucket is full; never the last
    bucket, which is sent after backward: a model that fits in one bucket hides nothing.

    Args:
        compute: seconds of the pass.
        exchange: seconds of the exchange.
        bucket: share of all gradients in one bucket, at most 1.
    """
    first_bucket = min(1.0, bucket)
    last_bucket = 1.0 - (math.ceil(1.0 / first_bucket) - 1) * first_bucket
    return min(OVERLAP * compute, BACKWARD * (1.0 - first_bucket) * compute, exchange * (1.0 - last_bucket))


@dataclass
class _StepState:
    weight: float = 0.0
    scale: float | None = None
    armed: bool = False
    launched: int = 0
    clip_factor: float = 1.0
    """Clipping factor of this member's gradient; 1: not clipped."""
    norm: float | None = None
    """Norm of this member's gradient before clipping; ``None``: not clipped."""
    host_copies: list[Future[None]] = field(default_factory=list)
    """Buckets that are copied to the host in a side queue."""


@register
class AllReduce(GradientStrategy):
    """Average gradients in every step."""

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "gradients averaged in every step, sent while backward runs; exact data parallelism"
    options = AllReduceOptions
    costs = AllReduceCosts()
    is_default: ClassVar[bool] = True
    is_elementwise = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._side: SideQueue | None = None
        self._compressor_class = compressors()[context.settings.of(AllReduceOptions).compressor]
        requested_codec = context.settings.codec  # fp32 in a plan for one machine, whatever the compressor needs
        self._codec: Codec = codec_by_name(
            requested_codec if requested_codec == "fp32" else self.codec(context.settings)
        )
        self._optimizer: torch.optim.Optimizer | None = None
        self._buckets: list[Bucket] = []
        self._compressors: list[Compressor] = []
        """One for each bucket."""
        self._state = _StepState()

    @classmethod
    def has_equal_snapshots(cls, settings: StrategySettings) -> bool:
        return settings.of(AllReduceOptions).compressor == "none" and not settings.error_feedback

    @classmethod
    def acts_elementwise(cls, settings: StrategySettings) -> bool:
        return super().acts_elementwise(settings) and settings.of(AllReduceOptions).compressor == "none"

    @classmethod
    def why_not_in_parts(cls, settings: StrategySettings) -> str:
        compressor = compressors()[settings.of(AllReduceOptions).compressor]
        norm = "limits gradients by their norm, of which each device has a part"
        return f"with allreduce.compressor = {compressor.name} {norm}" if compressor.clips else ""

    @classmethod
    def why_only_own_codecs(cls, settings: StrategySettings) -> str:
        compressor = settings.of(AllReduceOptions).compressor
        return "" if compressor == "none" else f"with allreduce.compressor = {compressor}, which compresses by itself"

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        compressor = settings.of(AllReduceOptions).compressor
        return "" if compressor == "none" else f"with allreduce.compressor = {compressor}, {FEEDS_BACK_ITSELF}"

    @classmethod
    def check(cls, settings: StrategySettings) -> None:
        codec_to_check = settings.codec if settings.codec != "fp32" else "auto"  # see __init__
        super().check(settings.model_copy(update={"codec": codec_to_check}))

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        if exchange.engine == "solo":
            return
        settings = self.context.settings
        self._codec = codec_by_name(self.codec(settings))
        device = common_async_device(self._parameters)
        self._side = SideQueue(device) if device is not None and exchange.engine == "mesh" else None
        bucket_elements = settings.of(AllReduceOptions).bucket_elements(exchange.engine)
        self._buckets = list(grouped(list(reversed(self._parameters)), bucket_elements))
        momentum = self._compressor_class.take_over(self._optimizer) if self._optimizer is not None else 0.0
        for parameter_index, bucket in enumerate(self._buckets):
            shapes = tuple(tuple(parameter.shape) for parameter in bucket.parameters)
            steps, seed = self.context.total_steps, self.context.seed
            bucket_context = BucketContext(
                parameter_index, shapes, exchange, self._codec, settings, steps, seed, momentum
            )
            self._compressors.append(self._compressor_class(bucket_context))
            for position, parameter in enumerate(bucket.parameters):
                hook = functools.partial(self._on_gradient, bucket, position)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def clips(self) -> bool:
        return self._compressor_class.clips and bool(self._buckets)

    @property
    def gradient_norm(self) -> float | None:
        return self._state.norm if self.clips else None

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        super().begin_step(step, weight, scale)
        self._state = _StepState(weight=weight, scale=scale)
        for bucket in self._buckets:
            bucket.in_flight = False

    def last_backward(self) -> None:
        self._state.armed = True
        for bucket in self._buckets:
            bucket.arm()

    def restart_backward(self) -> None:
        self._state.armed = False
        for bucket in self._buckets:
            bucket.disarm()

    def _on_gradient(self, bucket: Bucket, index: int, _: torch.Tensor) -> None:
        if not self._state.armed:
            return
        bucket.add(index)
        if self.clips and self.context.max_grad_norm:
            return  # the norm needs all buckets
        while self._state.launched < len(self._buckets) and self._buckets[self._state.launched].complete:
            self._launch(self._buckets[self._state.launched])

    def _launch(self, bucket: Bucket) -> None:
        """Start the next bucket; buckets start in the same order on every member."""
        values = bucket.pack((self._state.scale or 1.0) / self._state.clip_factor)
        step_context = StepContext(self._step, self._state.weight, bucket.flags)
        start = functools.partial(self._compressors[self._state.launched].start, step_context=step_context)
        if self._side is None:
            start(values)
        else:  # otherwise backward would wait here until the bucket is on the host
            self._state.host_copies.append(self._side.submit(start, values))
        bucket.in_flight = True
        self._state.launched += 1

    def gradients(self) -> None:
        if self.clips and self.context.max_grad_norm:
            self._state.clip_factor = self._clipping_factor()
        while self._state.launched < len(self._buckets):
            self._launch(self._buckets[self._state.launched])
        self._check_complete()
        self._wait_for_starts()
        for compressor in self._compressors:
            compressor.continue_after_first_mean()
        if self._state.scale is None:
            self._take_over(compressor.wait() for compressor in self._compressors)
        elif not self._overflow(results := [compressor.wait() for compressor in self._compressors]):
            self._take_over(results)

    def _overflow(self, results: Sequence[MeanResult]) -> bool:
        """Let all members skip the step if the loss scale is too large, which is normal; residuals stay as they were.

        Returns:
            whether it is.
        """
        if not any(result.refused for result in results):
            return False
        self._members = results[-1].members
        own = [bucket for bucket, result in zip(self._buckets, results, strict=True) if not result.is_finite]
        self._count_non_finite(own, self._codec, self._state.scale)
        for bucket in self._buckets:
            bucket.overflow()
        return True

    def _take_over(self, results: Iterable[MeanResult]) -> None:
        """Set the gradients of each bucket to its mean, on an asynchronous device as views of it, and accept the step
        when all means are there."""
        problem, is_late = "", False
        for bucket, result in zip(self._buckets, results, strict=True):
            if not result.is_finite and not problem:
                problem = self._non_finite_parameter(bucket, self._codec, self._state.scale)
            is_late = is_late or bool(result.left_out and result.is_finite)
            self._members = result.members
            bucket.unpack(result, self._state.scale or 1.0, shares_mean=self._side is not None)
        self._count_problem(problem, self._state.scale)
        for compressor in self._compressors:
            compressor.settle()
        if is_late:
            self.context.warn(f"step {self._step + 1}: this machine's gradients came after the deadline")

    def _wait_for_starts(self) -> None:
        for future in self._state.host_copies:
            future.result()
        if self._side is not None:
            self._side.join()

    def _clipping_factor(self) -> float:
        """Return the clipping factor of this member's gradient, to a norm of ``max_grad_norm / sqrt(n)``.

        The sum of ``n`` independent gradients is ``sqrt(n)`` times as long as one. Values that are not finite are
        handled elsewhere.
        """
        scale = self._state.scale or 1.0
        bucket_norms = [torch.linalg.vector_norm(bucket.pack(scale)) for bucket in self._buckets]
        norms: list[float] = torch.stack([norm.to(bucket_norms[0].device) for norm in bucket_norms]).tolist()
        self._state.norm = math.hypot(*(norm for norm in norms if math.isfinite(norm)))
        norm_limit = self.context.max_grad_norm / math.sqrt(len(self._exchange.members))
        return min(1.0, norm_limit / (self._state.norm + 1e-6))

    def _check_complete(self) -> None:
        for bucket in self._buckets:
            if bucket.added_late is not None:
                name = self._name_of[bucket.parameters[bucket.added_late]]
                raise RunFailed(
                    f"the gradient of {name} was added to after it had been sent: in step {self._step + 1} its "
                    "layer was recomputed more often than in the step before",
                    "checkpoint activations with use_reentrant=False",
                )

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: one for compressor in self._compressors for name, one in compressor.tensors().items()}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {name: one for compressor in self._compressors for name, one in compressor.newcomer_tensors().items()}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        for bucket, compressor in zip(self._buckets, self._compressors, strict=True):
            compressor.load(tensors, bucket.parameters[0].device)
