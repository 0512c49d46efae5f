"""Horovod's timeline: a file of all operations that chrome://tracing and Perfetto show.

What the engine does goes, as the `events` of `instrument.py`, to a process of its own (`scribe.py`), which turns them
into Horovod's (`chronicle.py`) and appends them to a file that is a valid JSON array after every write
(`array_file.py`). `desk.py` starts and ends that process when a setting or a worker wants a timeline.

A process of its own, because the daemon may be killed in the middle of a write, which the kernel then cuts at the end
of a page; because a slow disk must not hold up the event loop; and because a bucket of a hundred tensors is a hundred
lines, at whose formatting the daemon's threads would wait for the interpreter.
"""
