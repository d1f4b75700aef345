"""The secret that servers and workers share: where it comes from, and that it never shows."""

from __future__ import annotations

import copy
import os
import pickle
import traceback
from pathlib import Path

import pytest

from tacit.environment import SERVER_SECRET, SERVER_SECRET_FILE
from tacit.errors import ConfigError
from tacit.stores.secret import Secret, find_secret

WORDS = "correct horse battery"


def test_it_is_the_variables_or_the_files(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(WORDS + "\n")
    file.chmod(0o600)
    told = Secret(WORDS.encode()).proof("x", b"y")
    for secret in (
        find_secret(environment={SERVER_SECRET: f" {WORDS}\n"}),
        find_secret(environment={SERVER_SECRET_FILE: str(file)}),
        find_secret(file, environment={}),
        find_secret(file, environment={SERVER_SECRET: "another one of some length"}),
    ):
        assert secret is not None
        assert secret.proof("x", b"y") == told
    assert find_secret(environment={}) is None
    assert find_secret(environment={SERVER_SECRET: ""}) is None


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are both set: unset one"):
        find_secret(environment={SERVER_SECRET: WORDS, SERVER_SECRET_FILE: str(tmp_path)})


@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_short_one_is_refused_and_why(size: int) -> None:
    with pytest.raises(ConfigError, match=f"has {size} bytes, and fewer than 16 could be guessed"):
        find_secret(environment={SERVER_SECRET: " " * 20 + "x" * size} if size else {SERVER_SECRET: " " * 20})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(WORDS)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"its mode is {mode:o}.*: chmod 600 .*secret"):
        find_secret(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: No such file"):
        find_secret(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        find_secret(tmp_path)
    with pytest.raises(ConfigError, match="is no plain file"):
        find_secret(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no plain file"):
        find_secret(tmp_path / "pipe")


def test_it_never_shows() -> None:
    secret = Secret(WORDS.encode())
    shown = [repr(secret), str(secret), f"{secret}", repr({"a": secret}), repr(vars(type(secret)))]
    try:
        raise ValueError(f"something about {secret!r}")
    except ValueError:
        shown.append(traceback.format_exc())
    assert not any(WORDS in each or WORDS[:8] in each for each in shown)
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not to be pickled"):
            call(secret)  # type: ignore[operator]


def test_a_proof_is_of_who_gives_it_and_of_all_that_was_seen() -> None:
    secret = Secret(WORDS.encode())
    proofs = {
        secret.proof(*seen)
        for seen in (
            ("worker", b"a", b"b"),
            ("server", b"a", b"b"),
            ("worker", b"ab", b""),
            ("worker", b"", b"ab"),
            ("worker", b"ab"),
            ("worker", b"b", b"a"),
        )
    }
    assert len(proofs) == 6
    assert all(len(proof) == 32 for proof in proofs)
    assert Secret(WORDS.encode() + b"!").proof("worker", b"a", b"b") not in proofs
