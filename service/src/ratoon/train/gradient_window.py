"""The gradient window: counters, sums and how tokens were weighted since the last step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.router import RouteSums
from ratoon.rollout.selection import Counters
from ratoon.train.loss.spec import CounterDivisor, Loss, NoDivisor, Normalisation
from ratoon.train.loss.sums import LossSums
from ratoon.train.passes import PassTotals
from ratoon.train.prepare import Prepared
from ratoon.train.report.batch_sums import BatchSums, of_prepared
from ratoon_proto.types import DivideBy, TokenWeight


class WindowState(StrEnum):
    """EMPTY: no gradients. OPEN: sums of whole forward-backwards. TORN: one stopped half-way."""

    EMPTY = "empty"
    OPEN = "open"
    TORN = "torn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a report is made of, of one forward-backward or of a window."""

    counters: Counters
    sums: LossSums
    routes: RouteSums
    batch: BatchSums
    has_kl: bool

    @classmethod
    def of_pass(cls, prepared: Prepared, done: PassTotals) -> Totals:
        """Totals of one forward-backward."""
        return cls(
            counters=prepared.counters,
            sums=done.sums,
            routes=done.routes,
            batch=of_prepared(prepared),
            has_kl=prepared.loss.kl is not None,
        )


class GradientWindow:
    """The window of one trainer: EMPTY -> (TORN -> OPEN)* -> EMPTY.

    `begin` makes it TORN and `complete` OPEN, so that whatever stops a forward-backward in between
    leaves it TORN, from which only `clear` leads on.
    """

    def __init__(self) -> None:
        self.state = WindowState.EMPTY
        self._sums = LossSums()
        self._routes = RouteSums()
        self._batch = BatchSums()
        self._has_kl = False
        self._token_weight = TokenWeight.PER_TOKEN
        self._defaults: set[DivideBy] = set()
        self._tokens = 0
        self._sequences = 0
        self._whole_groups = 0
        self._group_keys: set[bytes] = set()

    @property
    def counters(self) -> Counters:
        return Counters(
            tokens=self._tokens,
            sequences=self._sequences,
            groups=self._whole_groups + len(self._group_keys),
        )

    @property
    def totals(self) -> Totals:
        return Totals(
            counters=self.counters,
            sums=self._sums,
            routes=self._routes,
            batch=self._batch,
            has_kl=self._has_kl,
        )

    @property
    def normalisation(self) -> Normalisation:
        """How the sums were weighted. Raises `RatoonError` WINDOW_EMPTY."""
        self.require_open()
        only = next(iter(self._defaults)) if len(self._defaults) == 1 else None
        return Normalisation(token_weight=self._token_weight, default_divide_by=only)

    def check(self, loss: Loss) -> None:
        """Whether a forward-backward of `loss` may join.

        Raises `RatoonError`: WINDOW_POISONED where the window is TORN, INVALID_ARGUMENT where it
        holds tokens of another weight.
        """
        if self.state is WindowState.TORN:
            raise _torn()
        if self.state is WindowState.OPEN and loss.token_weight is not self._token_weight:
            raise invalid(
                "loss.token_weight",
                loss.token_weight,
                f"{self._token_weight}, as in the rest of the window",
            )

    def begin(self, loss: Loss) -> None:
        """Gradients of one forward-backward start to be added."""
        self.check(loss)
        self._token_weight = loss.token_weight
        self.state = WindowState.TORN

    def complete(self, prepared: Prepared, totals: Totals) -> None:
        """All gradients of it are added. Groups that may come in parts count once a window."""
        assert self.state is WindowState.TORN
        self._defaults.add(prepared.loss.default_divide_by)
        self._tokens += prepared.counters.tokens
        self._sequences += prepared.counters.sequences
        if prepared.group_keys:
            self._group_keys |= prepared.group_keys
        else:
            self._whole_groups += prepared.counters.groups
        self._sums += totals.sums
        self._routes += totals.routes
        self._batch += totals.batch
        self._has_kl |= totals.has_kl
        self.state = WindowState.OPEN

    def divisor(self, divisor: CounterDivisor | NoDivisor) -> float:
        """The number to divide by; 0.0 where no token counts, whatever the divisor.

        Raises `RatoonError` WINDOW_EMPTY or WINDOW_POISONED.
        """
        self.require_open()
        if self._tokens == 0:
            return 0.0
        return divide_number(divisor, self.counters)

    def clear(self) -> None:
        """Back to EMPTY."""
        self.__init__()

    def require_open(self) -> None:
        """Raises `RatoonError` WINDOW_EMPTY or WINDOW_POISONED."""
        if self.state is WindowState.TORN:
            raise _torn()
        if self.state is WindowState.EMPTY:
            raise RatoonError(
                ErrorCode.WINDOW_EMPTY, "no ForwardBackward since the last step or discard"
            )


def divide_number(divisor: CounterDivisor | NoDivisor, counters: Counters) -> float:
    """The divisor as a number, given the counters."""
    if isinstance(divisor, NoDivisor):
        return 1.0
    counts = {
        DivideBy.TOKENS: counters.tokens,
        DivideBy.SEQUENCES: counters.sequences,
        DivideBy.GROUPS: counters.groups,
    }
    return counts[divisor.counter] * divisor.times


def _torn() -> RatoonError:
    return RatoonError(
        ErrorCode.WINDOW_POISONED,
        "a ForwardBackward stopped half-way: its window must be discarded",
    )
