"""The table: each module puts its rows into it."""

import built
import copied
import looped
import refused
import stepped
import written
from foreign_script import TABLE

__all__ = ["TABLE", "built", "copied", "looped", "refused", "stepped", "written"]
