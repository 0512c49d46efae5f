"""The real daemon, forked from a process that has its modules: each of many starts takes a tenth of the time."""
