"""The states, and what `elastic.run` is made of."""

from fusion_rt.torch.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
