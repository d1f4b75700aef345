"""`python -m tacit` is the command `tacit`, of the same wheel; the library itself imports none of it."""

from importlib import import_module

if __name__ == "__main__":
    import_module("tacit_lab.cli").main()
