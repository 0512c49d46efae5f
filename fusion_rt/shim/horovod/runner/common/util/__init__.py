"""What the launcher and its workers have in common, as far as scripts import it."""
