"""The command `tacit` and what it measures with: emulated clusters, recipes, records, reports."""
