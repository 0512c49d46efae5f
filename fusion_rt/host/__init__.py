"""What a process has of its host: memory, files, sockets, stacks."""
