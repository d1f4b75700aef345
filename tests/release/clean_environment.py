"""Virtual environments in which tacit can be installed, with none of its sources in reach."""

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

OURS = ("tacit", "torch_tacit", "__editable__")
"""How the names begin of what an installation of tacit puts into site-packages."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that has the packages of this one but for tacit; `folder` is empty otherwise."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "env" / "bin"

    def run(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in the folder; it must end with this code."""
        ended = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=_variables()
            | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
            | {"TACIT_KERNELS": "reference"},  # those of this installation have not been compiled
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == code, f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended

    def pip(self, *arguments: str) -> None:
        """Have this environment's pip work on the other one, without an index."""
        python = str(self.bin / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, *arguments]
        subprocess.run(pip, check=True, capture_output=True, cwd=self.folder, env=_variables())

    def install(self, wheel: Path) -> None:
        self.pip("install", "--quiet", "--no-deps", "--no-index", str(wheel))


def _variables() -> dict[str, str]:
    """Those of this process, without the folders in which Python would look for other packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def new_environment(folder: Path) -> Environment:
    """A virtual environment whose site-packages are links to all of this one's, but for tacit."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    there = next((folder / "env" / "lib").glob("python*/site-packages"))
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(OURS) and each.name != "__pycache__":
            (there / each.name).symlink_to(each)
    return Environment(folder)
