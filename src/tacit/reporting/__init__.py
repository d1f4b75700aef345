"""What a script reports while it trains: numbers by step, and files for `tacit run`."""
