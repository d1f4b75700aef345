"""The user's model: which parameters are trained, wrapped or sharded."""
