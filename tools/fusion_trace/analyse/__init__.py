"""Figures found in a job's records: one question a module, each with a JSON document."""
