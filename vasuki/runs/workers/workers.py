"""What a run needs of the workers that compute its rows: a model on a device of this process, or replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vasuki.engine.sequence import Decoded, Sequence
from vasuki.io.output.manifest import Manifest
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.observers.progress import Standing
from vasuki.runs.results import Results

if TYPE_CHECKING:
    from vasuki.hf.loading.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Intake:
    """What a loaded model takes."""

    tokenizer: Tokenizer
    max_context_tokens: int
    vocab_size: int
    computed_on: str  # see `LoadedModel.computed_on`; of replicas that differ, of each


class Workers(Protocol):
    """A run calls them in this order; `ask`, `standing` and `decode` are asked of those that compute.

    Attributes:
        count: how many there are, at first.
        where: rows are computed, in a line of the log; empty for here.
    """

    @property
    def count(self) -> int: ...

    @property
    def where(self) -> str: ...

    def load(self, refuse_late: Callable[[], object]) -> Intake:
        """Load the model. Raises ModelError, and what `refuse_late` raises that is called while they wait."""
        ...

    def plan(self, lengths: Lengths) -> Plan:
        """Plan for these rows, on as many workers."""
        ...

    def begin(self, plan: Plan) -> None:
        """Make everything ready for the rows."""
        ...

    def compute(self, results: Results, should_stop: Callable[[], bool]) -> None:
        """Run all rows to their ends.

        Args:
            results: takes what comes of them.
            should_stop: asked between two steps.

        Raises:
            Interrupted: `should_stop` said so, or nobody is left to go on.
        """
        ...

    def ask(self) -> None:
        """Ask how far the rows are that have begun; `results.note` is told, now or before long."""
        ...

    def standing(self) -> Standing:
        """How the workers stand, for the progress line."""
        ...

    def decode(self, row: Sequence) -> Decoded:
        """What the output of a row that has ended says."""
        ...

    def manifest(self, num_tokens: int, is_whole: bool) -> Manifest | None:
        """The manifest of what was done; None where no worker is left that knows.

        Args:
            num_tokens: of the rows that ended, prompts and outputs.
            is_whole: whether all rows have ended.
        """
        ...
