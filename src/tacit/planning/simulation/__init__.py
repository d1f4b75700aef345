"""Steps of a training by a clock: its links, its processors, and what waits for what."""
