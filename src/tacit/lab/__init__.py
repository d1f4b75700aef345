"""What measures: emulated clusters, recipes, records, reports. Only `cli` imports it."""
