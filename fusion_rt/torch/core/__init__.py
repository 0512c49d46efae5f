"""Ground of the worker: this process's membership of a job, its tensors, devices and process sets."""
