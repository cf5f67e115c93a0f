"""Plans over a grid of clusters and jobs, as figures that can be compared with recorded ones.

``PYTHONPATH=.:tests/distributed .venv/bin/python -m prediction_grid`` writes them anew, where they are meant to change.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from planner_figures import TINY, cluster, job, joined, machine, predict

from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Candidate, Choice, Job
from distributed.planning.planner import plan
from distributed.planning.prediction import Predictor
from profiles.errors import BadInput

RECORDED = Path(__file__).parent / "recorded_predictions.json"
_NOT_PLANNED = "no-cost-model"
"""Which strategies nobody has measured yet is no prediction, and changes with every new one."""
CODECS = ("fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.03")


def clusters() -> dict[str, Cluster]:
    """Equal and unequal machines, fast and slow links, a GPU, little memory, two workers on one machine."""
    unequal = [machine("a", 16.0, cores=2.0), machine("b", 8.0, cores=4.0), machine("c", 3.0, cores=1.0)]
    gpu = [machine("a", 40.0, device="cuda", memory_free=6_000_000_000), machine("b", 8.0, memory_free=3_000_000_000)]
    return {
        "two at 950": cluster([8, 8]),
        "three at 100": cluster([8, 7, 5], 100.0),
        "four, one slow": cluster([8, 8, 8, 8], 950.0, {"d": 20.0}),
        "unequal with cores": joined(unequal, 300.0),
        "a GPU and little memory": joined(gpu, 950.0),
    }


def jobs() -> dict[str, Job]:
    """Small and large models, from scratch and trained, adapters, short and long runs, fixed choices."""
    return {
        "tiny": job(),
        "tiny from scratch": job(start="scratch", samples=200_000),
        "small": job(parameters=244_000_000, samples=60_000),
        "adapters": job(parameters=1_000_000, total=TINY, lora=True, samples=20_000),
        "short": job(samples=600),
        "least traffic": job(preference="least-traffic", max_loss_increase=0.05),
        "closest to exact": job(preference="closest-to-exact", samples=100_000),
        "sparse": job(codec="topk:0.03", samples=200_000, strategy="diloco"),
        "small buckets": job(owned={"allreduce": {"bucket_mb": 0.5}}, strategy="allreduce", engine="nccl"),
    }


def document(candidate: Candidate) -> dict[str, Any]:
    """Return all figures of a prediction."""
    times = [
        candidate.compute,
        candidate.exchange,
        candidate.exposed,
        candidate.skew,
        candidate.step,
        candidate.samples_per_second,
    ]
    is_worthwhile = [
        candidate.token_efficiency,
        candidate.useful_speed_up,
        candidate.loss_increase,
        candidate.bytes_per_hour,
    ]
    members = [[member.micro_batch, member.busy, member.memory, member.shard] for member in candidate.members]
    return {"times": times, "worth": is_worthwhile, "members": members, "sources": candidate.sources}


def planned(cluster: Cluster, job: Job) -> dict[str, Any]:
    """Return the first of a ranking, the number of all, and what follows."""
    planning = plan(cluster, job)
    settings = planning.settings.model_dump(mode="json") if planning.settings else {}
    options = settings.get("options", {})
    if planning.settings:
        settings["members"] = [[m.name, m.batch_size, m.shard] for m in planning.settings.members]
    settings["options"] = {name.rpartition(".")[2]: value for name, value in options.items()}
    return {
        "ranking": [
            [
                "".join(map(str, candidate.choice.model_dump(exclude={"blocks"}).values())),
                candidate.step,
                candidate.useful_speed_up,
                candidate.loss_increase,
            ]
            for candidate in planning.ranking[:4]
        ],
        "candidates": len(planning.ranking),
        "settings": settings,
        "reasons": [list(reason.model_dump().values()) for reason in planning.reasons if reason.code != _NOT_PLANNED],
    }


def cells() -> dict[str, Any]:
    """Return everything that is recorded, by name."""
    recorded: dict[str, Any] = {}
    for (cluster_name, machines), (job_name, planned_job) in itertools.product(clusters().items(), jobs().items()):
        recorded[f"plan: {job_name} on {cluster_name}"] = planned(machines, planned_job)
    for (cluster_name, machines), engine, codec in itertools.product(clusters().items(), ("mesh", "nccl"), CODECS):
        members = tuple(sorted(member.name for member in machines.machines))
        for strategy, interval, delay in (("allreduce", 1, 0), ("diloco", 20, 0), ("diloco", 50, 5)):
            choice = Choice(
                strategy=strategy, codec=codec, engine=engine, members=members, interval=interval, delay=delay
            )
            name = f"predict: {strategy} {codec} {engine} H={interval}+{delay} on {cluster_name}"
            try:
                recorded[name] = document(predict(machines, job(), choice))
            except BadInput as error:
                recorded[name] = str(error)
    for cluster_name, machines in clusters().items():
        predictor = Predictor(machines, job())
        names = predictor.measured_machines
        recorded[f"caps on {cluster_name}"] = {
            strategy: predictor.caps(names, strategy) for strategy in ("", "allreduce", "diloco")
        }
    return recorded


def compact(value: Any) -> Any:
    """Return a document with its numbers in ten digits: the last bits of a sum may differ between processors."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {str(key): compact(inner) for key, inner in value.items()}
    return [compact(inner) for inner in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(compact(cell))}" for name, cell in cells().items())
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")
