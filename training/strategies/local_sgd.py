"""Local SGD: each member trains alone, and every so many steps all go on from the mean of their weights.

Stich 2018 (arXiv 1805.09767), algorithm 1: ``theta_i <- theta_i - eta g_i``, and where ``H`` divides the step
``theta_i <- sum_k w_k theta_k / W``, with ``w_k`` samples (or tokens) of member ``k`` since the last mean. The state of
each member's optimizer stays with it.

Nothing overlaps with the exchange. The strategy with an outer optimizer does the same with a rate of 1 and no momentum,
and may overlap.
"""

from __future__ import annotations

from typing import ClassVar

from training.strategies.averaging import Averaging, AveragingCosts, AveragingOptions
from training.strategies.registry import register


class LocalSGDOptions(AveragingOptions):
    """Options of :class:`LocalSGD`."""


class LocalSGDCosts(AveragingCosts):
    """One mean of all weights every H steps."""

    interval_option = "local_sgd.sync_interval"


@register
class LocalSGD(Averaging):
    """Average the weights of all every ``H`` steps."""

    name: ClassVar[str] = "local_sgd"
    summary: ClassVar[str] = "weights averaged every so many steps, each machine's optimizer its own"
    options = LocalSGDOptions
    costs = LocalSGDCosts()
