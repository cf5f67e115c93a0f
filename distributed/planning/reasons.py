"""The reasons for a choice, as data and as sentences, and the settings that follow from it for the profile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from distributed.planning.documents.cluster import ClusterMachine
from distributed.planning.documents.document import (
    Candidate,
    Job,
    MemberForecast,
    Planning,
    Reason,
    Settings,
)
from distributed.planning.memory import memory_model
from distributed.planning.prediction import Predictor, known_costs, sync_schedule_of
from distributed.planning.ranking import near_tie
from distributed.planning.run_time import run_time
from profiles.errors import BadInput
from profiles.quantities import machine_text, memory_text, rate_text, share_text, time_text
from profiles.split import DATA_STAY
from training.numerics.schedule import scaled_learning_rate
from training.records.events import BUSY
from training.records.plan import MemberPlan
from training.strategies.costs import RunSpec
from training.strategies.registry import scaling_rule_of

_MUCH_WAITING = 0.2
"""Share of a step spent waiting, from which a larger batch is suggested."""
_BATCH_FACTOR = 4
OWNERSHIP_CODES = ("owns-less", "owns-more", "relayed")
"""Codes of reasons about the members' shards of the vectors, and about relays."""
LEFT_OUT_CODES = ("costs-more", "no-room-beside", "does-not-fit", "no-speed", "no-link", "no-link-nccl", "no-cuda")
"""Codes of reasons why a machine does not take part."""
ROUTE_CODES = ("direct", "small", "all-direct", "one-way", "relayed")
"""Codes of reasons about the expected routes of pairs of machines."""


def choice_reasons(best: Candidate, ranking: Sequence[Candidate], predictor: Predictor) -> Iterator[Reason]:
    """Yield the reasons for a choice, the decisive one first."""
    if not best.predicted:
        yield Reason.of("not-predicted", best.choice.strategy, members=len(best.members))
        yield from _about_members(best, predictor)
        return
    groups = [candidate for candidate in ranking if not candidate.choice.alone]
    if best.choice.alone:
        yield from _why_alone(best, groups, len(predictor.measured_machines))
    else:
        yield from _why_group(best, predictor)
        yield from near_tie(best, ranking, predictor.job.preference)
    yield from _measured_in_use(predictor)
    if best.accumulation > (before := predictor.job.accumulation):
        yield Reason.of("accumulation-for-memory", accumulation=best.accumulation, before=before)
    yield from _advice(groups, predictor.job)


def _measured_in_use(predictor: Predictor) -> Iterator[Reason]:
    """Yield the machines that were measured while other programs used much of their processors; also those left out,
    which may have been left out for that."""
    for name in predictor.measured_machines:
        machine = predictor.cluster.machine(name)
        if machine.estimated:
            yield Reason.of(ESTIMATED, name)
        elif machine.others >= BUSY:
            yield Reason.of(IN_USE, name, others=100 * machine.others)


def _why_alone(best: Candidate, groups: Sequence[Candidate], machine_count: int) -> Iterator[Reason]:
    name = best.choice.members[0]
    rival = max((group for group in groups if group.fits), key=lambda group: group.useful_speed_up, default=None)
    if rival is None:
        yield Reason.of("only-machine" if machine_count == 1 else "no-group", name)
        return
    code = "alone-wins" if rival.useful_speed_up <= 1 else "alone-is-enough"
    yield Reason.of(code, name, rival.choice.strategy, useful=rival.useful_speed_up, speed_up=rival.speed_up,
                    members=len(rival.choice.members), exchange=rival.exchange, compute=rival.compute,
                    exposed=rival.exposed)  # fmt: skip
    yield from rival.reasons


def _why_group(best: Candidate, predictor: Predictor) -> Iterator[Reason]:
    choice, job = best.choice, predictor.job
    yield Reason.of("group-wins", choice.strategy, members=len(choice.members), useful=best.useful_speed_up,
                    speed_up=best.speed_up)  # fmt: skip
    yield from best.reasons
    share = 100 * best.waiting
    if share >= _NOTICEABLE_PERCENT:
        yield Reason.of("exchange-exposed", exposed=best.waiting * best.step, step=best.step, share=share)
    else:
        yield Reason.of("exchange-hidden", exchange=best.exchange)
    if not known_costs(choice).exact:
        code = "interval" if choice.interval > 1 else "every-step"
        yield Reason.of(code, interval=choice.interval, rounds=best.rounds, loss=100 * best.loss_increase,
                        bound=100 * job.max_loss_increase)  # fmt: skip
    yield from _about_members(best, predictor)


def _about_members(best: Candidate, predictor: Predictor) -> Iterator[Reason]:
    choice, cluster, job = best.choice, predictor.cluster, predictor.job
    rule = scaling_rule_of(job.lr_scaling, choice.strategy, job.start)
    factor = 1.0 if rule == "auto" else scaled_learning_rate(1.0, rule, best.global_batch, job.reference_batch)
    if factor != 1.0:
        yield Reason.of("learning-rate", rule, factor=factor, batch=best.global_batch,
                        reference=job.reference_batch)  # fmt: skip
    elif job.lr_scaling == "auto" and rule == "off" and not choice.alone:
        yield Reason.of("own-learning-rate", choice.strategy)
    (smallest_batch, smallest_member), *_, (largest_batch, largest_member) = sorted(
        (member.micro_batch, member.name) for member in best.members
    )
    if smallest_batch != largest_batch:
        yield Reason.of("unequal-shares", smallest_member, largest_member, least=smallest_batch, most=largest_batch)
    if choice.engine == "nccl":
        yield Reason.of("on-one-machine" if cluster.on_one_machine(choice.members) else "in-clear")
    elif not cluster.machine(predictor.coordinator).on_mains:
        yield Reason.of("coordinator-on-battery", predictor.coordinator)
    if best.predicted:
        yield from _about_shares(best, predictor)
    yield from _left_out(best, predictor)


def _about_shares(best: Candidate, predictor: Predictor) -> Iterator[Reason]:
    """Yield the members that own much less of every vector than the others, or those that own much more, whichever are
    fewer; and the pairs whose traffic is relayed by the coordinator."""
    cluster, names, even = predictor.cluster, best.choice.members, 1 / len(best.members)
    below = [("owns-less", member) for member in best.members if member.shard < even / 2]
    above = [("owns-more", member) for member in best.members if member.shard > even * 1.5]
    links = {(cluster.interface(name), cluster.machine(name).wifi) for name in names}
    for code, member in min(filter(None, (below, above)), key=len, default=()):
        resource = "link" if len(links) > 1 else "processor"
        yield Reason.of(code, member.name, resource, percent=100 * member.shard, even=100 * even)
    if best.choice.engine == "mesh":
        for pair in itertools.combinations(names, 2):
            if not cluster.reaches(*pair):
                yield Reason.of("relayed", *pair)


def _left_out(best: Candidate, predictor: Predictor) -> Iterator[Reason]:
    """Yield, for every eligible machine that was left out, how it would change the prediction."""
    for name in predictor.measured_machines:
        if name in best.choice.members:
            continue
        members = tuple(sorted((*best.choice.members, name)))
        try:
            joined = predictor.predict(best.choice.model_copy(update={"members": members}))
        except BadInput:
            continue  # it has no link or there are too few samples, which have their own reasons
        code = "costs-more" if joined.fits else "no-room-beside"
        yield Reason.of(code, name, useful=best.useful_speed_up, joined=joined.useful_speed_up)


def _advice(groups: Sequence[Candidate], job: Job) -> Iterator[Reason]:
    """Yield advice to use a larger batch, if the best group that averages in every step mostly waits."""
    exact = [group for group in groups if group.fits and known_costs(group.choice).exact]
    best = max(exact, key=lambda group: group.useful_speed_up, default=None)
    if best is None or job.global_batch or best.exposed < _MUCH_WAITING * best.step:
        return
    share_then = best.exposed / (_BATCH_FACTOR * best.compute + best.exposed)
    share_now = 100 * best.exposed / best.step
    yield Reason.of(
        "accumulation-would-help", best.choice.strategy, times=_BATCH_FACTOR, share=share_now, then=100 * share_then
    )


def memory_reasons(job: Job, machine: ClusterMachine) -> Iterator[Reason]:
    """Yield that a job does not fit a machine's memory, and what would make it fit; nothing if it fits."""
    if memory_model.largest_batch(job, machine, ""):
        return
    needed, free = memory_model.member_bytes(job, machine, "", 1), machine.memory_free
    yield Reason.of("does-not-fit", machine.name, needed=needed, free=free)
    remedies = []
    if job.adaptable and not job.gradient_checkpointing:
        remedies.append(("would-fit-with-checkpointing", memory_model.with_checkpointing(job, machine)))
    if job.adaptable and not job.lora and job.start == "pretrained":
        remedies.append(("would-fit-with-lora", memory_model.with_lora(job, machine)))
    sufficient = [Reason.of(code, machine.name, needed=size, free=free) for code, size in remedies if size <= free]
    yield from sufficient or [Reason.of("needs-dividing", machine.name)]


def settings_of(best: Candidate, predictor: Predictor) -> Settings:
    """Return the changes of the profile and its run by a candidate."""
    choice, cluster, job = best.choice, predictor.cluster, predictor.job

    apart = choice.alone or choice.engine == "nccl" or not predictor.coordinator

    def shard(member: MemberForecast) -> float:
        """Return the size of a member's shard relative to an equal one."""
        return round(len(best.members) * member.shard, 3) if best.predicted else 1.0

    options: dict[str, str | int | float | bool] = {
        "strategy": choice.strategy,
        "engine": choice.engine,
        "codec": choice.codec,
        "batch_size": job.reference_batch // best.accumulation,
        "gradient_accumulation": best.accumulation,
        "shares": "",
    }
    if best.predicted:
        run = RunSpec(best.steps, job.start, job.lora, choice.codec, job.texts)
        options |= known_costs(choice, predictor.job).settings(run, sync_schedule_of(choice))
    return Settings(
        options=options,
        members=tuple(
            MemberPlan(rank=rank, name=member.name, batch_size=member.micro_batch, shard=shard(member)).on_device(
                machine=cluster.machine(member.name).machine_name
            )
            for rank, member in enumerate(best.members)
        ),
        engine=choice.engine,
        coordinator="" if apart else cluster.machine(predictor.coordinator).machine_name,
        left_out=tuple(sorted(m.name for m in cluster.machines if m.trains and m.name not in choice.members)),
    )


# --------------------------------------------------------------------------------------------------------------- words

IN_USE, ESTIMATED = "measured-in-use", "estimated"
"""Codes of the reasons why the predicted times may be wrong; they stand beside these times."""
_NOTICEABLE_PERCENT = 0.05
"""Per cent of a step below which waiting is not mentioned."""
_WIRED = " ({rate}): {wired:.2f} instead of {useful:.2f} times as fast"
_LOSS = "the final loss {higher} (at most {bound_text} is accepted)"
_RATHER = (
    "{subject} is used rather than {other}, which is about as fast ({rival:.2f} against {useful:.2f}; predictions "
    "cannot tell differences below {percent_text}): "
)
WORDS = {
    "alone-wins": "{subject} alone is the fastest: {members:.0f} machines would compute a step in {compute_text} and "
    "then wait {exposed_text} for the network",
    "alone-is-enough": "{subject} alone is about as fast as the best group: {members:.0f} machines would "
    "train {useful:.2f} times as fast, and predictions cannot tell differences below 5 %",
    "about-equal": "{members:.0f} machines with {subject} over {other} are about as fast ({rival:.2f} against "
    "{useful:.2f}; predictions cannot tell differences below {percent_text})",
    "about-equal-alone": "{subject} alone is about as fast ({rival:.2f} against {useful:.2f}; predictions cannot tell "
    "differences below {percent_text})",
    "rather-exact": _RATHER + "it averages gradients exactly",
    "rather-encrypted": _RATHER + "its traffic is encrypted",
    "rather-fp32": _RATHER + "it sends numbers in full (fp32)",
    "rather-fewer": _RATHER + "it needs fewer machines",
    "rather-gains": _RATHER + "it is worth more than one machine alone",
    "rather-faster": _RATHER + "it is a little faster",
    "rather-lower-loss": _RATHER + "its loss should be lower",
    "rather-less-traffic": _RATHER + "it sends less",
    "rather-equal": _RATHER + "they are equal in all that is compared",
    "not-predicted": "{subject} with {members:.0f} machines is used as the profile says, without a prediction: its "
    "cost is not known",
    "no-group": "{subject} alone: these machines cannot train together (--explain says why)",
    "only-machine": "{subject} is the only machine that can train this",
    "group-wins": "{members:.0f} machines with {subject} reach the same loss {useful:.2f} times as fast as the best "
    "of them alone ({speed_up:.2f} times its samples/s)",
    "slowest-none": "nothing is sent over the network",
    "slowest-link": "the link from {subject} to {other} limits each exchange: {rate}, {seconds_text}",
    "slowest-interface": "the network connection of {subject} limits each exchange: {rate} for all others "
    "together, {seconds_text}",
    "slowest-air": "the Wi-Fi limits each exchange: {rate} for all machines on it, {seconds_text}",
    "slowest-member": "the processor of {subject} limits each exchange: it packs and moves {rate}, {seconds_text}",
    "exchange-hidden": "training does not wait for exchanges, of {exchange_text} each",
    "exchange-exposed": "{share_text} of each step of {step_text} is spent waiting for the network or other machines",
    "interval": "one exchange every {interval:.0f} steps, {rounds:.0f} in the run: " + _LOSS,
    "every-step": "an exchange in every step: " + _LOSS,
    "learning-rate": "the learning rate is multiplied by {factor:.2f} (lr_scaling = {subject}): it was chosen for a "
    "batch of {reference:.0f}, and a step here has {batch:.0f} samples",
    "own-learning-rate": "the learning rate stays as it is (lr_scaling = auto): a machine's step sees "
    "its own samples only, and a higher rate made new models worse",
    "unequal-shares": "each machine's share of the batch follows its speed: from {least:.0f} samples ({subject}) to "
    "{most:.0f} ({other})",
    "in-clear": "training traffic of engine nccl is not encrypted",
    "on-one-machine": "training traffic of engine nccl is not encrypted, and does not leave the machine",
    "faster-in-clear": "{subject} over engine nccl would be {open:.2f} instead of {useful:.2f} times as fast; its "
    "training traffic is not encrypted, so it is used only if you ask for it: --set engine=nccl",
    "coordinator-on-battery": "{subject} holds the run together and runs on battery: plug it in",
    "owns-none": "{subject} trains, and leaves merging the weights to the others, because its {other} is slow",
    "owns-less": "{subject} merges {percent_text} of the weights instead of {even_text}, because its {other} is slow",
    "owns-more": "{subject} merges {percent_text} of the weights instead of {even_text}, because its {other} is fast",
    "direct": "{source} and {other} exchange directly",
    "small": "{source} and {other} exchange directly, in small packets: large ones are lost on the way",
    "data-stay": DATA_STAY,
    "all-direct": "{pairs:.0f} pairs of machines exchange directly",
    "one-way": "only {subject} can connect to {other}, so it opens the connections of both directions",
    "relayed": "{subject} and {other} cannot connect to each other: their traffic is relayed by the coordinator's "
    "machine",
    "costs-more": "{subject} is left out: with it training would be {joined:.2f} times as fast as on the fastest "
    "machine alone, without it {useful:.2f} times",
    "no-room-beside": "{subject} is left out: it does not have the memory for its part",
    "accumulation-for-memory": "a step takes {accumulation:.0f} micro-batches instead of {before:.0f}, to fit into "
    "memory; its result is the same",
    "accumulation-would-help": "{subject} waits for the network {share_text} of a step; {times:.0f} times the "
    "gradient_accumulation, and so {times:.0f} times the batch, would make that {then_text}",
    "does-not-fit": "{subject} is left out: one sample needs {needed_text}, and {free_text} are free",
    "would-fit-with-checkpointing": "it would fit {subject} with gradient_checkpointing = true "
    "({needed_text} of {free_text}), for a third more compute",
    "would-fit-with-lora": "it would fit {subject} with tuning = lora ({needed_text} of {free_text})",
    "needs-dividing": "no setting would make it fit {subject}: several machines hold it with layout = pipeline",
    "strategy-does-not-fit": "{subject} does not have the memory for {other}: it needs {needed_text}, and "
    "{free_text} are free",
    "no-speed": "{subject} is left out: its speed was not measured",
    "no-link": "{subject} has no measured link to {other}, where the coordinator would be",
    "no-cuda": "{subject} has no CUDA device, which engine nccl needs",
    "no-link-nccl": "{subject} does not have a link to every machine, which engine nccl needs",
    "cable-to": "with a cable to {subject}" + _WIRED,
    "cable-between": "with a cable between {subject} and {other}" + _WIRED,
    "cables-to": "with cables to {subject}" + _WIRED,
    IN_USE: "measured while {subject} was busy (other programs used {others_text} of its processors)",
    ESTIMATED: "the speed of {subject} is guessed, not measured",
    "not-measured": "{subject} is in the hosts file and was not measured",
    "fixed": "only {other} = {subject} was considered, as the profile says; --set {other}=auto compares all",
    "no-cost-model": "{subject} was not considered: {other}",
    "no-interval": "{subject} was not considered: at no interval does the expected loss stay within {bound_text}",
    "refused": "{subject} was not considered: it {other}",
    "batch-too-small": "some groups were not considered: a step has fewer samples than members",
    "nothing-fits": "the job fits none of these machines",
    "layout-fits": "{subject} holds the whole model, which is faster than dividing it",
    "layout-not-needed": "not needed: {subject} holds the whole model, which is faster",
    "layout-too-large": "no machine holds the whole model: {subject} is closest, with {free_text} of the {needed_text}",
    "layout-no-blocks": "the blocks of the model are not known",
    "layout-teacher": "a model that learns from a teacher is not divided",
    "layout-one-device": "{subject} is the only device",
    "layout-one-block": "the model has one block, which cannot be divided",
    "layout-large-block": "no device holds {other}: {subject} is closest, with {free_text} of the {needed_text}",
    "layout-small-devices": "{other} need a block each, and {subject} has the memory for none",
    "layout-no-memory": "the memory of {subject} does not hold all blocks, in any order",
    "layout-no-link": "{subject} would need links that were not measured",
    "layout-pipeline": "{subject} with {other} blocks: {step_text} a step; its devices have no work for {bubble_text} "
    "of it, and wait for links for {share_text}",
    "layout-several-members": "{subject} learn {useful:.2f} times as fast as {other}; their exchanges take "
    "{exchange_text} of a step of {step_text}",
    "layout-one-member": "{subject} would learn {useful:.2f} times as fast as {other}; their exchanges would take "
    "{exchange_text} of a step of {step_text}",
    "layout-outside": "{subject} needs the links inside a machine, and {other} are several",
    "layout-by-hand": "the links of {other} are fast enough: --set layout={subject} takes it",
    "layout-not-on-mps": "{subject} does not run on the GPU of a Mac",
    "layout-slow-link": "{other} would send for {exchange_text} in a step that computes for {compute_text}",
    "layout-large-share": "{other} need {needed_text} each, and {free_text} can be used",
    "layout-divided": "{other}: {step_text} a step",
}


def sentence(reason: Reason) -> str:
    """Return a reason as a sentence."""
    numbers = dict(reason.numbers)
    numbers |= {"bound": 100 * numbers["bound"]} if reason.code == "no-interval" else {}
    words = {f"{name}_text": share_text(number / 100) for name, number in numbers.items()}  # those that are per cent
    times = ("seconds", "exchange", "compute", "exposed", "step")
    words |= {f"{name}_text": time_text(numbers[name]) for name in times if name in numbers}
    words |= {f"{name}_text": memory_text(numbers[name]) for name in ("needed", "free") if name in numbers}
    words |= {"rate": rate_text(numbers["mbit"])} if "mbit" in numbers else {}
    if "loss" in numbers:
        words["higher"] = f"may be {words['loss_text']} higher" if numbers["loss"] >= 0.05 else "should be no higher"
    code = "owns-none" if reason.code == "owns-less" and numbers["percent"] < 0.5 else reason.code
    return WORDS[code].format(
        source=reason.subject,
        subject=machine_text(reason.subject),
        other=machine_text(reason.other),
        **numbers,
        **words,
    )


def in_use(planning: Planning | None) -> tuple[str, ...]:
    """Return a sentence about all machines that were measured while other programs used them, if there are any, and one
    about each whose speed is guessed."""
    doubts = planning.reasons if planning is not None else ()
    guessed = tuple(sentence(reason) for reason in doubts if reason.code == ESTIMATED)
    reasons = [reason for reason in doubts if reason.code == IN_USE]
    if len(reasons) < 2:
        return (*guessed, *(sentence(reason) for reason in reasons))
    *names, last = (reason.subject for reason in reasons)
    most = max(reason.numbers["others"] for reason in reasons)
    others = f"other programs used up to {share_text(most / 100)} of their processors"
    return (*guessed, f"measured while {', '.join(names)} and {last} were busy ({others})")


_PREFERRED = {
    "fastest": "",
    "closest-to-exact": "As you prefer, the way closest to exact. ",
    "least-traffic": "As you prefer, the way that sends least. ",
}


def plain_reasons(planning: Planning) -> tuple[str, ...]:
    """Return why the chosen candidate plan was chosen, in one plain sentence, and why machines are left out of it."""
    best = planning.best
    if best is None or not best.predicted or best.choice.alone or best.choice.blocks:
        return tuple(sentence(reason) for reason in planning.reasons[:1])
    waiting = f"{share_text(best.waiting)} of the time"
    why = f"Merging only every {best.choice.interval} steps, the machines wait for the network {waiting}"
    if best.choice.interval <= 1:
        why = f"Merging in every step pays here, although the machines then wait for the network {waiting}"
    exact = "; ways about as fast are less exact" if "rather-exact" in {r.code for r in planning.reasons} else ""
    left_out = (sentence(reason) for reason in planning.reasons if reason.code in LEFT_OUT_CODES)
    return (f"{_PREFERRED[planning.job.preference]}{why}{exact}", *left_out)


def why_in_words(planning: Planning) -> str:
    """Return the decisive reason of a plan as a sentence; for a group, the time of its run."""
    best = planning.best
    if best is not None and best.seconds and not best.choice.alone:
        return str(run_time(planning, best))
    return sentence(planning.reasons[0]) if planning.reasons else ""
