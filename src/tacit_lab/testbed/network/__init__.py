"""The testbed's nodes and the links between them."""
