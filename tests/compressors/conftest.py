"""Where the tests of kernels keep `hostless`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "kernels"))
