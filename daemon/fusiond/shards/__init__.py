"""The homes on this node, and what local workers have posted to homes anywhere. No I/O.

A contribution goes from the worker's arena to its home (encoded, where that is on another node), is taken in by the
algorithm, and is answered into the arena:

    senders.py    what local workers have posted, and wait for
    incoming.py   pieces from peers, which become parcels; checks.py: whether there can be such a one
    timeouts.py   contributions that wait: told to whoever asks, and ended
    boxes.py      the homes here, and which thread takes in what when; box.py: one of them, and what waits for it
    steps.py      what an algorithm says, turned into what is done: answers, parcels, refusals
    state.py      what is saved of all that, and given back

`homes.py` joins them. They share `here.py`: which node this is, and its way to the others; `jobs.py`: work in threads;
`codings.py`: the codecs of parcels, `parcels.py`; `staleness.py`: the meters.
"""

from fusiond.shards.service import Homes

__all__ = ["Homes"]
