"""Reads the rings of a job and puts them together: one axis of time, steps, and operations."""
