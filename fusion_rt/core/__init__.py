"""Ground types that every part shares."""
