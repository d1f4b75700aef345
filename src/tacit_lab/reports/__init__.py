"""Turn records into tables, pages and traces; reads records only, also those of another machine."""

from tacit_lab.reports.comparison import MEANINGS, Comparison, Row, compare
from tacit_lab.reports.page import page
from tacit_lab.reports.reading import salvage
from tacit_lab.reports.summary import doubts
from tacit_lab.reports.table import table
from tacit_lab.reports.trace import trace

__all__ = ["MEANINGS", "Comparison", "Row", "compare", "doubts", "page", "salvage", "table", "trace"]
