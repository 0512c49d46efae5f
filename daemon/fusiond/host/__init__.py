"""The process and its host: event loop, threads, files, signals."""
