"""Parameter servers, both ends: what answers the requests of `topologies.Star`.

A server is a separate process, started by `python -m tacit.stores.server`:

* `process`: takes messages one after the other, passes them to the services, and sends their replies;
* `listener`, `handshake`, `secret`: who is let in; `receiving`, `limits`, `allowed_types`: what may be sent;
* `registration`, `connection`, `liveness`: which workers there are, and whether they are still there;
* `service`, `averaging_service`, `parameter_service`: what a bucket's service does, without I/O;
  `payloads`, `optimizers`: how it decodes, adds and steps; `services`: all buckets of a server;
* `checkpoint`, `counters`: what it saves, and what it counts.

A worker reaches it by:

* `placement`: which server holds which parameters; `joining`: how workers join; `transport`: how they ask;
* `client`: the connection to one server; `connecting`: how it is made; `chunking`: long pushes in parts.

Both ends speak `protocol` (frames) and `messages` (their contents, read by `encoding`).
"""
