"""Implementation of `fusion_rt.torch.large_batch`."""
