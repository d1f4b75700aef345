"""`--import`: algorithms of one's own in every command, in ranks, on servers, and by an entry point."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forks import COMMAND, Done, ran

METHOD = Path(__file__).with_name("my_method.py")
SOURCES = Path(__file__).parents[3] / "src"


def tacit(*words: str, cwd: Path) -> Done:
    """In a process of its own, as this one would know the algorithms from then on."""
    return ran("-u", COMMAND, "tacit", *words, cwd=cwd)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shutil.copy(METHOD, tmp_path)
    return tmp_path


def test_an_algorithm_of_ones_own_is_compared(namespaces: None, home: Path) -> None:
    words = ("--cluster", "2x1@1gbit", "--algorithms", "mine,mine:share=0.01", "--epochs", "1", "--json")
    done = tacit("compare", "digits", *words, "--import", "my_method", cwd=home)
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [row["algorithm"] for row in rows] == ["mine", "mine:share=0.01"]
    assert rows[0]["mb_between_nodes"] > 3 * rows[1]["mb_between_nodes"] > 0


@pytest.mark.parametrize("given", ["my_method", "my_method.py", "./my_method.py"])
def test_it_is_listed_with_its_parameters(home: Path, given: str) -> None:
    done = tacit("list", "mine", "--json", "--import", given, cwd=home)
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)
    assert row["changes"] == "a share, by a name of our own"
    assert [each["name"] for each in row["parameters"]] == ["share", "least"]


def test_its_docstring_is_told(home: Path) -> None:
    done = tacit("list", "mine", "--import", "my_method", cwd=home)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:2] == ["mine: a share, by a name of our own", "The largest entries."]
    assert lines[-2:] == [
        "  share=0.3333                of the entries, above 0 to 1 (float)",
        "  least=1                     not used (int)",
    ]


def test_a_script_may_name_it_by_the_environment(home: Path) -> None:
    code = "import tacit; print(tacit.from_env().name, tacit.parse('mine:share=0.5'))"
    variables = {"PYTHONPATH": str(SOURCES), "TACIT_ALGORITHM": "mine"}
    variables["TACIT_IMPORT"] = str(home / "my_method.py")
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.stdout.startswith("mine "), done.stderr
    assert "TopK(ratio=0.5" in done.stdout


def test_a_package_brings_algorithms_by_an_entry_point(home: Path) -> None:
    info = home / "methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tacit.algorithms]\nmethods = my_method\n")
    code = "import tacit; print(tacit.parse('mine').name)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(SOURCES), str(home)))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "mine\n", done.stderr
    (info / "entry_points.txt").write_text("[tacit.algorithms]\nmethods = nowhere\n")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "ConfigError: the entry point methods = nowhere of the group tacit.algorithms" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing", None, "--import 'missing' is no module that Python finds in "),
        ("my codecs", None, "write for example --import my_codecs for my_codecs.py there, or its path"),
        ("raising", "1 / 0", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("again", METHOD.read_text(), "again.mine cannot be the algorithm 'mine', as my_method has one"),
        ("argparse.py", "", "by the name argparse: rename yours"),
    ],
)
def test_what_cannot_be_imported_is_said(home: Path, name: str, content: str | None, says: str) -> None:
    folder = home / "of_mine"
    folder.mkdir()
    if content is not None:
        (folder / f"{name.removesuffix('.py')}.py").write_text(content)
        name = str(folder / f"{name.removesuffix('.py')}.py")
    done = tacit("list", "--import", "my_method", "--import", name, cwd=home)
    assert done.code == 2
    assert says in " ".join(done.err.split())
    assert "Traceback" not in done.err
