"""The `fusion-trace` command shows what a job does, or would do."""
