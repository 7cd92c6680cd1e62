"""How many rows are worth waiting for: the temporal controller of Dynamic Prefill Packing (section 3.2).

Once an epoch it looks at S, a running mean of the 95th percentile of the time to first token, and at the share of the
epoch in which the device was busy:

    law      more rows (N + increase)          fewer rows (N x decrease)                       else
    aimd     S <= low, device not busy         S >= high                                       as before
    load     S >= high, device busy, twice     S outside the band, device not busy, twice      as before

`aimd` is the paper's equation 1. It works backwards under load: rows that wait for a busy device raise S, and batches
shrink when packing would help most; on an idle device it grows them though nothing is gained by waiting. `load` turns
that around, and asks for two epochs in a row, as the paper's section 3.5 does and its equation does not.
"""

from __future__ import annotations

import math
from collections import deque

from vasuki.arrivals.gathering import Gathering


class Controller:
    """The threshold N. Times are seconds since any one moment; those given to each method never fall.

    Attributes:
        rows: N.
        rows_per_s: running mean of arrivals.
        ttft_s: S; None until a first token was seen.
    """

    def __init__(self, config: Gathering) -> None:
        self.rows = config.min_rows
        self.rows_per_s = 0.0
        self.ttft_s: float | None = None
        self._config = config
        self._epochs = 0  # that are over
        self._wanted = 0  # direction in which the last epoch would have moved N
        self._arrivals: deque[float] = deque()
        self._first_tokens: deque[tuple[float, float]] = deque()
        self._idle: deque[tuple[float, float]] = deque()

    @property
    def epoch_end_s(self) -> float:
        """When N may change next."""
        return (self._epochs + 1) * self._config.epoch_s

    def arrived(self, at_s: float) -> None:
        """Count a row that arrived."""
        self._arrivals.append(at_s)

    def first_token(self, at_s: float, ttft_s: float) -> None:
        """Note that a row has its first token, `ttft_s` after it arrived."""
        self._first_tokens.append((at_s, ttft_s))

    def idle(self, from_s: float, to_s: float) -> None:
        """Note that the device had nothing to do."""
        self._idle.append((from_s, to_s))

    def pass_time(self, now_s: float) -> None:
        """End the epochs that are over. What happened in them has been noted."""
        while self.epoch_end_s <= now_s:
            self._end_epoch(self.epoch_end_s)
            self._epochs += 1

    def _end_epoch(self, end_s: float) -> None:
        config, start_s = self._config, end_s - self._config.epoch_s
        arrivals, ttfts = 0, []
        while self._arrivals and self._arrivals[0] <= end_s:
            self._arrivals.popleft()
            arrivals += 1
        while self._first_tokens and self._first_tokens[0][0] <= end_s:
            ttfts.append(self._first_tokens.popleft()[1])
        while self._idle and self._idle[0][1] <= start_s:
            self._idle.popleft()
        idle_s = sum([max(0.0, min(to_s, end_s) - max(from_s, start_s)) for from_s, to_s in self._idle])
        self.rows_per_s = self._smoothed(self.rows_per_s, arrivals / config.epoch_s)
        if not ttfts:  # nothing is known of such an epoch; by an old S a quiet night would move N to a bound
            return
        p95_s = _percentile_95(ttfts)
        self.ttft_s = p95_s if self.ttft_s is None else self._smoothed(self.ttft_s, p95_s)
        busy = 1 - idle_s / config.epoch_s >= config.busy
        low = self.ttft_s <= config.low * config.target_s
        high = self.ttft_s >= config.high * config.target_s
        if config.controller == "aimd":
            self._move(-1 if high else int(low and not busy))
        else:
            wanted = int(high) if busy else -int(low or high)
            self._move(wanted if wanted == self._wanted else 0)
            self._wanted = wanted

    def _move(self, direction: int) -> None:
        config = self._config
        if direction > 0:
            self.rows = min(config.max_rows, self.rows + config.increase)
        elif direction < 0:
            self.rows = max(config.min_rows, math.ceil(config.decrease * self.rows))

    def _smoothed(self, before: float, newest: float) -> float:
        return before + self._config.smoothing * (newest - before)


def _percentile_95(values: list[float]) -> float:
    """The 95th percentile, interpolated as by numpy, whose call would take 50 us between two steps."""
    ordered, place = sorted(values), 0.95 * (len(values) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (place - math.floor(place)) * (high - low)
