"""What a run cannot have whose devices hold a shard of every weight or a slice of every matrix."""

from __future__ import annotations

from profiles.schema import QUANTISED, Profile

INSIDE_LAYOUTS = ("shard", "tensor")
"""Layouts whose devices exchange while they compute: in one machine, shards also over direct fast links."""
BY_ELEMENT = ("adamw", "sgd")
"""Optimizers that need only the part of a weight that a device has."""


def refusal_inside(profile: Profile) -> str:
    """Return why a run cannot be one of a member whose devices each hold a part of every weight; empty: it can."""
    model, training, strategy = profile.model, profile.training, profile.strategy
    composed = model.teacher_path or model.encoder_path or model.student_layers
    reasons = {
        f"has one member, no use for {strategy.strategy}": strategy.strategy not in ("auto", "allreduce"),
        "has one member: engine = nccl is for exchanges of several": strategy.engine == "nccl",
        "has one member: shares divide nothing": bool(profile.run.shares),
        "has one member, whose devices share its data: local_data is of no use": profile.data.local_data,
        "leaves no worker with weights of its own: eval_local = on": profile.evaluation.eval_local == "on",
        f"gives an optimizer a part of each matrix, and optimizer = {training.optimizer} needs whole ones, or may": (
            training.optimizer not in BY_ELEMENT
        ),
        f"divides weights, which base_precision = {model.base_precision} packs": (
            model.tuning == "lora" and model.base_precision in QUANTISED
        ),
        "needs one loss scale for all devices, not mixed_precision = fp16": training.mixed_precision == "fp16",
        "does not compile blocks yet: compile = on": training.compile == "on",
        "cannot train students of other models yet": bool(composed),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
