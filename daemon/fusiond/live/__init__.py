"""The state of a running job, told by its daemons: `fusiond top`, `fusiond dashboard`, metrics for Prometheus."""
