"""The common part of the launcher and its workers, as far as scripts import it."""
