"""fusion_trace: commands that show what a job does, or would do. Imports only the shared modules of `fusion_rt`."""
