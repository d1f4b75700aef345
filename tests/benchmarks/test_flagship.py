"""Where the demo's figures are put."""

from pathlib import Path

import pytest

from flagship import INDEX, README, RECORDS, of_demo, placed, quoted, shown

TABLE = """digits on 2x2@100mbit

algorithm accuracy seconds target speedup   nodes reduction     only
ddp         0.9804    57.8   23.1   1.00x  1303.6      0.0%     3.1%
topk        0.9692     6.4    4.1   9.09x    35.0     97.3%    28.0%

epochs 5, seed 0, target accuracy 0.95; without communication 1.8 s"""


def test_the_readme_has_a_place_for_the_table_and_its_date() -> None:
    readme = placed(README.read_text(), TABLE, "2031-05-06", 64)
    assert f"```\n{TABLE}\n```" in readme
    assert "on 2031-05-06, on a virtual machine with 64 cores" in " ".join(readme.split())
    assert placed(readme, TABLE, "2031-05-06", 64) == readme
    with pytest.raises(SystemExit, match="has no place for the demo's table"):
        placed("nothing", TABLE, "2031-05-06", 64)


def test_what_is_quoted_is_replaced_and_nothing_else() -> None:
    rows = (
        "`topk` | a paper | 1.00x, 2.0 % ¹",
        "`topk` | a paper | 3.00x, 4.0 %",
        "`int8` | one | 5.00x, 6.0 % ¹",
    )
    index = "".join(f"| {row} |\n" for row in rows[:2])
    assert quoted(index, TABLE) == index.replace("1.00x, 2.0 % ¹", "9.09x, 97.3 % ¹")
    assert "¹" in INDEX.read_text()
    with pytest.raises(SystemExit, match="quotes `int8` of the demo, which has not trained it"):
        quoted(rows[2].join(("| ", " |\n")), TABLE)


def test_the_readmes_table_is_of_the_records_that_stand_beside_it() -> None:
    where, table, readme = of_demo(RECORDS), shown(RECORDS), README.read_text()
    assert placed(readme, table, where.date[:10], where.cores) == readme
    assert quoted(INDEX.read_text(), table) == INDEX.read_text()


def test_records_of_something_else_are_refused(tmp_path: Path) -> None:
    lines = RECORDS.read_text().splitlines()
    other = tmp_path / "records.jsonl"
    other.write_text("\n".join(line for line in lines if '"topk"' not in line) + "\n")
    with pytest.raises(SystemExit, match="`make demo` trains ddp, bf16, powersgd"):
        of_demo(other)
