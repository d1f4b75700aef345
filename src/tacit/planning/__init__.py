"""Predictions of steps with other strategies and on other clusters: profiles, a simulation, and choices."""
