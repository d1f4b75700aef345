"""What went wrong in a session: whatever it is asked for later fails with the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tacit.errors import PeerLost, RoundError


class SessionFailure:
    """The error that ended a session's exchanges, if one did.

    Attributes:
        error: what is raised from now on; None while nothing has failed.
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
        """Ask `explain` which error to raise for one of a collective, as that may be a peer's fault.

        `report` is called with an error that all ranks of the session's scope know of, and no others. `alarm`
        says which peer others have missed, if they have. `meet` is called before an error is raised at first.
        """
        self._explain = explain
        self._alarm = alarm or self._alarm
        self._report = report or self._report
        self._meet = meet or self._meet

    def fail(self, error: BaseException) -> None:
        """Note an error, if none was noted before."""
        self.error = self.error or error

    def lane_failed(self, error: BaseException) -> None:
        """Note the error with which a lane has ended, whatever was noted before."""
        self.error = error

    def raise_first(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            first, self._raised = not self._raised, True
            if first:
                self._meet(self.error)
            raise self.error

    def raise_lost(self) -> None:
        """Raise the peer's loss that others have noticed, if they have: what a device holds may be due to it.

        A peer that gives up a collective ends it here too, without an error, and with any numbers.
        """
        self.raise_first()
        lost = self._alarm()
        if lost is not None:
            self.fail(lost)
            self.raise_first()

    @property
    def unraised(self) -> bool:
        """Whether something has failed, and it was raised to nobody."""
        return self.error is not None and not self._raised

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise for this one."""
        # A server knows which connection broke, and the ranks together why: it may have been the second.
        if isinstance(error, PeerLost) or not isinstance(error, RoundError):
            return self._explain(error)
        self._report(error)
        return error

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Explain an error of a collective that is waited for inside the block, as the lane does.

        Raises:
            RoundError: the explained error.
        """
        try:
            yield
        except RuntimeError as error:
            found = self.explained(error)
            self.fail(found)
            raise found from (None if found is error else error)
