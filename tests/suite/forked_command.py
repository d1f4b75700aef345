"""`python forked_command.py torchrun WORDS` or `... tacit WORDS`: the command, whose processes are all forks.

It is to be a fork itself (`forks.ran`). What it imports and registers is gone with it.
"""

import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import fork_server
import forks
from forked_testbeds import forked_testbeds
from tacit_lab import cli

if __name__ == "__main__":
    forks.use_a_fork(lambda request: fork_server.leave(fork_server.run(request["argv"], request["env"])))
    del sys.argv[0]
    if sys.argv[0] == "torchrun":
        subprocess_handler.Popen = forks.Fork  # type: ignore[misc]
        torchrun.main()
    else:
        with forked_testbeds():
            cli.main()
