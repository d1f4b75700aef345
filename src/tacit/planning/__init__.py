"""What a strategy would cost on a cluster that one may not have: profiles, a clock, and predictions."""
