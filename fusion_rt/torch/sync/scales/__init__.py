"""The scales of gradients, and of residuals: learning rates, loss scales, weights of ranks."""
