"""Where the demo's figures are put."""

from pathlib import Path

import pytest

from flagship import README, RECORDS, of_demo, placed, shown

TABLE = """digits on 2x2@100mbit

algorithm accuracy seconds target speedup   nodes reduction     only
ddp         0.9804    57.8   23.1   1.00x  1303.6      0.0%     3.1%
topk        0.9692     6.4    4.1   9.09x    35.0     97.3%    28.0%

epochs 5, seed 0, target accuracy 0.95; without communication 1.8 s"""


def test_the_readme_has_a_place_for_the_table_and_its_date() -> None:
    readme = placed(README.read_text(), TABLE, "2031-05-06", 64)
    assert f"```\n{TABLE}\n```" in readme
    assert "on 2031-05-06, on 64 cores" in " ".join(readme.split())
    assert placed(readme, TABLE, "2031-05-06", 64) == readme
    with pytest.raises(SystemExit, match="has no place for the demo's table"):
        placed("nothing", TABLE, "2031-05-06", 64)


def test_the_readmes_table_is_of_the_records_that_stand_beside_it() -> None:
    where, table, readme = of_demo(RECORDS), shown(RECORDS), README.read_text()
    assert placed(readme, table, where.date[:10], where.cores) == readme


def test_records_of_something_else_are_refused(tmp_path: Path) -> None:
    lines = RECORDS.read_text().splitlines()
    other = tmp_path / "records.jsonl"
    other.write_text("\n".join(line for line in lines if '"topk"' not in line) + "\n")
    with pytest.raises(SystemExit, match="`make demo` trains ddp, bf16, powersgd"):
        of_demo(other)
