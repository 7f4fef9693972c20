"""The linear equations that belong to an equilibrium: adjoints, tangents and Newton systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equipoise.core.tree import row_norm
from equipoise.solvers.ahead import CompiledRuns
from equipoise.solvers.coordinates import Reduced
from equipoise.solvers.problem import Linearization, Problem
from equipoise.solvers.protocol import Point

__all__ = ["LinearProblem", "func_jvp", "func_vjp"]

MAX_BLOCK = 2**20
"""Numbers in the states of one product with repeated rows at most; bounds its memory."""


class LinearProblem(Problem):
    """`v = J v + g`, or `v = J^T v + g`, with `J` the Jacobian of a problem at a point.

    Its arguments are `(g, point, *base.args)`. With a linearisation the products are fast, which
    solving needs; without one they are made by `torch.func`, and the map can be differentiated in
    the arguments again, which derivatives of higher order need.

    Residuals are relative to `max(|f(v)|, |g|)`: smaller than `|v|` times machine epsilon they
    cannot become. Those of Newton systems, solved roughly, are relative to `|g|` alone.

    Args:
        base: The problem whose Jacobian it is.
        point: Where.
        g: The constant term.
        transpose: Whether to use the transposed Jacobian.
        local: The linearisation of `base` at `point`.
        forcing: Whether residuals are relative to `|g|` alone, as Newton's forcing terms are.
        size: What residuals are relative to in place of `|g|`.
        rows: The samples that are left, of those above; by default all. They are copied when they
            are first used: by then a solve has freed what it had of the others. An earlier
            selection's copies are not copied again but freed, and what products do not need
            is not copied at all.
    """

    affine = True

    def __init__(
        self,
        base: Problem,
        point: Tensor,
        g: Tensor,
        *,
        transpose: bool,
        local: Linearization | None = None,
        forcing: bool = False,
        size: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self._whole = base, point, g, local, size
        self._rows = rows
        if rows is None:  # the common case, at once: each first use would cost a microsecond
            self.base, self.point, self.g, self.local = base, point, g, local
        self.transpose = transpose
        self.forcing = forcing
        self.mutable_args = frozenset(index + 2 for index in base.mutable_args)
        self.symmetric = base.symmetric
        self.can_drop_rows = base.can_drop_rows
        self.coupled, self.coupled_name = base.coupled, base.coupled_name
        self.work = base.work
        # Without a selection of its own the linearisation is recorded again, and its graph with it.
        self.evaluations_to_select = 0.0 if local is None or local.select_rows else 2.0

    @cached_property
    def base(self) -> Problem:
        """The problem whose Jacobian it is."""
        assert self._rows is not None
        return self._whole[0].select_rows(self._rows)

    @cached_property
    def point(self) -> Tensor:
        """Where."""
        return self._selected(self._whole[1])

    @cached_property
    def g(self) -> Tensor:
        """The constant term."""
        return self._selected(self._whole[2])

    @property
    def constant(self) -> Tensor:  # type: ignore[override]
        """The same, which residuals are relative to as well."""
        return self.g

    @cached_property
    def args(self) -> Sequence[Tensor]:  # type: ignore[override]
        """Every tensor that the map depends on, besides the state."""
        return (self.g, self.point, *self.base.args)

    @cached_property
    def local(self) -> Linearization | None:
        """The linearisation, if there is one."""
        local, rows = self._whole[3], self._rows
        if rows is None or local is None:
            return local
        return local.select_rows(rows) if local.select_rows else self.base.linearize(self.point)

    @cached_property
    def _scale(self) -> Tensor:
        g, size = self._whole[2], self._whole[4]
        return self._selected(row_norm(g) if size is None else size)

    def _selected(self, tensor: Tensor) -> Tensor:
        return tensor if self._rows is None else tensor.index_select(0, self._rows)

    def cost_per_row(self, width: int) -> int:
        return self._whole[0].cost_per_row(width)

    @cached_property
    def _fast_product(self) -> Callable[[Any], Any] | None:
        if self.local is None:
            return None
        # The two products are equal for a symmetric Jacobian, and autograd's transposed one is the
        # cheaper.
        return self.local.vjp if self.transpose or self.symmetric else self.local.jvp

    def product(self, v: Tensor) -> Tensor:
        """Return the linear part at `v`."""
        self.work.count += 1
        if self._fast_product is None:
            return self._differentiable_product(v)
        product: Tensor = self._fast_product(v)
        return product

    def __call__(self, v: Tensor) -> Tensor:
        fast = self._fast_product
        if fast is None:
            return self.product(v) + self.g
        self.work.count += 1
        value: Tensor = fast(v) + self.g
        return value

    def matrix(self) -> Tensor:
        """Return the linear part of each sample as a matrix, shape (samples, width, width).

        Row `i` of `J` is `J^T e_i`. Where rows are independent, one product with repeated rows
        gives many of them at once.
        """
        local = self.linearized().local
        assert local is not None
        samples, width = self.g.shape
        try:
            rows = self._repeated(local) if self.can_drop_rows else self._in_turn(local)
        except RuntimeError:  # a step that knows its batch size, such as by a mask that it keeps
            rows = self._in_turn(local)
        self.work.count += width
        matrix = rows.view(samples, width, width)
        return matrix.mT.contiguous() if self.transpose else matrix

    def _repeated(self, local: Linearization) -> Tensor:
        """Return `J^T e_i` for all samples and all `i`, in blocks of bounded size."""
        samples, width = self.g.shape
        found = self.g.new_empty(samples * width, width)
        size = max(MAX_BLOCK // max(width, 1), 1)
        for first in range(0, len(found), size):
            numbers = torch.arange(first, min(first + size, len(found)), device=found.device)
            rows = numbers // width
            units = self.g.new_zeros(len(rows), width)
            units.scatter_(1, (numbers % width)[:, None], 1.0)
            if local.select_rows is not None:
                part = local.select_rows(rows)
            else:
                before = self.work.count
                part = self.base.select_rows(rows).linearize(self.point[rows])
                self.work.count = before
            found[first : first + size] = part.vjp(units)
        if local.select_rows is None:
            self.work.count += width  # each sample was evaluated as many times
        return found

    def _in_turn(self, local: Linearization) -> Tensor:
        samples, width = self.g.shape
        found = self.g.new_empty(samples, width, width)
        for index in range(width):
            unit = torch.zeros_like(self.g)
            unit[:, index] = 1
            found[:, index] = local.vjp(unit)
        return found

    def _differentiable_product(self, v: Tensor) -> Tensor:
        base = self.base.uncompiled()

        def step(z: Tensor) -> Tensor:
            return base.with_own_buffers()(z)

        if self.transpose:
            product: Tensor = func_vjp(step, self.point)[1](v)[0]
            return product
        return func_jvp(step, [self.point], [v])

    def linearized(self) -> LinearProblem:
        """Return the same problem with fast products."""
        if self.local is not None:
            return self
        return self._with_local(self.base, self.point, self.g, self.base.linearize(self.point))

    def linearize(self, z: Tensor) -> Linearization:
        problem = self.linearized()
        assert problem.local is not None
        assert problem._fast_product is not None
        other = problem.local.jvp if self.transpose else problem.local.vjp
        return Linearization(problem(z), problem._fast_product, other)

    def declared(self, z: Tensor) -> Linearization:
        return self.linearize(z)

    def scale(self, at: Point) -> Tensor:
        return self._scale if self.forcing else torch.maximum(at.length, self._scale)

    def compiled(self, z: Tensor) -> CompiledRuns | None:
        compiled = None if self.local is None else self.local.compiled
        return None if compiled is None else compiled()

    def scale_floor(self) -> Tensor:
        """Return what `scale` is at least, or always if `forcing`, shape (samples,)."""
        return self._scale

    def select_rows(self, rows: Tensor) -> LinearProblem:
        self.work.rows_left = len(rows)
        base, point, g, local, size = self._whole
        return LinearProblem(
            base,
            point,
            g,
            transpose=self.transpose,
            local=local,
            forcing=self.forcing,
            size=size,
            rows=rows if self._rows is None else self._rows[rows],
        )

    @property
    def columns(self) -> tuple[int, ...]:
        return self._whole[0].columns

    def scaled(self, unit: Tensor) -> LinearProblem:
        return self._with_local(self.base, self.point, self.g / unit, self.local, unit)

    def with_constant(self, g: Tensor) -> LinearProblem:
        """Return the same problem with another constant term."""
        return self._with_local(self.base, self.point, g, self.local)

    def with_args(self, args: Sequence[Tensor]) -> LinearProblem:
        g, point, *rest = args
        return self._with_local(self.base.with_args(rest), point, g, None)

    def freeze(self) -> LinearProblem:
        return self._with_local(self.base.freeze(), self.point, self.g, None)

    def reduced(self, z: Tensor) -> Reduced | None:
        """Return the problem in the coordinates of its linearisation, if it starts at zero."""
        if self.local is None or self.local.reduce is None or bool(z.any()):
            return None
        found = self.local.reduce(self.g)
        # Neither |g| nor the length of the coordinates is larger than |v|.
        problem = LinearProblem(
            self.base,
            self.point,
            found.constant,
            transpose=self.transpose,
            local=found.local,
            forcing=self.forcing,
            size=self._scale,
        )
        start = torch.zeros_like(found.constant)
        return Reduced(problem, start, found.constant, found.decode)

    def _with_local(
        self,
        base: Problem,
        point: Tensor,
        g: Tensor,
        local: Linearization | None,
        unit: Tensor | None = None,
    ) -> LinearProblem:
        size = None if self._whole[4] is None else self._scale
        return LinearProblem(
            base,
            point,
            g,
            transpose=self.transpose,
            local=local,
            forcing=self.forcing,
            size=size if size is None or unit is None else size / unit[:, 0],
        )


def func_vjp(step: Callable[..., Any], *primals: Tensor) -> tuple[Any, Callable[..., Any]]:
    """Return `step(*primals)` and `u -> J^T u`, both differentiable."""
    try:
        value, pull = torch.func.vjp(step, *primals)[:2]
    except RuntimeError as error:
        if "argument 'running_mean'" in str(error):
            raise ValueError(
                "A step with batch normalisation that updates running statistics must be "
                "differentiated in reverse mode, because torch cannot nest its derivatives; got "
                "forward mode. Use torch.func.vjp or jacrev, call eval(), or set "
                "track_running_stats=False."
            ) from error
        if "tensors do not have strides" not in str(error):
            raise
        raise ValueError(
            "A step with sparse tensors in compressed layouts (CSR, CSC, ...) must be "
            "differentiated once and backward only, because torch.func does not know them; got "
            "another derivative. Use to_sparse_coo()."
        ) from error
    return value, pull


def func_jvp(
    step: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    """Return `J t`, differentiable, as the derivative of `u -> J^T u`.

    torch cannot nest forward mode in forward mode.
    """
    value, pull = func_vjp(step, *primals)
    _, push = func_vjp(pull, torch.zeros_like(value))
    product: Tensor = push(tuple(tangents))[0]
    return product
