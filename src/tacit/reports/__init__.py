"""Turn records into tables, pages and traces; reads records only, also those of another machine."""

from tacit.reports.comparison import MEANINGS, Comparison, Row, compare
from tacit.reports.page import page
from tacit.reports.reading import salvage
from tacit.reports.table import table
from tacit.reports.trace import trace

__all__ = ["MEANINGS", "Comparison", "Row", "compare", "page", "salvage", "table", "trace"]
