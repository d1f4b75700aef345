"""The table of parameter servers."""

from dataclasses import replace

from sample_records import ALONE, DDP, TOPK, WHOLE, comparison

from tacit_lab.records import parse
from tacit_lab.reports import page
from tacit_lab.reports.servers import servers

TOLD = {
    "server": 0,
    "pushes": 1200,
    "push_bytes": 5_000_000,
    "pulls": 1200,
    "pull_bytes": 7_000_000,
    "queue_seconds": 1.25,
    "stale": {0: 300, 1: 900},
    "late": 3,
}
BOTH = [TOLD, {**TOLD, "server": 1}]
SERVED = replace(TOPK, algorithm="ps-async", metrics={"rounds": 110, "servers": BOTH})


def test_every_server_has_a_row_with_what_it_counted() -> None:
    html = servers(comparison(DDP, SERVED, ALONE))
    assert html.count("<tr>") == 1 + 2
    told = {"pushes": "1,200", "MB pushed": "5.0", "MB pulled": "7.0", "queue s": "1.25", "late": "3"}
    for column, cell in {**told, "updates old": "0: 25 %, 1: 75 %"}.items():
        assert html.count(f'<td data-column="{column}">{cell}</td>') == 2


def test_it_survives_the_way_through_the_file() -> None:
    records = [parse(record.to_json()) for record in comparison(DDP, SERVED, ALONE)]
    assert servers(records) == servers(comparison(DDP, SERVED, ALONE))


def test_old_ages_are_told_together() -> None:
    end = replace(SERVED, metrics={"servers": [{**TOLD, "stale": dict.fromkeys(range(20), 5)}]})
    assert "9: 5 %, more: 50 %" in servers(comparison(end))


def test_the_page_has_the_table_where_there_are_servers_and_only_there() -> None:
    assert "Parameter servers" in page(comparison(DDP, SERVED, ALONE))
    assert "Parameter servers" not in page(WHOLE)
