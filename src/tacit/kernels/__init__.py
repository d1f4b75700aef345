"""The few hot loops. Each has a reference in plain torch."""
