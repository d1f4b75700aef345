"""Become another interpreter: `python -m elastic_peer_exec PYTHON ARGUMENTS`, as a rank of the testbed."""

import os
import sys

os.execv(sys.argv[1], [sys.argv[1], "-u", *sys.argv[2:]])
