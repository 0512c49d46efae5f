"""The real daemon, which tests can hang."""
