"""A worker's side of the local channel: submits operations to the node's daemon and waits for them. Knows no torch.

`client.py` has the interface, and `messages.py` the part of it for messages between ranks; `joining.py` connects;
`channel.py` numbers, sends, receives and ends operations.
"""

from fusion_rt.client.channel import Operation, terms
from fusion_rt.client.client import Client

__all__ = ["Client", "Operation", "terms"]
