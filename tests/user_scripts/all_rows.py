"""The table: each module puts its rows into it."""

import copy_rows
import loop_rows
import model_rows
import optimizer_rows
import refused_rows
import written_weight_rows
from user_script import TABLE

__all__ = [
    "TABLE",
    "copy_rows",
    "loop_rows",
    "model_rows",
    "optimizer_rows",
    "refused_rows",
    "written_weight_rows",
]
