"""The daemon: its parts joined, its messages dispatched, its command line."""
