"""When finished samples leave the batch."""

from __future__ import annotations

from equipoise.solvers.problem import Problem

__all__ = ["DropRule"]

CROWDED = 0.5
"""Finished samples leave in any case when at most this fraction is left."""
IN_VAIN = 0.15
"""Of a dear cell, they leave when more than this fraction of the needed rows was evaluated in vain.

That bounds the rows evaluated by about 1.15 times the needed ones, plus one look's.
"""
MIN_IDLE = 0.125
"""But not for a smaller fraction of the batch than this, because the copies are of all the rest."""
DEAR = 2**20
"""A cell is dear if an evaluation of the batch touches so many numbers.

Leaving copies half of the state, the context and the rule's memory. On one thread of an x86_64 CPU
that takes about as long as a dense tanh step with 2^21 numbers: 0.12 ms for 128 samples of width
128 and Anderson's memory; 0.04 ms against 0.02 at width 16, and 0.22 ms against 0.84 at width 512.
"""


class DropRule:
    """Weighs the rows evaluated in vain against the copies that leaving costs.

    It counts rows and looks at no clock, so that equal solves drop equal rows.

    Args:
        problem: The problem.
        width: Numbers in a row of its state.
    """

    def __init__(self, problem: Problem, width: int) -> None:
        self._cost = problem.cost_per_row(width)
        self._before = 0.0  # rows evaluated before the last samples left, or to let them leave
        self._step = 0

    def is_due(self, problem: Problem, step: int, rows: int, going: int, needed: int) -> bool:
        """Return whether the finished samples should leave now.

        Args:
            problem: What is left of the problem.
            step: Steps made.
            rows: Rows in the batch.
            going: Those of them that have not finished.
            needed: Rows that had to be evaluated up to now.
        """
        evaluated = self._before + rows * (step - self._step)
        price = problem.evaluations_to_select * going
        if going > CROWDED * rows:
            if rows * self._cost < DEAR or going > (1 - MIN_IDLE) * rows:
                return False
            if evaluated - needed <= IN_VAIN * needed + price:
                return False
        self._before, self._step = evaluated + price, step
        return True
