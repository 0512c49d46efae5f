"""Work on the elements of buckets, compiled by Numba: `cpu` reduces and converts, `selection` finds the largest,
`coding` packs indices.

Importing this package loads none of them: `import numba` alone takes half a second and some 60 MB.
"""
