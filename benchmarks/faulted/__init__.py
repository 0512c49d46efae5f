"""Training under faults: the workers that `recovery` starts, with fusion_rt and with torchft, and their notes."""
