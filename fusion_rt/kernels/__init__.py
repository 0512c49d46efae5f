"""Arithmetic on buckets: `cpu` (compiled by Numba) and `reference` (numpy, what the others are tested against).

Importing this package loads neither: `import numba` alone takes half a second and some 60 MB.
"""
