"""Predictors that are trained networks, and the files of their weights."""
