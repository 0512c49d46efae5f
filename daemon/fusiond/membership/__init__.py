"""Membership of workers and nodes in the job, and its changes when some are lost."""
