import subprocess
import sys

import pytest

import tacit


def test_every_public_name_is_there_and_documented() -> None:
    assert len(tacit.__all__) == len(set(tacit.__all__))
    for name in tacit.__all__:
        assert getattr(tacit, name).__doc__, f"tacit.{name} has no docstring"
    assert set(tacit.__all__) <= set(dir(tacit))


def test_the_names_are_these() -> None:
    errors = {"AttachError", "CheckpointError", "ConfigError", "NonFinite", "PeerLost", "TacitError"}
    errors |= {"RatesDiffer", "ServerLost", "UnevenData"}
    compressors = {
        "BF16",
        "Clip",
        "Dense",
        "ErrorFeedback",
        "MomentumCorrection",
        "Phases",
        "PowerSGD",
        "RandomK",
        "Select",
        "Sign",
        "Then",
        "Threshold",
        "TopK",
    }
    compressors |= {"FP16", "FP8", "Int8", "LAG", "MajoritySign", "Natural", "OneBit", "QSGD", "TernGrad"}
    others = {
        "Auto",
        "Average",
        "Every",
        "EveryEpoch",
        "EveryStep",
        "Flat",
        "Hierarchical",
        "Levels",
        "Replace",
    }
    others |= {"Strategy", "Cluster", "Attached", "CommState", "GlobalTopK", "TwoPhase"}
    others |= {"AdaComm", "ByVariance", "OnPlateau", "Until", "Bucketwise", "Delayed"}
    others |= {"Cycling", "Elastic", "Inside", "Keep", "OuterStep", "SlowMo", "StaleMean"}
    others |= {"Adopt", "Asynchronous", "StaleSynchronous", "Star", "Synchronous"}
    functions = {"attach", "comm_hook", "from_env", "join_states", "log_metrics"}
    others |= {"GrowingBatches", "LAMB", "LARS"}
    functions |= {"scale_lr"}
    assert set(tacit.__all__) == errors | compressors | others | functions


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        tacit.atach  # noqa: B018


def test_a_submodule_does_not_hide_a_function() -> None:
    code = "import tacit.hooks.attach, tacit.hooks; import tacit; assert callable(tacit.attach)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_tacit_imports_no_torch() -> None:
    code = "import tacit, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_that_of_the_package() -> None:
    assert tacit.__version__[0].isdigit()
