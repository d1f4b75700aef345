"""Make predictors: record trainings, learn from the records, and judge what was learnt by its use."""
