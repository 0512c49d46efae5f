"""Parts that suites have in common: their arguments, jobs, peers, samples, results and tables."""
