"""Ways to reduce gradients, and predictions of a step with each, from which `--auto` and `--advise` choose."""
