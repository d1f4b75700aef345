"""What tests in several folders share."""

import pytest

from tacit.cluster import Cluster
from tacit.errors import TestbedError
from tacit.testbed import Testbed


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where the system does not permit namespaces, and only there."""
    try:
        with Testbed(Cluster(1, 1)):
            pass
    except TestbedError as error:
        if "does not permit" not in str(error):
            raise
        pytest.skip(str(error))
