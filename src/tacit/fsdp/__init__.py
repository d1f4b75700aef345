"""Models that FSDP2 shards."""
