"""The format of a trace: its events, and their layout in a file, which `recorder` writes and all tools read.

Every worker and every daemon has one file, a *ring*, that it maps into memory. Records have a fixed size; once the
ring is full, the oldest are overwritten, so that a file never grows, and how many were lost is known from the header.
A file can be read at any moment, also while it is written and after its writer was killed.

    offset 0                header: `HEADER`, then the strings host and job; at 2048 `processors.MACHINE`; at
                            `COMMAND_AT` the length of the command line (2 bytes), and it, UTF-8
    HEADER_NBYTES           names: `NAMES_NBYTES` of (length: 2 bytes, UTF-8), in order; the first is number 1
    HEADER_NBYTES + NAMES_NBYTES
                            `capacity` records: `RECORD`; record number i is in place i % capacity

Times are nanoseconds of the host's CLOCK_MONOTONIC, which all processes of a host share. The clocks of two hosts are
aligned with the records of kind `CLOCK`.
"""

from __future__ import annotations

import enum
import struct

MAGIC = b"FUSTRACE"
VERSION = 1
HEADER_NBYTES = 4096
NAMES_NBYTES = 1 << 20
NOBODY = 0xFFFF  # no peer
NO_NAME = 0  # also of names that found no room

RECORD = struct.Struct("<QqQIIIHH")
"""time (ns), value, clock, name (its number), plan (0: outside a plan), extra, kind, peer. 40 bytes."""

HEADER = struct.Struct("<8sIIQQQIIIIHHIQII")
"""magic, version, record size, capacity (records), monotonic time at creation (ns), wall-clock time then (ns since
1970), pid, rank (a daemon's: its node), node, nodes of the job, length of host, length of job, role, records written so
far, bytes of names, names that found no room. The last three change: `WRITTEN_AT`, `NAMES_AT`, `LOST_AT`."""

LOST_AT = HEADER.size - 4
NAMES_AT = HEADER.size - 8
WRITTEN_AT = HEADER.size - 16

COMMAND_AT = 3072
COMMAND_NBYTES = HEADER_NBYTES - COMMAND_AT - 2  # the rest of a longer one is left out; zeros: not recorded

WRITERS = 16  # threads of a process that may be writing a record at the same time, as readers of a live ring assume


class Role(enum.IntEnum):
    """The kind of process that owns a ring."""

    WORKER = 1
    DAEMON = 2


class Kind(enum.IntEnum):
    """The kind of an event. `name` is a bucket (`bucket 3`) or a tensor outside a plan, if nothing else is said; then
    `clock` and `plan` are those of the operation, alike in workers and daemons of all nodes.

    Of a worker:

    FORWARD_BEGIN … STEP_END: its model's forward pass, backward pass, `optimizer.step()`; clock: the step, from 0. A
        training step lasts from one STEP_END to the next. There may be several forward passes in a step (those of all
        outermost modules), and several backward passes; there may be none recorded: none is before the first
        STEP_END, without gradients, and in a script that compiles. STEP_END's value: processor time that the process
        has used, ns; extra: for how long this thread has waited for a processor, us, modulo 2**32 (0: not known).
    GRADIENT: a gradient is complete; name: the parameter, value: bytes, clock: the step.
    FULL: the last gradient of a bucket is there.
    SUBMITTED: the bucket or tensor is handed to the daemon; value: bytes, extra: why now (`Flush`).
    DONE: the daemon's answer was read.
    WAIT_BEGIN, WAIT_END: the script is kept waiting for it.
    COPY_BEGIN, COPY_END: gradients into the arena; APPLY_BEGIN, APPLY_END: results to where they belong; without a
        name: the script's optimizer's update, clock: the step.

    Of a daemon:

    READY: a local worker's part came; peer: its rank.
    NEGOTIATE_BEGIN, NEGOTIATE_END: the coordinator is asked about it, and has answered.
    RUN_BEGIN: all local parts are there, the operation starts; value: bytes. RUN_END: results are where they
        belong; value: processor time that the daemon has used, ns.
    FAILED: it failed.
    REDUCE_BEGIN … DECODE_END: work of kernels; value: bytes they read or, of a codec, packed. REDUCE with a peer: its
        chunk is taken into the result, coding included, which is recorded inside it. Of one operation several may run
        at a time, on several threads.
    QUEUED: a chunk waits for credit (extra: 0) or for its turn (extra: 1; perhaps after it has waited for credit).
        SENT: it is handed to the link; RECEIVED: a peer's chunk came; TAKEN: it was consumed. peer: the node, value:
        bytes of its payload, extra: its number among those of that link (SENT and RECEIVED of a chunk have the same),
        or 0.
    ANSWERED: the result was given to a worker; peer: its rank.
    APPLIED: a home took a contribution; peer: its rank, value: its staleness in versions.
    PLAN: a plan came, or, with all that follows, is still active (recorded again every few seconds, because a ring
        forgets); value: bytes, extra: number of buckets, clock: the number of a name that says what Horovod calls the
        operation (`ALLREDUCE`, `PUSH_PULL (process set 3)`). BUCKET: of it; extra: index, value: bytes. MEMBER: a
        tensor of that bucket; name: the tensor, extra: index of the bucket, value: bytes, clock: the number of a name
        that says dtype and shape (`float32 [2, 3]`). PLAN's name is the group.
    CLOCK: the peer's clock minus this one's; value: ns, extra: round trip (us, at most 2**32 - 1), peer: the node.
    LOST, FOUND: a connection (name) to a peer broke, and was made again. BLOCKED_BEGIN, BLOCKED_END: no more of an
        operation can be sent to it now, since it grants no credit. STALL: an operation has made no progress for so
        long; value: seconds. VIEW: the job's members changed; value: how many nodes there are now.
    GONE: a worker of this node (extra: 0, peer: its rank) or another node's daemon (extra: 1, peer: the node) has died
        or failed; or the job fails (extra: 2, no peer). name: why, in words.
    TIMELINE: Horovod's timeline begins (value: 1) or ends (0) in a file (name). TENSOR: while there is one, a tensor
        outside a plan is about to be READY for the first time; clock: the number of a name that says operation, dtype
        and shape (`ALLREDUCE float32 [2, 3]`).

    Of both: MEMORY, at most twice a second; value: resident memory, shared memory included, bytes; extra: memory that
    torch holds on GPUs, KiB.
    """

    FORWARD_BEGIN = 1
    FORWARD_END = 2
    BACKWARD_BEGIN = 3
    BACKWARD_END = 4
    STEP_BEGIN = 5
    STEP_END = 6
    GRADIENT = 7
    FULL = 8
    SUBMITTED = 9
    DONE = 10
    WAIT_BEGIN = 11
    WAIT_END = 12
    COPY_BEGIN = 13
    COPY_END = 14
    APPLY_BEGIN = 15
    APPLY_END = 16

    READY = 32
    NEGOTIATE_BEGIN = 33
    NEGOTIATE_END = 34
    RUN_BEGIN = 35
    RUN_END = 36
    FAILED = 37
    REDUCE_BEGIN = 38
    REDUCE_END = 39
    ENCODE_BEGIN = 40
    ENCODE_END = 41
    DECODE_BEGIN = 42
    DECODE_END = 43
    QUEUED = 44
    SENT = 45
    RECEIVED = 46
    TAKEN = 47
    ANSWERED = 48
    APPLIED = 49
    PLAN = 50
    BUCKET = 51
    MEMBER = 52
    CLOCK = 53
    LOST = 54
    FOUND = 55
    BLOCKED_BEGIN = 56
    BLOCKED_END = 57
    STALL = 58
    VIEW = 59
    TIMELINE = 60
    TENSOR = 61
    GONE = 62
    MEMORY = 63


class Flush(enum.IntEnum):
    """The reason for which a bucket or tensor was handed over when it was."""

    FULL = 1
    """Its last gradient had come."""
    STEP = 2
    """`step()` or `synchronize()` wanted it, complete or not."""
    ALONE = 3
    """A tensor outside a plan, handed over by the script."""
