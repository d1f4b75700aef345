"""Turn records into tables, pages and traces; reads records only, also those of another machine."""

from tacit.lab.reports.comparison import MEANINGS, Comparison, Row, compare
from tacit.lab.reports.page import page
from tacit.lab.reports.reading import salvage
from tacit.lab.reports.table import table
from tacit.lab.reports.trace import trace

__all__ = ["MEANINGS", "Comparison", "Row", "compare", "page", "salvage", "table", "trace"]
