"""Distributed K-FAC: gradients are multiplied with an approximate inverse of the Fisher matrix before the step::

    from fusion_rt.torch.kfac import KFAC

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    preconditioner = KFAC(model, lr=0.1, factor_update_steps=10, inverse_update_steps=100)
    ...
    loss.backward()
    optimizer.synchronize()
    preconditioner.step()
    with optimizer.skip_synchronize():
        optimizer.step()

The method is that of J. Martens, R. Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature"
(1503.05671), for convolutions that of R. Grosse, J. Martens (1602.01407), shared out over the ranks as in
J. G. Pauloski et al., "KAISA" (2107.01739), in its variant in which every rank gets every eigendecomposition.
`layers.py` has what a layer contributes, `factors.py` how that is averaged over time and ranks, `assignment.py` who
decomposes what, and `preconditioner.py` the steps.
"""

from fusion_rt.torch.contrib.kfac.assignment import assign
from fusion_rt.torch.contrib.kfac.preconditioner import KFAC, KFACStatistics

__all__ = ["KFAC", "KFACStatistics", "assign"]
