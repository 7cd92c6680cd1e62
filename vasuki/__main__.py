"""`python -m vasuki`."""

from vasuki.cli import main

main()
