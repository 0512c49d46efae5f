"""The parameter service of a node: the homes (shards and replicas) here, and the contributions of local workers to
homes anywhere. No I/O.

A contribution goes from the worker's arena to its home (encoded, where that is on another node), is taken in by the
algorithm, and is answered into the arena:

    push_pull.py       contributions of local workers, which wait for answers
    reassembly.py      pieces from peers, checked, and put together to messages (messages.py, which has their codecs)
    server.py          the homes here, the threads that work on them, and the steps of an algorithm, carried out;
                       hosted_home.py: one home, its queue, and its saved state
    mirrors.py         copies of shards on other nodes, which are told of each update
    waits.py           contributions that wait for answers, and ranks that wait elsewhere, for which homes do not wait

`service.py` joins them, and has their state saved and restored. They share `node.py`: this node, its way to others and
the room there; `staleness.py`: meters.
"""

from fusiond.shards.service import EndedShards, ParameterService, Then

__all__ = ["EndedShards", "ParameterService", "Then"]
