"""`forked_spawn.py --multiprocessing-fork CODE`: as `python -c CODE`, for a process of multiprocessing."""

import sys

if __name__ == "__main__":
    exec(sys.argv[2])
