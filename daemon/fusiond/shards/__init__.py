"""The parameter service of a node: the homes (shards and replicas) here, and the contributions of local workers to
homes anywhere. No I/O.

A contribution goes from the worker's arena to its home (encoded, where that is on another node), is taken in by the
algorithm, and is answered into the arena:

    push_pull.py       contributions of local workers, which wait for answers; meters of their staleness
    messages.py        messages to homes and back: codecs, pieces, and the way to other nodes, which all others share
    reassembly.py      pieces from peers, checked, and put together
    server.py          the homes here, and the threads that work on them; hosted_home.py: one home and its queue
    actions.py         the steps of an algorithm, carried out: answers, messages, refusals
    timeouts.py        contributions that have waited too long
    checkpoint.py      the saved state of homes and contributions
    mirrors.py         copies of shards on other nodes, which are told of each update (history.py)
    kept_shards.py     both, from one formation to the next
    occupied.py        ranks that wait in other operations, for which homes do not wait

`service.py` joins them.
"""

from fusiond.shards.kept_shards import KeptShards
from fusiond.shards.service import ParameterService

__all__ = ["KeptShards", "ParameterService"]
