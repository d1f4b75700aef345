"""The failure of a session: every later call raises the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tacit.errors import PeerLost, RoundError


class SessionFailure:
    """The error that ended a session's exchanges, if one did.

    Attributes:
        error: the error that is raised from now on; None while nothing has failed.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._raised = False
        self._explain: Callable[[BaseException], BaseException] = lambda error: error
        self._report: Callable[[BaseException], None] = lambda error: None
        self._alarm: Callable[[], BaseException | None] = lambda: None
        self._meet: Callable[[BaseException], None] = lambda error: None

    def report_to(
        self,
        explain: Callable[[BaseException], BaseException],
        report: Callable[[BaseException], None] | None = None,
        alarm: Callable[[], BaseException | None] | None = None,
        meet: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Ask `explain` which error to raise for an error of a collective, as a peer may be the cause.

        `report` is called with an error that all ranks of the session's scope know, and no others. `alarm`
        returns the loss of a peer that other ranks have noticed, or None. `meet` is called before an error is
        raised for the first time.
        """
        self._explain = explain
        self._alarm = alarm or self._alarm
        self._report = report or self._report
        self._meet = meet or self._meet

    def fail(self, error: BaseException) -> None:
        """Store an error, if none was stored before."""
        self.error = self.error or error

    def lane_failed(self, error: BaseException) -> None:
        """Store the error with which a lane has ended, in place of any before."""
        self.error = error

    def raise_first(self) -> None:
        """Raise the stored error, if there is one."""
        if self.error is not None:
            first, self._raised = not self._raised, True
            if first:
                self._meet(self.error)
            raise self.error

    def raise_lost(self) -> None:
        """Raise the loss of a peer that other ranks have noticed, if they have.

        A peer that aborts a collective ends it here too, without an error and with arbitrary numbers. So NaN
        on a device may be due to the loss.
        """
        self.raise_first()
        lost = self._alarm()
        if lost is not None:
            self.fail(lost)
            self.raise_first()

    @property
    def unraised(self) -> bool:
        """Whether there is an error that has not been raised."""
        return self.error is not None and not self._raised

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise in place of this one."""
        # A server knows which connection broke; the ranks together know why, which may be an earlier loss.
        if isinstance(error, PeerLost) or not isinstance(error, RoundError):
            return self._explain(error)
        self._report(error)
        return error

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace an error of a collective inside the block by the explained one, as the lane does.

        Raises:
            RoundError: the explained error.
        """
        try:
            yield
        except RuntimeError as error:
            found = self.explained(error)
            self.fail(found)
            raise found from (None if found is error else error)
