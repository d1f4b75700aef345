"""Where the demo's figures are put."""

import pytest

from flagship import INDEX, README, placed, quoted

TABLE = """digits on 2x2@100mbit

algorithm accuracy seconds target speedup   nodes reduction     only
ddp         0.9804    57.8   23.1   1.00x  1303.6      0.0%     3.1%
topk        0.9692     6.4    4.1   9.09x    35.0     97.3%    28.0%

epochs 5, seed 0, target accuracy 0.95; without communication 1.8 s"""


def test_the_readme_has_a_place_for_the_table_and_its_date() -> None:
    readme = placed(README.read_text(), TABLE, "2031-05-06", 64)
    assert f"```\n{TABLE}\n```" in readme
    assert "on 2031-05-06, on a virtual machine with 64 cores" in readme
    assert placed(readme, TABLE, "2031-05-06", 64) == readme
    with pytest.raises(SystemExit, match="has no place for the demo's table"):
        placed("nothing", TABLE, "2031-05-06", 64)


def test_what_is_quoted_is_replaced_and_nothing_else() -> None:
    rows = (
        "`topk` | a paper | 1.00x, 2.0 % ¹",
        "`topk` | a paper | 3.00x, 4.0 %",
        "`int8` | one | 5.00x, 6.0 % ¹",
    )
    index = "".join(f"| {row} |\n" for row in rows)
    assert quoted(index, TABLE) == index.replace("1.00x, 2.0 % ¹", "9.09x, 97.3 % ¹")
    assert "¹" in INDEX.read_text()
