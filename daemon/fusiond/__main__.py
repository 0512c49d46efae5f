"""`python -m fusiond`."""

from fusiond.app.cli import main

main()
