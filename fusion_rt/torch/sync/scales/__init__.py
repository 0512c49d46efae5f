"""The scales of gradients, and of what is remembered of them: learning rates, loss scales, weights of ranks."""
