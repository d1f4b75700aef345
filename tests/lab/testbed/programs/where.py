"""A rank that says where it runs, without torch."""

import json
import os
import socket
import sys

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "LOGLEVEL")
ours = {name: value for name, value in os.environ.items() if name in names or name.startswith("TACIT_")}
print(json.dumps({"env": ours, "host": socket.gethostname(), "pid": os.getpid(), "argv": sys.argv[1:]}))
print("to stderr", file=sys.stderr)
