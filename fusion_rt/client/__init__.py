"""A worker's side of the local channel: submits operations to the node's daemon and waits for them. Knows no torch.

`client.py` is what others use; `joining.py`: the way in; `channel.py`: what is sent, what is under way and how it ends;
`clocks.py`: which operation of a name it is; `operation.py`: an operation, and what is said about it.
"""

from fusion_rt.client.client import Client
from fusion_rt.client.operation import Operation, Terms

__all__ = ["Client", "Operation", "Terms"]
