"""How much of the table of people's scripts is run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "every row of tests/user_scripts with every family, and not with one of them"
    parser.addoption("--all", action="store_true", help=words)
