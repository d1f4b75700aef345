"""Which rank is missing, and how the others end: a detector, barriers and a store whose calls time out."""
