"""Turn records into tables and pages; reads records only, also those of another machine."""

from tacit.reports.comparison import MEANINGS, Comparison, Row, compare
from tacit.reports.page import page
from tacit.reports.reading import salvage
from tacit.reports.table import table

__all__ = ["MEANINGS", "Comparison", "Row", "compare", "page", "salvage", "table"]
