"""A worker's side of the local channel: submits operations to the node's daemon and waits for them. Knows no torch.

`client.py` has the interface; `joining.py` connects; `channel.py` sends, receives and ends operations; `clocks.py`
numbers the operations of a name; `operation.py` has the operation and the terms of a planned bucket.
"""

from fusion_rt.client.client import Client
from fusion_rt.client.operation import Operation, Terms

__all__ = ["Client", "Operation", "Terms"]
