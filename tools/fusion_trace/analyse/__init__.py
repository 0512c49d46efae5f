"""Analyses of a job's records: a module answers one question, with figures and a JSON document."""
