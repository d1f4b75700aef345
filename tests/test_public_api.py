"""What `import tacit` offers, and what an import that was right once says now."""

import ast
import pydoc
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import tacit
from tacit import _moved

ERRORS = {
    "AttachError",
    "CheckpointError",
    "ConfigError",
    "DecisionError",
    "NonFinite",
    "Overflow",
    "PayloadError",
    "PeerLost",
    "ProbeError",
    "RatesDiffer",
    "RoundError",
    "ServerLost",
    "TacitError",
    "TestbedError",
    "UnevenData",
}
FUNCTIONS = {
    "attach",
    "comm_hook",
    "from_env",
    "join_states",
    "log_metrics",
    "measure_consensus",
    "parse",
    "quantize_shards",
    "report",
    "trial",
}
OTHERS = {"Attached", "CommState", "Levels", "MemberSampler", "Members", "QuantizedShards", "Strategy"}
SUBMODULES = {
    "testing",
    "algorithms",
    "compressors",
    "contracts",
    "errors",
    "links",
    "merges",
    "optim",
    "overlap",
    "prediction",
    "rounds",
    "topologies",
}


def test_every_public_name_is_there_and_documented() -> None:
    assert len(tacit.__all__) == len(set(tacit.__all__))
    for name in [*tacit.__all__, *tacit.SUBMODULES]:
        assert getattr(tacit, name).__doc__, f"tacit.{name} has no docstring"


def test_the_names_are_these() -> None:
    assert set(tacit.__all__) == ERRORS | FUNCTIONS | OTHERS
    assert set(tacit.SUBMODULES) == SUBMODULES
    assert set(dir(tacit)) == {*tacit.__all__, *tacit.SUBMODULES, "__version__"}


def test_all_errors_are_public() -> None:
    from tacit import errors

    roots = (each for each in vars(errors).values() if isinstance(each, type))
    assert {each.__name__ for each in roots if issubclass(each, errors.TacitError)} == ERRORS


def test_type_checkers_and_editors_see_the_same_names() -> None:
    tree = ast.parse(Path(tacit.__file__ or "").read_text())
    (block,) = (each for each in tree.body if isinstance(each, ast.If))
    imported = {alias.asname or alias.name for each in block.body for alias in each.names}
    assert imported == {*tacit.__all__, *tacit.SUBMODULES}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_submodule_loads_when_it_is_first_used_and_hides_no_function() -> None:
    code = """import sys, tacit
submodules = {f"tacit.{name}" for name in tacit.SUBMODULES}
assert not submodules & {*sys.modules}
assert {getattr(tacit, name).__name__ for name in tacit.SUBMODULES} == submodules
assert "tacit.api" not in sys.modules
import tacit.api.attach, tacit.attaching.active_strategy
assert callable(tacit.attach)"""
    done = run(code)
    assert done.returncode == 0, done.stderr


MOST_MODULES = 150
"""That attaching `topk` loads, of all that tacit has."""


@pytest.mark.long
def test_what_a_strategy_does_not_use_is_not_loaded(tmp_path: Path) -> None:
    code = f"""import sys, tacit, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 10))
with tacit.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk") as session:
    loaded = [name for name in sys.modules if name.partition(".")[0] == "tacit"]
dist.destroy_process_group()
assert len(loaded) <= {MOST_MODULES}, (len(loaded), *sorted(loaded))
unused = ("planning", "stores", "fsdp", "checkpoint", "reporting", "prediction", "gradients.layerwise")
assert not [name for name in loaded if name.startswith(tuple(f"tacit.{{each}}" for each in unused))]
assert tacit.algorithms.topk is sys.modules["tacit.algorithms.topk"].topk"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_answers_and_algorithms_are_in_submodules() -> None:
    assert tacit.algorithms.dgc(ratio=0.01) == tacit.parse("dgc:ratio=0.01")
    assert tacit.compressors.TopK(0.01) == tacit.compressors.TopK(ratio=0.01)
    for module, name in ((tacit.compressors, "Part"), (tacit.prediction, "Predicted")):
        assert getattr(module, name).__name__ == name
    assert tacit.contracts.AllReduce
    assert issubclass(tacit.PeerLost, tacit.RoundError)


def test_scripts_that_write_the_short_name_go_on_to_work() -> None:
    for name in ("compressors", "merges", "optim", "overlap", "rounds", "topologies"):
        module = getattr(tacit, name)
        assert all(getattr(tacit, each) is getattr(module, each) for each in module.__all__)
        assert not {*module.__all__} & {*dir(tacit)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        tacit.atach  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'atach'"):
        exec("from tacit import atach")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tacit\.nonsense'"):
        import_module("tacit.nonsense")


def test_importing_tacit_imports_no_torch() -> None:
    code = "import tacit, sys; dir(tacit); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_that_of_the_package() -> None:
    assert tacit.__version__[0].isdigit()


# ---- what has another name now ------------------------------------------------------------------------


def said_by(code: str) -> str:
    """The error of an import, with its kind; "" where there is none."""
    try:
        exec(code)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def test_an_old_package_says_where_it_is() -> None:
    for old, new in _moved.MOVED.items():
        sentence = f"{old} is {new} now: write that instead"
        package, _, name = old.rpartition(".")
        assert said_by(f"from {package} import {name}").endswith(f"Error: {sentence}")
        if name not in ("Cluster", "LowBitPowerSGD", "__main__"):
            assert said_by(f"import {old}.attach") == f"ModuleNotFoundError: {sentence}"
        home, _, last = new.split(",")[0].rpartition(".")
        assert there(new.split(",")[0]) or hasattr(import_module(home), last), new


def test_a_name_that_is_nearly_right_says_the_right_one() -> None:
    says = "ImportError: tacit.compressors has no Topk. Did you mean 'TopK'?"
    assert said_by("from tacit.compressors import Topk") == says
    assert "class TopK" in pydoc.render_doc("tacit.compressors.TopK")  # which asks for a module of that name


def test_a_package_that_is_run_says_where_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tacit.parameter_server"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode
    assert "is tacit.stores.server now: write that instead" in done.stderr


def test_the_finder_is_asked_last_and_stands_once() -> None:
    _moved.install()
    assert sys.meta_path.count(_moved.OldImports) == 1
    code = "import sys, tacit; assert sys.meta_path[-1] is tacit._moved.OldImports"
    assert run(code).returncode == 0


def test_a_name_that_is_nearly_public_is_suggested() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'atach'. Did you mean 'attach'\?"):
        tacit.atach  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'Topk'. Did you mean 'TopK'\?"):
        tacit.compressors.Topk  # noqa: B018
