"""Every option of a run, declared once: name, type, unit, bounds, default and help.

The command line, ``docs/reference/options.md`` and the wizard's forms are generated from these declarations. Names are
unique across all sections, so INI files and ``--set`` stay flat. Options of a single strategy are declared next to it,
as ``owner.option`` (:mod:`profiles.declarations`).
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from profiles.declarations import (
    OptionError,
    OptionsByOwner,
    Section,
    Trait,
    forms,
    invalid_choice,
    is_valid_choice,
    option,
    trait_of,
)
from profiles.locations import user_code_in
from profiles.optimisation import WHISPER, EvaluationSettings, SnapshotSettings, TrainingSettings
from profiles.run_settings import RunSettings
from profiles.split import SplitText

CAUSAL_LM, CUSTOM = "causal_lm", "custom"
DEFAULT_TASK, QUANTISED = WHISPER, ("int8", "nf4")
PUBLISHED = (WHISPER, CAUSAL_LM)
"""Tasks with a published architecture, whose model Muster builds itself."""
AUTO_LANGUAGE, EVERY_LANGUAGE = "auto", "all"


class ModelSettings(OptionsByOwner, Section):
    """The model and how much of it is trained."""

    owned_section = "model"

    task: str = option(DEFAULT_TASK, "kind of job", names="model")
    model_path: str = option("", "hub name or local folder of the model; for 'custom' module:factory", kind="location")
    from_scratch: bool = option(False, "start from random weights, with the model's configuration")
    tuning: Literal["full", "lora"] = option("full", "train all weights, or low-rank adapters", tasks=PUBLISHED)
    lora_rank: int = option(16, "rank of the adapters", tasks=PUBLISHED, ge=1, le=1024)
    lora_alpha: int = option(32, "scale of the adapters, relative to the rank (alpha / rank)", tasks=PUBLISHED, ge=1)
    lora_dropout: float = option(0.05, "dropout on the adapters' input", advanced=True, tasks=PUBLISHED, ge=0, lt=1)
    lora_target_modules: str = option(
        "all-linear",
        "'all-linear', or module names separated by commas (q_proj, v_proj, ...)",
        advanced=True,
        tasks=PUBLISHED,
    )
    lora_merge: bool = option(True, "save the model with the adapters merged into the weights", tasks=PUBLISHED)
    base_precision: Literal["auto", "fp32", "bf16", "int8", "nf4"] = option(
        "auto",
        "precision of the weights below the adapters: auto: bf16 where steps are; int8, nf4: smaller, by bitsandbytes",
        advanced=True,
        tasks=PUBLISHED,
    )
    freeze_encoder: bool = option(False, "do not train the encoder", advanced=True, tasks=(WHISPER,))
    gradient_checkpointing: bool = option(False, "recompute activations in backward to save memory", tasks=PUBLISHED)
    teacher_path: str = option(
        "",
        "hub name or folder of a Whisper to learn from (distillation); empty: none",
        kind="location",
        tasks=(WHISPER,),
    )
    distill_alpha: float = option(
        0.5, "weight of the transcript in a student's loss; the rest is the teacher's", tasks=(WHISPER,), ge=0, le=1
    )
    distill_temperature: float = option(
        2.0,
        "softens the outputs of teacher and student before they are compared",
        advanced=True,
        tasks=(WHISPER,),
        gt=0,
        le=100,
    )
    student_layers: int = option(
        0, "decoder layers to keep, evenly spaced; 0: all", unit="layers", tasks=(WHISPER,), ge=0, le=1000
    )
    encoder_path: str = option(
        "",
        "hub name or folder of a Whisper whose encoder replaces the model's; empty: the model's own",
        kind="location",
        advanced=True,
        tasks=(WHISPER,),
    )
    language: str = option(
        "",
        "language of recordings whose table names none: a name or code; auto: the model detects it for each; empty: "
        "the model detects one for all, on the first few",
        tasks=(WHISPER,),
    )
    speech_task: Literal["transcribe", "translate"] = option(
        "transcribe", "write what is said, or its translation into English", advanced=True, tasks=(WHISPER,)
    )

    @property
    def trait(self) -> Trait | None:
        """The trait that the task declares."""
        return trait_of(self.task)

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str) -> str:
        if is_valid_choice("model", task):
            return task
        raise OptionError("task", f"{invalid_choice(task, forms('model'))} (one of {', '.join(forms('model'))})")

    @model_validator(mode="before")
    @classmethod
    def _initialise_student_from_teacher(cls, values: Any) -> Any:
        """Initialise a student without a model of its own from its teacher's weights."""
        is_whisper = isinstance(values, dict) and values.get("task", DEFAULT_TASK) == WHISPER
        if is_whisper and values.get("teacher_path") and not values.get("model_path"):
            return {**values, "model_path": values["teacher_path"]}
        return values

    @model_validator(mode="after")
    def _check_compatibility(self) -> ModelSettings:
        for name in ("student_layers", "encoder_path"):
            if getattr(self, name) and self.from_scratch:
                raise OptionError(name, "takes parts of trained models: leave it out, or set from_scratch = false")
            if getattr(self, name) and self.tuning == "lora" and not self.lora_merge:
                raise OptionError(name, "adapters alone would fit no published model then: set lora_merge = true")
        if self.tuning == "lora" and self.from_scratch:
            raise OptionError("from_scratch", "adapters (tuning = lora) need a trained model: use tuning = full")
        if self.tuning == "lora" and not self.lora_target_modules.strip(" ,"):
            raise OptionError("lora_target_modules", "name at least one module, or 'all-linear'")
        if self.base_precision not in ("auto", "fp32") and self.tuning != "lora" and self.task in PUBLISHED:
            raise OptionError("base_precision", "such weights are not trained: set tuning = lora")
        if self.trait == "own code" and self.model_path and not re.search(r".:[A-Za-z_][\w.]*$", self.model_path):
            raise OptionError("model_path", "task = custom needs module:factory, for example my_models.digits:build")
        return self


class DataSettings(Section):
    """The data set."""

    dataset_path: str = option("", "folder with train.csv / metadata.csv, a text file, or a hub name", kind="location")
    text_column: str = option(
        "", "transcript column; empty: text, text_verbatim, text_perfect, transcription, sentence", tasks=PUBLISHED
    )
    languages: str = option(
        EVERY_LANGUAGE,
        "train and evaluate only on clips of these languages, separated by commas (de, french); all: every clip",
        tasks=(WHISPER,),
    )
    long_audio: Literal["refuse", "cut", "skip"] = option(
        "refuse", "what to do with clips longer than the model's window", tasks=(WHISPER,)
    )
    window: str = option(
        "auto",
        "audio window of a clip in training: full: the model's whole window; auto: the clip and some silence, full "
        "from scratch; or at least so many seconds",
        tasks=(WHISPER,),
    )
    split: SplitText = option(
        "global",
        "which samples each worker trains on: any of them (global), or a part of its own: label, label:SHARDS, "
        "dirichlet:ALPHA, speaker",
        advanced=True,
    )
    local_data: bool = option(
        False,
        "each machine trains on what it has at dataset_path there; data stay on it, only weights or gradients leave",
    )
    max_broken_share: float = option(
        0.01, "largest share of unreadable samples: they are named and left out", advanced=True, ge=0, le=1
    )
    max_train_samples: int = option(0, "use only the first N training samples; 0: all", unit="samples", ge=0)
    max_eval_samples: int = option(
        0, "use only the first N samples of each evaluation split; 0: all", unit="samples", ge=0
    )
    pseudo_share: float = option(
        0.0, "largest share of training clips with transcripts from pseudo.csv; 0: none", tasks=(WHISPER,), ge=0, le=1
    )
    augmentation: float = option(
        0.0, "strength of audio augmentation (noise, masks, shift); 0: off", tasks=(WHISPER,), ge=0, le=1
    )
    block_size: int = option(256, "length of a training text", unit="tokens", tasks=(CAUSAL_LM,), ge=2)
    cache_dir: str = option(
        "", "folder for computed features; empty: the user's cache folder", kind="path", advanced=True
    )
    data_workers: int = option(
        0, "threads that read samples, or processes for your own code; 0: by what trains", advanced=True, ge=0, le=256
    )

    @model_validator(mode="after")
    def _check_single_division(self) -> DataSettings:
        if self.local_data and self.split != "global":
            problem = "divides one data set among the workers; with local_data = true each has its own"
            raise OptionError("split", problem)
        return self

    @field_validator("window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        if window in ("auto", "full") or (re.fullmatch(r"\d*\.?\d+", window) and 0 < float(window) <= 3600):
            return window
        raise OptionError("window", "auto, full, or a number of seconds, for example 5")


AskedEngine = Literal["auto", "mesh", "nccl"]
"""An engine as requested."""
Transport = Literal["auto", "tls"]
"""``auto``: frames sealed with keys from a TLS handshake; ``tls``: everything through TLS itself."""


class StrategySettings(OptionsByOwner, Section):
    """How the members work together."""

    strategy: str = option("auto", "{strategy}; auto: on several machines the fastest as measured", kind="code")
    strategy_options: str = option(
        "", "options of a strategy of your own, separated by commas: share = 0.3, interval = 10", advanced=True
    )
    engine: AskedEngine = option(
        "auto", "what carries the exchanges; nccl: for CUDA devices on one network, not encrypted", advanced=True
    )
    transport: Transport = option(
        "auto",
        "how the mesh encrypts; tls sends everything through TLS itself instead of sealed frames, with nothing of our "
        "own: slower",
        advanced=True,
    )
    codec: str = option("auto", "{codec}; auto: the strategy's own", advanced=True)
    error_feedback: bool = option(False, "add what a lossy codec dropped of a change to the next one", advanced=True)
    verify_interval: int = option(
        50,
        "compare the workers' weights, where they should be equal, every N steps or at every rarer exchange; 0: off",
        ge=0,
        advanced=True,
    )
    round_deadline: float = option(300.0, "how long a round waits for a slow worker", unit="s", gt=0, advanced=True)
    quorum: float = option(
        0.5, "share of the workers that must take part for a round to close at its deadline", ge=0, le=1, advanced=True
    )
    planned_as: Literal["auto", "scratch", "pretrained"] = option(
        "auto",
        "what the planner assumes: trained models tolerate rarer exchanges; auto: custom models are untrained",
        advanced=True,
    )
    coordinator_port: int = option(0, "TCP port of the coordinator; 0: any free one", ge=0, le=65535, advanced=True)

    @model_validator(mode="before")
    @classmethod
    def _require_mesh_for_tls(cls, values: Any) -> Any:
        """Select the mesh if ``transport`` is TLS: nccl does not encrypt."""
        if not isinstance(values, dict) or values.get("transport") != "tls":
            return values
        if values.get("engine") == "nccl":
            raise OptionError("transport", "engine = nccl does not encrypt: set engine = mesh, or transport = auto")
        return {**values, "engine": "mesh"}

    @property
    def user_code(self) -> dict[str, str]:
        """User code that the strategy runs, as ``file.py:name``, by the option that names it."""
        named = re.findall(r"\w+", self.strategy)
        chosen = {name: owned for name, owned in self.owned.items() if name in named or self.strategy == "auto"}
        return {
            f"{name}.{field}": value
            for name, owned in chosen.items()
            for field, value in owned
            if isinstance(value, str) and re.fullmatch(r".+\.py:\w+", value)
        }

    @property
    def user_strategy(self) -> str:
        """The user's strategy, as ``file.py:class``; empty: none."""
        return next(iter(user_code_in(self.strategy)), "")

    @model_validator(mode="after")
    def _check_user_strategy(self) -> StrategySettings:
        if len({code.rpartition(":")[0] for code in user_code_in(self.strategy)}) > 1:
            raise OptionError("strategy", "put the classes of your own into one file")
        if self.strategy_options and not self.user_strategy:
            raise OptionError("strategy_options", "is for a strategy of your own, strategy = file.py:Class")
        return self

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, codec: str) -> str:
        if codec == "auto" or is_valid_choice("codec", codec):
            return codec
        raise OptionError("codec", f"one of auto, {', '.join(forms('codec'))} (for example topk:0.03)")


class Profile(BaseModel):
    """Validated settings of a job: one section per topic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model_name: str = ""
    dataset_name: str = ""
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    snapshot: SnapshotSettings = SnapshotSettings()
    strategy: StrategySettings = Field(default_factory=StrategySettings)
    run: RunSettings = RunSettings()

    @property
    def user_code(self) -> dict[str, str]:
        """User code that this profile runs, as ``module:name``, by the option that names it."""
        code_by_option = {
            "model_path": self.model.model_path if self.model.trait == "own code" else "",
            "optimizer": self.training.user_optimizer,
            **self.strategy.user_code,
            "strategy": self.strategy.user_strategy,
        }
        return {option: code for option, code in code_by_option.items() if code}

    @property
    def caches_teacher_outputs(self) -> bool:
        """Whether the teacher's outputs are computed before training rather than in every step: its inputs are not
        augmented, and samples are seen more than once."""
        repeats_samples = self.training.epochs > 1 or self.training.max_steps > 0
        return bool(self.model.teacher_path) and repeats_samples and not self.data.augmentation
