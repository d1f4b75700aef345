"""The only I/O: torch.distributed, N ranks inside one process, and a meter."""
