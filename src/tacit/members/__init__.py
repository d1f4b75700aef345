"""Replicas that come and go while training goes on."""
