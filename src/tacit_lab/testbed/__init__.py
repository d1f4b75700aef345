"""The emulated cluster: network namespaces on one machine, with links as slow as one likes.

with Testbed(Cluster.parse("2x2@100mbit")) as testbed:
    result = testbed.run(["train.py", "--epochs", "1"])
"""

from tacit_lab.testbed.launch import Serving
from tacit_lab.testbed.results import Failure, Result
from tacit_lab.testbed.testbed import Testbed

__all__ = ["Failure", "Result", "Serving", "Testbed"]
