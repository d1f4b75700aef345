"""Turn records into tables; reads records only, also those of another machine."""

from tacit.reports.comparison import MEANINGS, Comparison, Row, compare
from tacit.reports.table import table

__all__ = ["MEANINGS", "Comparison", "Row", "compare", "table"]
