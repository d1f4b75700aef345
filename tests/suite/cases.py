"""One test of many values: `for_each` is written as `pytest.mark.parametrize`, and makes one item of them."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def for_each(
    names: str | Sequence[str],
    values: Iterable[Any],
    ids: Callable[[Any], object] | Iterable[object] = repr,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the test with each of these values, all in one item.

    A value that fails does not keep the others from being tried: the first failure is raised, with a note
    that names it and all others. Fixtures are made once, so a test must not change them.

    Args:
        names: of the parameters, as in `pytest.mark.parametrize`.
        values: one for each call; where there are several names, a tuple, or a `pytest.param`.
        ids: what a failure calls the values, one for each, or made of it.
    """
    keys = names.replace(" ", "").split(",") if isinstance(names, str) else [*names]
    cases = [*values]
    told = [*map(ids, cases)] if callable(ids) else [*map(str, ids)]
    assert cases, "no values: it would pass whatever it says"
    assert len(told) == len(cases)
    rows = [case.values if hasattr(case, "marks") else case if len(keys) > 1 else (case,) for case in cases]
    named = [getattr(case, "id", None) or name for case, name in zip(cases, told, strict=True)]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **given: Any) -> None:
            failures: list[tuple[object, BaseException]] = []
            for name, row in zip(named, rows, strict=True):
                try:
                    test(*args, **given, **dict(zip(keys, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((name, error))
                except pytest.skip.Exception as error:
                    failures.append((name, AssertionError(f"a value that is skipped is not tried: {error}")))
            if failures:
                (first, error), *others = failures
                error.add_note(f"with {', '.join(keys)} = {first}; {len(failures)} of {len(rows)} fail")
                for name, other in others:
                    error.add_note(f"also {name}: {type(other).__name__}: {str(other)[:200]}")
                raise error

        signature = inspect.signature(test)
        assert {*keys} <= signature.parameters.keys(), f"{test.__name__} takes no {keys}"
        left = [each for name, each in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
