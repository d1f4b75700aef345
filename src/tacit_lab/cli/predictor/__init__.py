"""`tacit predictor`: record trainings, train a predictor on the records, and evaluate it."""
