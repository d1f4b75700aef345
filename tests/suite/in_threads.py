"""Replicas of one process, each in a thread of its own."""

import threading
from collections.abc import Callable


def in_threads(count: int, work: Callable[[int], object], seconds: float = 30) -> None:
    """Have each of them do it.

    Raises:
        BaseException: what one of them raised first.
    """
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
