"""A hub: members that come and go are connected to it alone, by one way out each."""
