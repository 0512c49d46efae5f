"""Tables from the type of a message to its handler.

Each part of the daemon offers `handlers()`, next to the methods that they name. `app.peer_dispatch` joins those for the
messages of peers, `workers.connections` those for the messages of workers and tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Handlers: TypeAlias = Mapping[type[Any], Callable[..., None]]
"""Handlers by type of message. A handler of peers' messages is called with the sender's node, the message, and the
payload of a message that has one; one of local processes' messages with their connection and the message."""
