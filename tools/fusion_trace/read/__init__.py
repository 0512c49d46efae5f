"""Rings of a job, read and put together: one axis of time, steps, and operations."""
