"""Implementation of `fusion_rt.torch.kfac`."""
