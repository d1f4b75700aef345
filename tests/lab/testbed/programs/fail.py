"""Ranks of which number 2 ends early, in the way that is asked for.

A process that exits with a Gloo group open is aborted by torch about once in a dozen times, whatever its exit
code was to be: so the raising rank destroys its group after its traceback, and the exiting one skips it all.
"""

import atexit
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1000)
dist.all_reduce(x)
if dist.get_rank() == 2:
    match sys.argv[1]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill-keeper":
            os.kill(os.getppid(), signal.SIGKILL)
        case "raise":
            atexit.register(dist.destroy_process_group)
            raise ValueError("rank two\nhas had enough")
        case "raise-and-linger":
            atexit.register(time.sleep, 1000)
            atexit.register(dist.destroy_process_group)
            raise ValueError("rank two\nhas had enough")
        case "exit":
            os._exit(7)
dist.all_reduce(x)
time.sleep(1000)
