"""What went wrong in a session: failures, and numbers that are not finite."""
