"""A test of many values tries them all, and names those that fail."""

from itertools import product

import pytest

from cases import for_each


def test_all_are_tried_and_those_that_fail_are_named() -> None:
    tried = []

    @for_each("x", [1, 2, 3, 4])
    def odd(x: int) -> None:
        tried.append(x)
        assert x % 2, "even"

    with pytest.raises(AssertionError, match="even") as told:
        odd()
    assert tried == [1, 2, 3, 4]
    assert told.value.__notes__[0] == "with x = 2; 2 of 4 fail"
    assert told.value.__notes__[1].startswith("also 4: AssertionError: even")


def test_what_should_have_been_raised_is_a_failure_of_its_value() -> None:
    @for_each(("given", "kind"), [(1, ValueError), ("x", ValueError)], ids=["one", "a letter"])
    def refused(given: object, kind: type[Exception]) -> None:
        with pytest.raises(kind):
            int(given)  # type: ignore[call-overload]

    with pytest.raises(pytest.fail.Exception) as told:
        refused()
    assert told.value.__notes__ == ["with given, kind = one; 1 of 2 fail"]


def test_a_value_may_not_skip_the_test() -> None:
    @for_each("x", [1])
    def skipped(x: int) -> None:
        pytest.skip("not today")

    with pytest.raises(AssertionError, match="is not tried: not today"):
        skipped()


def test_parameters_multiply_and_have_names() -> None:
    tried = []

    @for_each("a, b", [pytest.param(1, 2, id="low"), (3, 4)])
    @for_each("c", "xy", ids=str)
    def test(a: int, b: int, c: str) -> None:
        tried.append((a, b, c))

    test()
    assert tried == [(a, b, c) for (a, b), c in product([(1, 2), (3, 4)], "xy")]


def test_no_values_and_no_such_parameter_are_refused() -> None:
    with pytest.raises(AssertionError, match="no values"):
        for_each("x", [])
    with pytest.raises(AssertionError, match=r"takes no \['y'\]"):
        for_each("y", [1])(lambda x: None)


@for_each("value", [1, 2])
@pytest.mark.parametrize("other", [3, 4])
def test_it_is_one_item(value: int, other: int, request: pytest.FixtureRequest) -> None:
    assert request.node.name == f"test_it_is_one_item[{other}]"
