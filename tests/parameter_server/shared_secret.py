"""The secret of the tests' servers and workers."""

from tacit.parameter_server.secret import Secret

SECRET = Secret(b"a secret of the tests alone")
