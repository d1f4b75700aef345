"""Ranks of one process, each in a thread of its own."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_threads(count: int, work: Callable[[int], T], seconds: float = 30) -> list[T]:
    """Have each of them do it; their results.

    Raises:
        BaseException: what one of them raised first.
    """
    errors, results = list[BaseException](), dict[int, T]()

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return [results[rank] for rank in range(count)]
