"""The other end of `topologies.Star`: a parameter server, started by `python -m tacit.server`.

`averager` and `keeper` are the two services, which do no I/O; `host` gives them what arrives, one message
after the other, and sends what they reply.
"""
