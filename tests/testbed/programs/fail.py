"""Ranks of which number 2 ends early, in the way that is asked for."""

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
            raise ValueError("rank two\nhas had enough")
        case "exit":
            sys.exit(7)
dist.all_reduce(x)
time.sleep(1000)
