import pytest

from tacit.errors import ConfigError
from tacit_lab.cli.parsing import shortened, split_algorithms


@pytest.mark.parametrize(
    ("text", "algorithms"),
    [
        ("ddp", ["ddp"]),
        ("ddp,topk:ratio=0.01,localsgd:sync_every=8", ["ddp", "topk:ratio=0.01", "localsgd:sync_every=8"]),
        ("topk:ratio=0.1,momentum=0.9,ddp", ["topk:ratio=0.1,momentum=0.9", "ddp"]),
        ("a:x=1,y=2,z=3,b:x=1,y=2", ["a:x=1,y=2,z=3", "b:x=1,y=2"]),
        ("3lc:sparsity=1.5,ddp,1bit-adam", ["three-lc:sparsity=1.5", "ddp", "onebit-adam"]),
        ("ddp,topk ratio=0.1", ["ddp", "topk ratio=0.1"]),
        (" ddp , topk:ratio=0.1 , momentum=0.9 ", ["ddp", "topk:ratio=0.1,momentum=0.9"]),
    ],
)
def test_a_list_is_split_between_algorithms_not_between_parameters(text: str, algorithms: list[str]) -> None:
    assert split_algorithms(text) == algorithms


@pytest.mark.parametrize("text", ["", "ddp,", ",ddp", "ddp,,topk"])
def test_a_missing_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="an algorithm is missing"):
        split_algorithms(text)


@pytest.mark.parametrize("text", ["ratio=0.1", "ddp,ratio=0.1"])
def test_a_parameter_without_an_algorithm_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"'ratio=0\.1' belongs to no algorithm: write topk:ratio=0\.1"):
        split_algorithms(text)


def test_of_a_long_line_what_was_given_is_cut_and_what_is_wrong_with_it_stays() -> None:
    line = f"tacit: topology={'9' * 5000} is unknown in dense:topology={'9' * 5000}: write ring"
    words = " is unknown in ", ": write ring"
    assert all(each in shortened(line) for each in words)
    assert len(shortened(f"{line}\n{line} {'long ' * 1000}")) < 1300
