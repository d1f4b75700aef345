"""The flame graph: one well-formed file in which boxes are as wide as what they stand for."""

from xml.etree import ElementTree

import pytest

from tacit_lab.profiling.flame import draw, merged
from tacit_lab.profiling.profile import ENDED, RankProfile, ThreadProfile

MS = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"
PROFILE = RankProfile(
    rank=0,
    first=1,
    wall_ns=(MS, MS),
    process_ns=(8 * MS, 8 * MS),
    threads=(ThreadProfile("main", ({"a": 4 * MS, "b": 2 * MS}, {"a": 8 * MS})),),
    stacks={"main;a;f;g": 2, "main;a;f": 1},
)


def boxes(text: str) -> dict[str, float]:
    """The widths of all boxes, by what they say when they are pointed at."""
    groups = ElementTree.fromstring(text).iter(f"{SVG}g")
    return {str(g.findtext(f"{SVG}title")): float(g.attrib["data-w"]) for g in groups}


def test_chains_share_the_exact_time_of_their_stage() -> None:
    assert merged([PROFILE]) == {"main;a;f;g": 4.0, "main;a;f": 2.0, "main;b": 1.0, ENDED: 1.0}
    assert sum(merged([PROFILE, PROFILE]).values()) == pytest.approx(8)


def test_a_box_is_as_wide_as_its_share_and_as_all_that_stands_on_it() -> None:
    found = boxes(draw(merged([PROFILE]), "title"))
    widths = {told.partition(":")[0]: width for told, width in found.items()}
    assert widths["all"] == pytest.approx(1400, abs=0.01)
    assert widths["main"] == pytest.approx(1400 * 7 / 8, abs=0.01)
    assert widths["f"] == pytest.approx(1400 * 6 / 8, abs=0.01)
    assert widths["g"] == pytest.approx(1400 * 4 / 8, abs=0.01)
    assert "f: 6.000 ms, 75.0%" in found


def test_callers_are_above_what_they_call_and_the_largest_is_left() -> None:
    groups = ElementTree.fromstring(draw({"main;a": 1.0, "main;b": 3.0}, "title")).iter(f"{SVG}g")
    rects = {str(g.get("data-n")): g.find(f"{SVG}rect") for g in groups}
    places = {
        name: (float(r.attrib["x"]), float(r.attrib["y"])) for name, r in rects.items() if r is not None
    }
    assert places["all"][1] < places["main"][1] < places["a"][1] == places["b"][1]
    assert places["b"][0] == places["main"][0] < places["a"][0]


def test_names_of_functions_may_hold_anything() -> None:
    text = draw({"main;a<b>&\"c\";'d' ]]> </script>": 1.0}, "x < y & z")
    assert any(told.startswith('a<b>&"c"') for told in boxes(text))
    script = ElementTree.fromstring(text).findtext(f"{SVG}script")
    assert script is not None
    assert "box.dataset.x - x" in script
    assert "width > 0.01" in script


def test_nothing_at_all_is_a_picture_too() -> None:
    assert boxes(draw({}, "nothing")) == {}
