"""Finds a missing rank, and ends the others: a detector, barriers, and a store whose calls time out."""
