"""The parts of a host that a process uses: memory, files, sockets, stacks."""
