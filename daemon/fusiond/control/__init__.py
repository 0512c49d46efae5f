"""Agreement between nodes on what is run, and reports of what waits for whom."""
