"""What the parameters of a text stand for: its grammar, and the codecs and topologies that words name."""
