"""The way of an optimizer's gradients, or parameters, between this worker and the others."""
