"""The secret of the tests' servers and workers."""

from tacit.stores.secret import Secret

SECRET = Secret(b"a secret of the tests alone")
