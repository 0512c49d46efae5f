"""A discrete-event simulation of a job: what its steps would take on other links, with other codecs, or on more nodes.

It runs the daemon's own exchanges and algorithms, on arrays without contents, over simulated links; what is modelled,
and what is not, is in docs/simulation.md.

    simulator.py    time; what happens when; threads, which do one thing after the other
    model.py        what links, messages and kernels cost
    network.py      links: what is sent, queues, and arrives
    ghosts.py       arrays that have a length only, and what computes with them
    ghost_codecs.py what codecs make of a bucket: bytes, and time
    daemons.py      one node's daemon: threads, and the way to others; what it does:
    exchanges.py    ... all-reduces: fusiond.collectives, fusiond.transport.flow_control; or one node for all
    homes.py        ... homes: fusiond.algorithms
    programs.py     training processes: compute, submit, wait
    simulation.py   all of it, joined; what came of it

    recorded.py     a recorded job as a simulated one
    changes.py      what-ifs: replays it with something else
    measuring.py    what codecs cost on this machine
"""
