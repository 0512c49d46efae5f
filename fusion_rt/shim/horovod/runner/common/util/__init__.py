"""Helpers of the launcher and its workers, as far as scripts import them."""
