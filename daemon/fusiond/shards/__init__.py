"""The parameter service of a node: the homes (shards and replicas) here, and the contributions of local workers to
homes anywhere. No I/O.

A contribution goes from the worker's arena to its home (encoded, where that is on another node), is taken in by the
algorithm, and is answered into the arena:

    push_pull.py       contributions of local workers, which wait for answers
    reassembly.py      pieces from peers, checked, and put together to messages (messages.py, which has their codecs)
    server.py          the homes here, and the threads that work on them; hosted_home.py: one home and its queue
    actions.py         the steps of an algorithm, carried out: answers, messages, refusals
    timeouts.py        contributions that have waited too long
    checkpoint.py      the saved state of homes and contributions
    mirrors.py         copies of shards on other nodes, which are told of each update (history.py)
    kept_shards.py     both, from one formation to the next
    occupied.py        ranks that wait in other operations, for which homes do not wait

`service.py` joins them. They share `node.py`: this node and its way to the others; `staleness.py`: the meters.
"""

from fusiond.shards.kept_shards import KeptShards
from fusiond.shards.service import ParameterService

__all__ = ["KeptShards", "ParameterService"]
