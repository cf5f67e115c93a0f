"""A plan as text: the choice, the reasons, and the ranking as a table of 80 columns."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Iterator

from app.console import visible
from app.wizard.state.ways import EXACT, SINGLE, label_of_run
from distributed.planning.cables import CABLES
from distributed.planning.documents.document import Candidate, Choice, Planning
from distributed.planning.reasons import LEFT_OUT_CODES, ROUTE_CODES, in_use, sentence
from distributed.planning.run_time import divided_members, plan_stages_text, run_time, steps_text, together_text
from profiles.errors import counted
from profiles.installation import program
from profiles.quantities import bytes_text, figure_text, memory_text, share_text, time_text
from training.records.plan import RunPlan
from training.strategies.registry import loss_sources
from training.strategies.user_strategy import sync_schedule_of

WIDTH = 80
ROWS = 12
_USES = {"shard": "each computes some of the samples", "tensor": "all compute each sample together"}
"""What the devices of a member do, by its layout."""
_HEAD = "   way                  over           n  step s  wait   raw useful  loss    B/h"


def candidate_text(candidate: Candidate) -> str:
    """Return ``diloco H=50 mxfp4``, ``alone``, or ``2 x 3 allreduce`` of two members of three devices."""
    choice = candidate.choice
    if choice.alone:
        return "alone"
    interval = f" H={choice.interval}" if choice.interval > 1 else ""
    if members := divided_members(choice.blocks):
        devices = f"{members} x {len(choice.members) // members}"
        return f"{devices} {choice.strategy}{interval}" if members > 1 else "divided model"
    return f"{choice.strategy}{interval}{f'+{choice.delay}' if choice.delay else ''} {choice.codec}"


def choice_text(choice: Choice) -> str:
    """Return ``desk, pc and studio, merging every 50 steps``, or ``studio alone``, without the strategy's name."""
    members = together_text(choice.members, choice.blocks)
    is_one_member = choice.alone or divided_members(choice.blocks) == 1
    return members if is_one_member else f"{members}, {_rhythm(choice)}"


def doubt_lines(planning: Planning | None, profile: str) -> Iterator[str]:
    """Yield why the predicted times for a profile may be wrong."""
    again = program("machines", "measure", f"{shlex.quote(profile)} --max-age 0")
    for text in in_use(planning):
        yield f"{text}: measure again when it is idle, with: {again}"


def way_text(plan: RunPlan) -> str:
    """Return how the members of a plan train together, in a sentence."""
    if plan.is_staged and plan.world_size == 1:
        use = _USES.get(plan.profile.run.layout, "each micro-batch passes through all of them")
        return f"{plan_stages_text(plan)}; {use}."
    if plan.world_size == 1:
        return f"{SINGLE}: nothing is exchanged."
    label, interval = label_of_run(plan), sync_schedule_of(plan.profile.strategy).interval
    if plan.is_staged:
        rhythm = f"every {counted(interval, 'step')}" if interval > 1 else "in every step"
        return f"{plan_stages_text(plan)}; the members merge what they have learnt {rhythm}."
    if interval > 1:
        return f"{label}: they merge what they have learnt every {counted(interval, 'step')}."
    effect = "as if one machine did all the work" if label == EXACT else "and send less than everything"
    return f"{label}: they merge in every step, {effect}."


def details_text(plan: RunPlan, planning: Planning | None) -> str:
    """Return the names that a plan has for experts, and its hash."""
    best = planning.best if planning is not None else None
    way = candidate_text(best) if best is not None else plan.profile.strategy.strategy
    return f"details: {way} over {plan.engine}, plan {plan.hash()}"


def _rhythm(choice: Choice) -> str:
    return f"merging every {counted(choice.interval, 'step')}" if choice.interval > 1 else "merging in every step"


def _cut(text: str, width: int) -> str:
    text = visible(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _row(candidate: Candidate, chosen: bool) -> str:
    title, over = _cut(candidate_text(candidate), 20), _cut(candidate.choice.over, 13)
    prefix = f"{'>' if chosen else ' ':2} {title:<20} {over:<13} {len(candidate.choice.members):>2}"
    if not candidate.predicted:
        return f"{prefix} not predicted"
    hourly = bytes_text(candidate.bytes_per_hour).replace(" ", "").removesuffix("B") if candidate.exchange else "-"
    wait = share_text(candidate.waiting)
    step = figure_text(candidate.step)
    loss = share_text(candidate.loss_increase) if candidate.loss_increase else "0"
    useful = f"{candidate.useful_speed_up:.2f}" if candidate.fits else "memory"
    return f"{prefix} {step:>7} {wait:>5} {candidate.speed_up:>5.2f} {useful:>6} {loss:>5} {hourly:>6}"


def table_lines(planning: Planning) -> Iterator[str]:
    """Yield the ranking, each distinct candidate once, in lines of at most 80 columns."""
    yield _HEAD
    seen = set[object]()
    for index, candidate in enumerate(planning.ranking):
        if candidate.choice.without_interval not in seen and len(seen) < ROWS:
            seen.add(candidate.choice.without_interval)
            yield _row(candidate, index == planning.chosen).rstrip()
    if omitted := len(planning.ranking) - len(seen):
        yield f"   and {omitted} more with --json: slower ways"


def explanation_lines(planning: Planning) -> Iterator[str]:
    """Yield the reasons, one a paragraph, and the sources of the expected loss."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    for reason in planning.reasons:
        yield from textwrap.wrap(visible(sentence(reason)), width, initial_indent="- ", subsequent_indent="  ")
    best = planning.best
    if best is not None:
        sources = loss_sources()
        for key in best.sources:
            line = f"source: {sources.get(key, key)}"
            yield from textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")


def summary_lines(planning: Planning, profile: str = "PROFILE") -> Iterator[str]:
    """Yield the chosen plan for a profile in a few lines."""
    best = planning.best
    if best is None:
        yield from explanation_lines(planning)
        return
    time = run_time(planning, best) if best.predicted else None
    lines = [] if best.choice.alone else [f"{'' if best.choice.blocks else 'Machines: '}{choice_text(best.choice)}."]
    lines += time.sentences if time is not None else [sentence(planning.reasons[0])]
    if best.choice.alone and time is not None:
        lines.append(sentence(planning.reasons[0]))
    lines += doubt_lines(planning, profile)
    for line in lines:
        yield from textwrap.wrap(visible(line), WIDTH, subsequent_indent="  ")
    if time is not None:
        mean = " on average" if best.has_smaller_steps else ""
        evaluations = f"evaluations: {time_text(best.evaluating)}" if best.evaluating else "without evaluations"
        yield f"{steps_text(best)}, {time_text(best.step)} each{mean}; {evaluations}"
    for member in best.members:
        passes = f" in {best.accumulation} passes" if best.accumulation > 1 else ""
        samples = counted(member.micro_batch * best.accumulation, "sample")
        free = memory_text(member.memory_free)
        memory = f", takes {memory_text(member.memory)} of {free} memory" if member.memory_free else ""
        traffic = f", sends {bytes_text(member.bytes_per_hour)} an hour" if member.bytes_per_hour else ""
        limit, mean = ("up to ", " on average") if best.has_smaller_steps else ("", "")
        compute = f"{limit}{samples}{passes} in {time_text(member.seconds)}{mean}"
        line = f"{_cut(member.name, 30)}: {compute}{memory}{traffic}"
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
    left_out = () if best.choice.alone else LEFT_OUT_CODES  # the first reason tells why one machine is better
    for reason in planning.reasons:
        if reason.code in (*ROUTE_CODES, *CABLES, *left_out, "data-stay"):
            yield from textwrap.wrap(visible(sentence(reason)), WIDTH, initial_indent="  ", subsequent_indent="    ")
