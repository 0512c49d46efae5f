"""Decides what becomes of a job, without I/O: its hosts, places, failures, and in an elastic job its epochs.

`launch` tells what happens and carries out what is decided (`job_control.JobControl`).
"""
