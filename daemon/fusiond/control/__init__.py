"""Agreement between nodes on the operations to run, and reports of waits between ranks."""
