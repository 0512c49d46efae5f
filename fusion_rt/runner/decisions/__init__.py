"""Decides on the course of a job, without I/O: its hosts, places, failures, and in an elastic job its epochs.

`launch` tells the events and carries out the decisions (`job_control.JobControl`).
"""
