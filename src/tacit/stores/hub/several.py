"""Several hubs that share the parameters out: each carries a part of what members exchange.

The first one keeps the texts by which members agree who takes part. A bucket's collectives go by one hub,
which the groups choose (`transports.relayed_group`). A round ends when all hubs have answered, or not at all,
as where a message of a member is missing. So while one hub is away, all are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from torch import Tensor

from tacit.errors import ConfigError, first_line
from tacit.stores.hub.link import EXAMPLE, AskedHub, HubLink, HubTies, HubWay
from tacit.transports.member_links import Board, Meeting, meeting_at
from tacit.transports.relayed_group import Done


class HubLinks(AskedHub):
    """A connection to each hub."""

    def __init__(self, links: Sequence[HubLink]) -> None:
        self._first, self._links, self.hubs = links[0], links, len(links)

    def ask(self, *asked: Any) -> Any:
        """The first hub's answer, while the others are there.

        Raises:
            RuntimeError: one is gone.
            AttachError: one is no hub.
        """
        for failure in [each.failure for each in self._links if each.failure is not None]:
            raise type(failure)(first_line(failure)) from failure
        return self._first.ask(*asked)

    def share(
        self, group: str, about: Mapping[str, Any], body: Sequence[Tensor], done: Done, hub: int
    ) -> None:
        """Send a share of a collective to one of them."""
        self._links[hub].share(group, about, body, done)

    def quit(self, group: str) -> None:
        """Take no more part in a group."""
        for each in self._links:
            each.quit(group)

    def close(self) -> None:
        """End the connections."""
        for each in self._links:
            each.close()


class HubsWay:
    """How members find and reach each other by several hubs; see `members.ways.Way`.

    Args:
        text: one for each share, with plus signs; each as `HubWay` takes it.

    Raises:
        ConfigError: one is none, or is there twice; or there is no secret.
    """

    longest_pause, carries = HubWay.longest_pause, True

    def __init__(self, text: str) -> None:
        parts = text.split("+")
        if len({*parts}) < len(parts):
            raise ConfigError(
                f"hub={text!r} has a hub twice: write another one for each share, such as {EXAMPLE}"
            )
        self.hubs = len(parts)
        self._ways = [HubWay(part, (i + 1, len(parts))) for i, part in enumerate(parts)]
        self.name = f"one of the hubs at {' and '.join(parts)}"
        self.start = self._ways[0].start

    def connected(self, seconds: float, me: str = "") -> HubLinks:
        """As `HubWay.connected`, to all of them."""
        with ExitStack() as made:
            links = []
            for way in self._ways:
                links.append(way.connected(seconds, me))
                made.callback(links[-1].close)
            made.pop_all()
        return HubLinks(links)

    def ties(self, me: str) -> HubTies:
        """Who is connected to the first one."""
        return self._ways[0].ties(me)

    def meeting(
        self, name: str, me: str, limit: timedelta, is_off: Callable[[], bool], ask: Board | None = None
    ) -> Meeting:
        """Where the members of a period make groups, whose collectives go by the hubs."""
        links = self.connected(limit.total_seconds(), me)
        return meeting_at(links, name, limit, is_off, links.close)


def way_by(text: str) -> HubWay | HubsWay:
    """By the hubs that a user has written.

    Raises:
        ConfigError: one of them cannot be, or there is no secret.
    """
    return HubsWay(text) if "+" in text else HubWay(text)
