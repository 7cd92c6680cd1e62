"""The best potentials for an instance, by linear programming with HiGHS (bound and notation: `potentials`).

    maximise    v x area + f_end - sum over i of (a_i + d_i)
    such that   v h + f(k, h - k) - f(k, h)                 <= 1      for every step        (k, h)
                f(k + 1, h + peak_i) - f(k, h)              <= a_i    for every arrival     (k, h, i)
                f(k - 1, h - prompt_i + 1) - f(k, h)        <= d_i    for every departure   (k, h, i)
                f_end - f(1, prompt_i - 1)                  <= d_i    for every departure of the last one
                f(0, 0) = 0,   f_end >= 0,   f(1, low) = 0            (adding a multiple of k to f changes nothing)

The potential is taken piecewise linear in h, with knots that are close together where few tokens are free. Each
constraint is then piecewise linear as well, and holds everywhere if it holds at its own knots. Other knots give another
bound, never a wrong one, and so does a solver that stops early: what it proposes is rounded and judged by `Potentials`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vasuki_solvers.items import Instance, Ints
from vasuki_solvers.potentials import Potentials, States

MAX_ROWS = 40_000  # of the linear program, about: it takes a second
MIN_KNOTS, MAX_KNOTS = 6, 64
UNIT = 2**40  # potentials are whole multiples of 1 / UNIT steps

Floats = NDArray[np.float64]
Terms = Sequence[tuple[Ints, Floats]]  # columns and coefficients, [rows, terms] each


def potential_bound(instance: Instance, *, threads: int = 1, time_limit_s: float = 10.0) -> int:
    """Steps that no plan undercuts; 0 where there are no `best_potentials`."""
    potentials = best_potentials(instance, threads=threads, time_limit_s=time_limit_s)
    return 0 if potentials is None else potentials.bound(instance)


def best_potentials(instance: Instance, *, threads: int = 1, time_limit_s: float = 10.0) -> Potentials | None:
    """Potentials with a good bound; None without highspy, with a prefill budget, and for more than about 40 items."""
    if importlib.util.find_spec("highspy") is None or instance.prefill_tokens_per_step is not None:
        return None
    if not len(instance) or _num_knots(States.of(instance), instance) < MIN_KNOTS:
        return None
    program = _Program(instance)
    x = program.solve(threads, time_limit_s)
    values = np.zeros((program.states.most + 1, instance.capacity + 1))
    for k, knots in enumerate(program.knots):
        values[k] = np.interp(np.arange(instance.capacity + 1), knots, x[program.offsets[k] :][: len(knots)])
    end, per_token_step = (round(UNIT * float(x[column])) for column in program.values)
    return Potentials(np.rint(UNIT * values).astype(np.int64), end, per_token_step)


class _Program:
    """The linear program, row by row. Its columns: f at the knots of each k, f_end, v, a of each peak, d of each
    prompt."""

    def __init__(self, instance: Instance) -> None:
        self.states = states = States.of(instance)
        peaks, self._peak_counts = np.unique(instance.peaks, return_counts=True)
        prompts, self._prompt_counts = np.unique(instance.prompts, return_counts=True)
        self.knots = _knots(states, instance.capacity, int(peaks[-1]), _num_knots(states, instance))
        self.offsets = np.cumsum([0, *map(len, self.knots)])
        end, per_token_step = self.values = range(self.offsets[-1], self.offsets[-1] + 2)
        self._rises = self.values.stop + np.arange(len(peaks) + len(prompts))
        self._instance = instance
        self._rows: list[tuple[Terms, float]] = []

        for k in range(1, states.most + 1):
            h = self._where(*states.steps(k), self.knots[k], self.knots[k] + k)
            change = [self._potential(k, h - k), _minus(self._potential(k, h))]
            self._add([*change, _constant(per_token_step, h, h)], 1.0)
        for peak, rise in zip(peaks.tolist(), self._rises[: len(peaks)].tolist(), strict=True):
            for k in range(states.most):
                h = self._where(*states.arrivals(k, peak), self.knots[k], self.knots[k + 1] - peak)
                change = [self._potential(k + 1, h + peak), _minus(self._potential(k, h))]
                self._add([*change, _constant(rise, h, -1)], 0.0)
        for prompt, rise in zip(prompts.tolist(), self._rises[len(peaks) :].tolist(), strict=True):
            last = np.array([prompt - 1])
            change = [_constant(end, last, 1), _minus(self._potential(1, last))]
            self._add([*change, _constant(rise, last, -1)], 0.0)
            for k in range(2, states.most + 1):
                h = self._where(*states.departures(k, prompt), self.knots[k], self.knots[k - 1] + prompt - 1)
                change = [self._potential(k - 1, h - prompt + 1), _minus(self._potential(k, h))]
                self._add([*change, _constant(rise, h, -1)], 0.0)

    def solve(self, threads: int, time_limit_s: float) -> Floats:
        """[columns] the solution, or whatever the solver has when its time is up."""
        import highspy

        num_columns = int(self._rises[-1]) + 1
        lp = highspy.HighsLp()
        lp.num_col_, lp.sense_ = num_columns, highspy.ObjSense.kMaximize
        lower, upper, worth = np.full(num_columns, -np.inf), np.full(num_columns, np.inf), np.zeros(num_columns)
        end, per_token_step = self.values
        lower[self.offsets[:2]] = upper[self.offsets[:2]] = lower[end] = 0.0
        worth[end], worth[per_token_step] = 1.0, self._instance.areas.sum()
        worth[self._rises] = -np.append(self._peak_counts, self._prompt_counts)
        lp.col_lower_, lp.col_upper_, lp.col_cost_ = lower, upper, worth

        starts, columns, coefficients = _merged(self._rows, num_columns)
        limits = np.concatenate([np.full(len(terms[0][0]), limit) for terms, limit in self._rows])
        lp.num_row_, lp.row_lower_, lp.row_upper_ = len(limits), np.full(len(limits), -np.inf), limits
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = starts, columns, coefficients

        highspy.Highs.resetGlobalScheduler(True)  # else it insists on the number of threads of the first solve
        highs = highspy.Highs()
        options = {"output_flag": False, "solver": "ipm", "run_crossover": "off"}
        for option, value in {**options, "threads": threads, "time_limit": time_limit_s}.items():
            highs.setOptionValue(option, value)
        highs.passModel(lp)
        highs.run()
        solution = np.asarray(highs.getSolution().col_value, np.float64)
        return np.nan_to_num(solution) if len(solution) == num_columns else np.zeros(num_columns)

    def _where(self, first: int, last: int, *knots: Ints) -> Ints:
        """The tokens in first ... last at which a constraint with these knots has to be stated."""
        inside = np.unique(np.concatenate(knots))
        return np.union1d(inside[(inside >= first) & (inside <= last)], [first, last] if first <= last else [])

    def _potential(self, k: int, h: Ints) -> tuple[Ints, Floats]:
        """f(k, h) as a combination of two columns."""
        knots = self.knots[k]
        left = np.clip(np.searchsorted(knots, h, "right") - 1, 0, max(0, len(knots) - 2))
        right = np.minimum(left + 1, len(knots) - 1)
        share = (h - knots[left]) / np.maximum(1, knots[right] - knots[left])
        return self.offsets[k] + np.stack([left, right], 1), np.stack([1 - share, share], 1)

    def _add(self, terms: Terms, limit: float) -> None:
        """Rows: the sum of all terms is at most `limit`."""
        if len(terms[0][0]):
            self._rows.append((terms, limit))


def _num_knots(states: States, instance: Instance) -> int:
    """As many for each k as `MAX_ROWS` allows: every constraint has those of two potentials."""
    kinds = len(np.unique(instance.peaks)) + len(np.unique(instance.prompts)) + 1
    return min(MAX_KNOTS, MAX_ROWS // (2 * kinds * (states.most + 1)))


def _knots(states: States, capacity: int, largest: int, count: int) -> list[Ints]:
    """For each k, about `count` numbers of tokens between low[k] and high[k]: three quarters of them where an arrival
    may have to wait, with fewer than `largest` tokens free."""
    close = max(1, 3 * count // 4)
    tight = capacity - np.rint(np.linspace(0, largest, close + 1)).astype(np.int64)
    loose = np.rint(np.linspace(0, capacity - largest, max(1, count - close) + 1)).astype(np.int64)
    knots = np.union1d(tight, loose)
    return [
        np.union1d(knots[(knots > low) & (knots < high)], [low, high])
        for low, high in zip(states.low.tolist(), states.high.tolist(), strict=True)
    ]


def _constant(column: int, h: Ints, coefficient: Ints | int) -> tuple[Ints, Floats]:
    """`coefficient` times a column, in a row for each h."""
    return np.full((len(h), 1), column), np.broadcast_to(np.asarray(coefficient, float), len(h))[:, None]


def _minus(terms: tuple[Ints, Floats]) -> tuple[Ints, Floats]:
    return terms[0], -terms[1]


def _merged(rows: list[tuple[Terms, float]], num_columns: int) -> tuple[Ints, NDArray[np.int32], Floats]:
    """All rows in compressed form, with every column at most once in a row."""
    keys, values, num_rows = [], [], 0
    for terms, _ in rows:
        height = len(terms[0][0])
        row = num_columns * np.arange(num_rows, num_rows + height)[:, None]
        keys += [(row + columns).ravel() for columns, _ in terms]
        values += [coefficients.ravel() for _, coefficients in terms]
        num_rows += height
    cells, where = np.unique(np.concatenate(keys), return_inverse=True)
    sums: Floats = np.bincount(where, np.concatenate(values)).astype(np.float64)
    starts = np.searchsorted(cells // num_columns, np.arange(num_rows + 1))
    return starts, (cells % num_columns).astype(np.int32), sums
