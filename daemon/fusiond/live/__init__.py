"""What a job does right now, told by its daemons: `fusiond top`, `fusiond dashboard`, metrics for Prometheus."""
