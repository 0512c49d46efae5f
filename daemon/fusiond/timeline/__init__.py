"""Horovod's timeline: a file of all operations that chrome://tracing and Perfetto show.

It is made of the records in the daemon's ring, which a process of its own reads while they are written
(`fusion_rt.tracing.reader`), turns into Horovod's lines (`writer.py`) and appends to a file that is a valid JSON array
after every write (`writer_process.py`). `controller.py` starts and ends that process when a setting or a worker wants a
timeline.

A process of its own, because the daemon may be killed in the middle of a write, which the kernel then cuts at the end
of a page; because a slow disk must not hold up the event loop; and because a bucket of a hundred tensors is a hundred
lines, at whose formatting the daemon's threads would wait for the interpreter.
"""
