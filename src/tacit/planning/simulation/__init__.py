"""A simulation of training steps: links, processors, and what waits for what."""
