"""Runs the command as `python -m fusion_trace`."""

from fusion_trace.cli import main

main()
