"""tacit: data-parallel training that is fast where the network is slow."""
