"""Ground types of the daemon."""
