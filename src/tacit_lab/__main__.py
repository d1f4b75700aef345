"""`python -m tacit_lab` is `tacit`."""

from tacit_lab.cli import main

main()
