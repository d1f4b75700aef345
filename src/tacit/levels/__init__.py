"""The levels of a strategy at work: each has a session, a transport, and a hook in torch."""
