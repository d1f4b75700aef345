"""A rank that leaves a process behind that has cut all ties, and then ends as it is asked to."""

import subprocess
import sys
import time

detach = (
    "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(1000)"
)
subprocess.run([sys.executable, "-c", detach], check=True)
print("up", flush=True)
match sys.argv[1]:
    case "error":
        time.sleep(1)
        sys.exit("no more")
    case "hang":
        time.sleep(1000)
