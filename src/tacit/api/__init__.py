"""What a training script calls: `attach`, the session that it returns, and the bare hook."""
