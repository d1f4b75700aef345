import re

from tacit.reporting.prometheus import metrics_text

LABELS = r'(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*'
LINE = re.compile(rf"(?P<name>[a-z_][a-z0-9_]*)\{{(?P<labels>{LABELS})\}} (?P<value>\S+)")


def test_each_number_has_a_help_a_type_and_a_value() -> None:
    text = metrics_text({"rounds": 3, "compute_share": 0.75, "rounds_1": 2, "own_number": 1.5}, {"rank": "0"})
    assert text == (
        "# HELP tacit_rounds Rounds of exchange that were begun.\n"
        "# TYPE tacit_rounds counter\n"
        'tacit_rounds{rank="0"} 3\n'
        "# HELP tacit_compute_share Share of the time between rounds that was not spent waiting.\n"
        "# TYPE tacit_compute_share gauge\n"
        'tacit_compute_share{rank="0"} 0.75\n'
        "# HELP tacit_rounds_1 Rounds of exchange that were begun, level 1.\n"
        "# TYPE tacit_rounds_1 counter\n"
        'tacit_rounds_1{rank="0"} 2\n'
        "# HELP tacit_own_number Own number.\n"
        "# TYPE tacit_own_number gauge\n"
        'tacit_own_number{rank="0"} 1.5\n'
    )


def test_any_name_of_a_member_keeps_a_line_whole() -> None:
    line = metrics_text({"steps": 1}, {"rank": "0", "member": 'a"b\\c\nd'}).splitlines()[-1]
    found = LINE.fullmatch(line)
    assert found is not None
    assert found["labels"] == r'rank="0",member="a\"b\\c\nd"'
