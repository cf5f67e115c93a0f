"""Reasons of a plan as sentences, each with the number that decided."""

from __future__ import annotations

from distributed.planning.document import Planning, Reason

_GB = 1e9
WORDS = {
    "alone-wins": "{subject} alone is the fastest: {members:.0f} machines with {other} would be worth {useful:.2f} of "
    "it (an exchange takes {exchange:.3g} s, a step's compute {compute:.3g} s, {exposed:.3g} s of waiting a step)",
    "alone-is-enough": "{subject} alone is about as fast as the best group: {members:.0f} machines with {other} would "
    "be worth {useful:.2f} of it, and below 5 % no prediction tells which is faster",
    "about-equal": "{members:.0f} machines with {subject} over {other} are about as fast ({rival:.2f} against "
    "{useful:.2f}: below {percent:.0f} % no prediction tells which is faster): the simpler, more exact way is used",
    "about-equal-alone": "{subject} alone is about as fast ({rival:.2f} against {useful:.2f}: below {percent:.0f} % no "
    "prediction tells which is faster)",
    "not-predicted": "{subject} with {members:.0f} machines is not predicted: its cost is not known. It is "
    "used as the profile says",
    "no-group": "{subject} alone: these machines cannot train together (--explain says why)",
    "only-machine": "{subject} is the only machine that can train this",
    "group-wins": "{members:.0f} machines with {subject} reach the same loss {useful:.2f} times as fast as the best "
    "of them alone ({speed_up:.2f} times its samples/s)",
    "slowest-none": "nothing is sent over the network",
    "slowest-link": "the link {subject} to {other} decides the exchange: {mbit:.4g} Mbit/s, {seconds:.3g} s",
    "slowest-interface": "the network interface of {subject} decides the exchange: {mbit:.4g} Mbit/s for all peers "
    "together, {seconds:.3g} s",
    "slowest-air": "the Wi-Fi channel {subject} decides the exchange: {mbit:.4g} Mbit/s for all stations together, "
    "and a byte between two of them crosses it twice; {seconds:.3g} s",
    "slowest-hub": "the hub process on {subject} decides the exchange: {mbit:.4g} Mbit/s in and out, {seconds:.3g} s",
    "slowest-member": "the worker on {subject} decides the exchange: it encodes and moves {mbit:.4g} Mbit/s, "
    "{seconds:.3g} s",
    "exchange-hidden": "an exchange of {exchange:.3g} s is hidden behind compute",
    "exchange-exposed": "{exposed:.3g} s of a step of {step:.3g} s is waiting for the network ({share:.0f} %)",
    "interval": "one exchange every {interval:.0f} steps, {rounds:.0f} in the run: the loss may end {loss:.2g} % above "
    "that of per-step averaging (bound {bound:.2g} %)",
    "learning-rate": "the learning rate is multiplied by {factor:.2f} (lr_scaling = {subject}: a batch of {batch:.0f} "
    "where it was chosen for {reference:.0f})",
    "unequal-shares": "shares follow the measured speed: from {least:.0f} samples ({subject}) to {most:.0f} ({other})",
    "in-clear": "training traffic of the torch engine is not encrypted, and a lost member ends the run",
    "on-one-machine": "training traffic of the torch engine is not encrypted, and does not leave the machine; a lost "
    "member ends the run",
    "faster-in-clear": "{subject} over the torch engine would be worth {open:.2f} instead of {useful:.2f}; anybody on "
    "the network could read its training traffic, so it is only used if you ask for it: --set engine=torch",
    "hub-on-wifi": "the hub is on {subject}, which is on Wi-Fi: a cable would help most there",
    "hub-on-battery": "the hub is on {subject}, which runs on battery: plug it in",
    "costs-more": "{subject} is left out: with it the plan would be worth {joined:.2f}, without it {useful:.2f}",
    "no-room-beside": "{subject} is left out: it does not have the memory for its part",
    "accumulation-for-memory": "a step is cut into {accumulation:.0f} micro-batches instead of {before:.0f} to fit "
    "the memory; its result is the same",
    "accumulation-would-help": "{subject} waits for the network {share:.0f} % of a step; with {times:.0f} times the "
    "gradient_accumulation it would be {then:.0f} %, at {times:.0f} times the batch",
    "does-not-fit": "{subject} is left out: one sample needs {needed_gb:.1f} GB and {free_gb:.1f} GB are free",
    "would-fit-with-checkpointing": "it would fit {subject} with gradient_checkpointing = true "
    "({needed_gb:.1f} of {free_gb:.1f} GB), for a third more compute",
    "would-fit-with-lora": "it would fit {subject} with tuning = lora ({needed_gb:.1f} of {free_gb:.1f} GB)",
    "needs-sharding": "no setting would make it fit {subject}, and no strategy here cuts a model over machines: take a "
    "smaller model",
    "strategy-does-not-fit": "{subject} lacks the memory for {other}: {needed_gb:.1f} GB, {free_gb:.1f} GB are free",
    "no-speed": "{subject} is left out: its speed was not measured",
    "no-link": "{subject} has no measured link to {other} as the hub",
    "no-link-torch": "{subject} does not have a link to every machine, which the torch engine needs",
    "measured-in-use": "other programs used {others:.0f} % of the processors of {subject} while it was measured: "
    "measure again when it is idle",
    "not-measured": "{subject} is in the hosts file and was not measured",
    "fixed": "only {other} = {subject} was considered, as the profile says (--set {other}=auto compares all)",
    "mixed-systems": "the torch engine joins machines of one operating system only",
    "no-cost-model": "{subject} was not considered: its cost is not known",
    "no-interval": "{subject} was not considered: no interval keeps the expected loss within {bound_percent:.2g} %",
    "batch-too-small": "some groups were not considered: a step has fewer samples than members",
    "nothing-fits": "the job fits none of these machines",
}


def sentence(reason: Reason) -> str:
    """Return a reason in words."""
    numbers = dict(reason.numbers)
    numbers |= {f"{name}_gb": numbers[name] / _GB for name in ("needed", "free") if name in numbers}
    numbers |= {"bound_percent": 100 * numbers["bound"]} if "bound" in numbers else {}
    return WORDS[reason.code].format(subject=reason.subject, other=reason.other, **numbers)


def why_in_words(planning: Planning) -> str:
    """Return the deciding reason of a plan as a sentence."""
    return sentence(planning.reasons[0]) if planning.reasons else ""
