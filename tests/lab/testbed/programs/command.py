"""A command that runs a testbed: the cluster, the program and its arguments are given."""

import sys

from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed

if __name__ == "__main__":
    with Testbed(Cluster.parse(sys.argv[1])) as testbed:
        sys.exit(testbed.run(sys.argv[2:]).returncode)
