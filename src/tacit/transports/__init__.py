"""All I/O between ranks: torch.distributed, N ranks inside one process, and a meter."""
