"""`python -m fusiond`."""

from fusiond.cli import main

main()
