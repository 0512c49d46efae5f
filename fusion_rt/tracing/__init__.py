"""The ring of recorded events: its writer, its files and its format."""
