"""What a bucket launches by each algorithm, and by some among 16 ranks; of an interpreter of its own.

`host_time` replaces kernels by nothing, and a kernel that was looked up once stays in its process.
"""

import json
import sys

import host_time


def launched(algorithm: str) -> float:
    launches = host_time.Launches()
    with host_time.training(algorithm, launches) as step:
        for _ in range(host_time.WARM):
            step()
        launches.found.clear()
        launches.buckets = 0
        step()
    return launches.found.total() / launches.buckets


if __name__ == "__main__":
    few = {algorithm: launched(algorithm) for algorithm in sys.argv[1].split(",")}
    host_time.RANKS = 16
    many = {algorithm: launched(algorithm) for algorithm in sys.argv[2].split(",")}
    print(json.dumps({"few": few, "many": many}))
