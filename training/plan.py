"""The plan of one run: everything a worker must know, as one JSON document (``plan.json``)."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from profiles.errors import BadInput
from profiles.schema import Profile
from training.bounded import first_problem

PLAN_VERSION = 1
_LATER: dict[str, dict[str, Any]] = {"data": {"window": "full"}}
"""Options that came later and whose default is not what was done before, with what was."""
_FIRST = {
    "model": "task model_path from_scratch tuning lora_rank lora_alpha lora_dropout lora_target_modules "
    "lora_merge freeze_encoder gradient_checkpointing language speech_task",
    "data": "dataset_path text_column long_audio max_broken_share max_train_samples max_eval_samples "
    "augmentation block_size cache_dir data_workers",
    "training": "learning_rate lr_schedule warmup_steps lr_scaling epochs max_steps batch_size "
    "gradient_accumulation drop_last max_grad_norm weight_decay adam_beta2 mixed_precision seed "
    "device threads",
    "evaluation": "eval_interval eval_batch_size eval_generate eval_max_new_tokens eval_before "
    "early_stopping_patience early_stopping_min_delta",
    "snapshot": "snapshot_interval snapshot_keep",
    "strategy": "strategy engine codec sync_interval sync_delay outer_lr outer_momentum error_feedback bucket_mb "
    "verify_interval round_deadline quorum planned_as hub_port",
}
"""Options that count in every hash, by section. All others came later and count where they say otherwise than what was
done before: so a run that began without them goes on."""
_SECOND = {"model": "teacher_path distill_alpha distill_temperature student_layers encoder_path", "data": "languages"}
"""Those that one later version counted too."""
_HASHED = {"mesh": "hub", "nccl": "torch", "auto": "auto"}
"""What an engine is called in hashes: as the one that had its place when they were first made."""
_PLACE = {"local", "share", "addresses"}
"""What decides no result of a member."""


class MemberPlan(BaseModel):
    """One worker of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0)
    name: str
    """Name of the machine, for messages."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    device_index: int = 0
    batch_size: int = Field(ge=1)
    """Samples in one forward pass: this member's share of every step."""
    threads: int = 0
    interface: str = ""
    """Network interface for the exchanges; empty: loopback with nccl, with the mesh any."""
    local: bool = False
    """On the machine of the coordinator, or of nccl's store. Whether it lives is seen by its process and its
    connections: where others take the processors, signs of life may be late."""
    share: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How much of every vector it owns (averages and sends back), relative to the others."""
    addresses: tuple[str, ...] = ()
    """Hosts at which the others can dial it, the fastest way first; empty: what its machine has."""


def _all_cuda(members: Any) -> bool:
    return isinstance(members, list) and all(isinstance(m, dict) and m.get("device") == "cuda" for m in members)


LAUNCHED_FILES = "files"
"""Folder with what a launched script of rank 0 has written, where it ran in a copy."""


class Launch(BaseModel):
    """A script that every member runs as it is, instead of a training of ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: str
    """File, or with ``module`` the name after ``python -m``."""
    module: bool = False
    arguments: tuple[str, ...] = ()
    backend: Literal["auto", "muster", "script"] = "auto"
    """Which groups are ours: those for which the script says gloo, NCCL or nothing; all; none."""
    folder: str = ""
    """What is copied to where the script then runs; empty: it runs where it is."""
    machines: tuple[int, ...]
    """Number of each member's machine, by rank."""
    addresses: tuple[str, ...]
    """Literal address of each machine, where its members listen."""

    @property
    def title(self) -> str:
        return " ".join([f"-m {self.script}" if self.module else Path(self.script).name, *self.arguments])

    def there(self, folder: str) -> Launch:
        """Return the same where the folder lies at ``folder``."""
        script = self.script if self.module else Path(self.script).relative_to(self.folder).as_posix()
        return self.model_copy(update={"script": script, "folder": folder})

    def beside(self, rank: int) -> list[int]:
        """Return the ranks on the machine of one of them."""
        return [other for other, machine in enumerate(self.machines) if machine == self.machines[rank]]


class RunPlan(BaseModel):
    """What all members agree on before the first step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = PLAN_VERSION
    run_id: str
    profile: Profile
    members: tuple[MemberPlan, ...]
    engine: Literal["mesh", "nccl"]
    hub_address: str = ""
    """``host:port`` of the coordinator, or of the rendezvous store of nccl (always loopback)."""
    added: tuple[MemberPlan, ...] = ()
    """Members that came while the run was on; they change neither its steps nor its learning rate."""
    resume: bool = False
    """Continue from the newest snapshot all members have."""
    launch: Launch | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_it_began(cls, document: Any) -> Any:
        """Read a plan that was written before an option as what was done then, not as today's default; and an engine of
        an earlier version as the one that has its place."""
        profile = document.get("profile") if isinstance(document, dict) else None
        if not isinstance(profile, dict):
            return document
        known = {name: _LATER[name] for name in _LATER if isinstance(profile.get(name), dict)}
        if document.get("engine") in ("hub", "torch"):
            in_clear = document["engine"] == "torch" and _all_cuda(document.get("members"))
            document = {**document, "engine": "nccl" if in_clear else "mesh"}
        return {**document, "profile": {**profile, **{name: {**known[name], **profile[name]} for name in known}}}

    @property
    def has_hub(self) -> bool:
        """Whether members meet at a coordinator; else they do at a store on loopback."""
        return self.engine == "mesh" and self.launch is None

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def seats(self) -> tuple[MemberPlan, ...]:
        """All members by rank: the planned ones, and those that came later."""
        return (*self.members, *self.added)

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all members."""
        return sum(m.batch_size for m in self.members) * self.profile.training.gradient_accumulation

    def hash(self) -> str:
        """Hash of what decides the result: not the run's id, address or resume flag, nor names, folders and places."""
        return self._hash(_FIRST, _HASHED[self.engine], _HASHED[self.profile.strategy.engine])

    def hashes(self) -> tuple[str, ...]:
        """Hashes that this and earlier versions have for this plan, whatever its engine: all have the same result."""
        second = {section: f"{names} {_SECOND.get(section, '')}" for section, names in _FIRST.items()}
        engines, asked = list(_HASHED.values())[:2], _HASHED.values()
        others = (self._hash(*way) for way in itertools.product((_FIRST, second), engines, asked))
        return tuple(dict.fromkeys((self.hash(), *others)))

    def _hash(self, always: Mapping[str, str], engine: str, asked: str) -> str:
        document = self.model_dump(
            exclude={"run_id", "hub_address", "resume", "added", "profile", "members", "launch"}, mode="json"
        )
        document["engine"] = engine
        document["members"] = [member.model_dump(exclude=_PLACE, mode="json") for member in self.members]
        for member in document["members"] if self.engine == "mesh" else ():
            member["interface"] = ""  # where the mesh goes is a place too
        profile = self.profile.model_dump(exclude={"name", "run"}, mode="json")
        profile["strategy"]["engine"] = asked
        for owner in (self.profile.model, self.profile.strategy):
            own = profile[owner.owned_section]
            own.pop("owned", None)
            own |= {"owned": changed} if (changed := owner.changed()) else {}
        for section in profile.keys() & _FIRST.keys():
            settings: BaseModel = Profile.model_fields[section].get_default(call_default_factory=True)
            before = {**settings.model_dump(mode="json"), **_LATER.get(section, {})}
            names, said = always[section].split(), profile[section]
            counts = (name for name in said if name in names or said[name] != before.get(name, said))
            profile[section] = {name: said[name] for name in counts}
        document["profile"] = profile
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def read_plan(path: Path) -> RunPlan:
    """Read ``plan.json``.

    Raises:
        BadInput: missing, unreadable, not JSON, or of another version.
    """
    try:
        return RunPlan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "name the path of a run's plan.json") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {first_problem(error)}", "make the plan again with this version") from error
