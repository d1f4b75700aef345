"""Running exchanges: how generators of requests are combined, driven and answered."""
