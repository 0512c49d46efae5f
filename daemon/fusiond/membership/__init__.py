"""Which workers and nodes are in the job, and what happens when some are lost."""
