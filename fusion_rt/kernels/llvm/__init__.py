"""The instructions of kernels: memory at addresses, vectors of elements, and codes of quantised ones."""
