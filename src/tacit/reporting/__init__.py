"""What a script reports while it trains: numbers by step, and what `tacit run` is told."""
